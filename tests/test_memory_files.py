"""Small files of the memory tier: where shared memory is full, another user's, or missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftrun.checkpoint.memory import files
from ftrun.checkpoint.memory.arena import Arena
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.memory.tier import Slot, Tier
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Runner

SMALL = Path(__file__).parent / "scripts" / "small.py"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to act another user")


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the system's temporary files are, for this test."""
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A tiny filesystem that is full."""
    mount = tmp_path / "f"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "none", mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no filesystem can be mounted here: {made.stderr.strip()}")
    try:
        (mount / "fill").write_bytes(bytes(20 * 1024))
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def below(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.rglob("*") if not each.is_dir())


def directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("kept")


def pipe(path: Path) -> None:
    os.mkfifo(path)


OBSTACLES = [(directory, "a directory"), (pipe, "a named pipe")]


@pytest.mark.parametrize(("obstacle", "said"), OBSTACLES)
def test_what_is_no_file_is_not_waited_for_and_moved_aside(
    tmp_path: Path, obstacle: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "0.seal"
    obstacle(path)
    with pytest.raises(OSError, match="no regular file"):
        files.read(path)
    files.put(path, b"first")
    assert files.read(path) == b"first"
    assert f"{path} is {said}, which ftrun never puts there" in caplog.text
    path.unlink()
    obstacle(path)
    files.remove(path)
    assert not path.exists()
    aside = list(tmp_path.glob(".0.seal.*.foreign"))
    assert len(aside) == 2
    assert all((each / "inside").read_text() == "kept" for each in aside if obstacle is directory)


def test_what_a_link_in_a_payloads_place_leads_to_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    tier = Tier(tmp_path / "tier")
    slot = tier.slots(0)[0]
    slot.directory.mkdir(parents=True)
    slot.payload.symlink_to(mine)
    arena = Arena(tier, 0, tmp_path / "fallback")
    memory = arena.memory(slot, 100)
    assert memory.path == slot.payload
    arena.close()
    assert slot.payload.stat().st_size == 100
    slot.payload.unlink()
    slot.payload.symlink_to(mine)
    tier.remove()
    assert mine.read_text() == "precious"


def test_outcomes_are_said_whatever_is_in_the_way(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    tier.create()
    tier.outcomes.rmdir()
    tier.outcomes.write_text("in the way")
    outcome = Outcome("e00000001-s0000000010-00000000", 10, committed=True, reason="", seconds=1.0, size=5)
    Outcomes(tier).put(outcome)
    assert Outcomes(tier).poll() == [outcome]


def test_what_finds_no_room_lies_elsewhere(full: Path, spare: Path) -> None:
    path = full / "0.seal"
    files.put(path, b"first")
    assert path.read_bytes() == b"first"
    files.put(path, b"second" * 5000)
    assert path.read_bytes() == b"second" * 5000
    assert len(below(spare)) == 1
    assert below(full) == ["0.seal", "fill"]
    aside = full / "0.aside"
    path.replace(aside)
    aside.replace(path)
    (full / "fill").unlink()
    files.put(path, b"third")
    assert not path.is_symlink()
    assert below(spare) == []
    assert path.read_bytes() == b"third"
    files.remove(path)
    files.remove(path)
    assert below(full) == []


def test_a_tier_takes_with_it_what_lies_elsewhere(full: Path, spare: Path) -> None:
    tier = Tier(full / "ftrun-0" / "tier")
    tier.create()
    slot = Slot(tier.path / "r00000", 0)
    slot.directory.mkdir()
    slot.mark(slot.drained, "an attempt")
    assert slot.is_marked(slot.drained, "an attempt")
    name = "e00000001-s0000000010-0badcafe"
    Outcomes(tier).put(Outcome(name, 10, committed=True, reason="", seconds=1.0, size=2))
    assert [each.attempt for each in Outcomes(tier).poll()] == [name]
    assert len(below(spare)) == 2
    tier.remove()
    assert not tier.path.exists()
    assert below(spare) == []


def test_no_room_there_either_is_an_error_that_leaves_what_was(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(full))
    (full / "fill").unlink()
    files.put(full / "0.seal", b"first")
    with pytest.raises(OSError, match="No space left"):
        files.put(full / "0.seal", bytes(30_000))
    assert (full / "0.seal").read_bytes() == b"first"
    assert below(full) == ["0.seal"]


@needs_root
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "ftrun-1000" / "tier")
    tier.path.parent.mkdir()
    os.chown(tier.path.parent, 4711, 4711)
    with pytest.raises(PermissionError, match="belongs to user 4711"):
        tier.create()
    with pytest.raises(UsageError, match=r"memory for snapshots.*ftrun-1000.*belongs to user 4711"):
        tier.require()
    assert list(tier.path.parent.iterdir()) == []


def test_a_link_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "ftrun-1000").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is a link"):
        Tier(tmp_path / "ftrun-1000" / "tier").create()
    assert list(elsewhere.iterdir()) == []


def test_without_shared_memory_it_lies_among_temporary_files(tmp_path: Path, spare: Path) -> None:
    tier = Tier.of(tmp_path / "run", 0, where=tmp_path / "nowhere")
    assert tier.path.is_relative_to(spare)
    assert tier.path.name == Tier.of(tmp_path / "run", 0, where=tmp_path).path.name


TINY = """
mount -t tmpfs -o size=12k none /dev/shm
"$@"
code=$?
find /dev/shm -type f -o -type l
exit $code
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root")
def test_a_job_with_next_to_no_shared_memory_keeps_its_checkpoints(runner: Runner) -> None:
    temporary = runner.cwd / "t"
    temporary.mkdir()
    command = ("--nproc", "2", "--name", "tiny", SMALL, "--total", "12")
    under = ("unshare", "-m", "bash", "-c", TINY, "-")
    ended = runner.run(*command, env={"TMPDIR": str(temporary)}, under=under, timeout=100)
    assert ended.code == 0, ended.err
    assert "lacks" in ended.err
    assert "last at step 12" in ended.err
    assert "/dev/shm" not in ended.out, "everything there is gone"
    assert below(temporary / f"ftrun-{os.geteuid()}") == []
