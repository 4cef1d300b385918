"""A root with something else in a file's place, or out of reach: nothing hangs, nothing is lost, and it is told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c
from storage_kit import write_attempt
from typer.testing import CliRunner

from ftrun.checkpoint import epochs, reader, retention
from ftrun.checkpoint.keeper.commit import roll_forward
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.layout import LATEST, MANIFEST, AttemptName, Root, attempt_key, bad_key, pin_key
from ftrun.checkpoint.leftovers import Leftovers
from ftrun.checkpoint.loading.chunks import Chunk
from ftrun.checkpoint.loading.node_cache import NodeCache
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.checkpoint.sealed import seal
from ftrun.checkpoint.storage.base import IrregularError
from ftrun.cli.app import app
from ftrun.errors import CheckpointError, CorruptCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(100)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # such names have to be short
    try:
        with socket.socket(socket.AF_UNIX) as each:
            each.bind(path.name)
    finally:
        os.chdir(here)


KINDS = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "circle": loop,
    "isn't there": dangling,
    "socket": listening,
}


def replace(path: Path, put: Callable[[Path], object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    put(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root.open(tmp_path / "root")
    epochs.claim(made, "run", fresh=False, parent=None)
    epochs.claim(made, "run", fresh=False, parent=None)
    for step in (3, 4, 5):
        made.write(LATEST, str(write_attempt(made, step)).encode())
    return made


NEWEST = AttemptName(1, 5, "00000000")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_read_and_named(root: Root, kind: str) -> None:
    path = replace(root.path / "x" / "y", KINDS[kind])
    with pytest.raises(IrregularError, match=f"{path} is a .*{kind}.*not a plain file: put the file back"):
        root.read("x/y")
    with pytest.raises(IrregularError, match=str(path)), root.opened("x/y"):
        pass
    with pytest.raises(FileNotFoundError):
        root.read("x/z")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_a_proper_manifest_is_passed_over_by_its_path(root: Root, kind: str) -> None:
    path = replace(root.path / attempt_key(NEWEST, MANIFEST), KINDS[kind])
    assert roll_forward(root, "run", since=1, before=2, faults=Faults()) == []
    choice = reader.resume_point(root, "run")
    assert choice.commit is not None
    assert choice.commit.name.step == 4
    ((name, reason),) = choice.skipped
    assert name == str(NEWEST)
    assert str(path) in reason


def test_a_checkpoint_that_was_moved_away_and_linked_is_one_while_the_link_leads_somewhere(root: Root) -> None:
    path = root.path / "ckpt" / str(NEWEST)
    away = path.rename(root.path.parent / "away")
    path.symlink_to(away)
    assert reader.resume_point(root, "run").skipped == ()
    shutil.rmtree(away)
    ((name, reason),) = reader.resume_point(root, "run").skipped
    assert name == str(NEWEST)
    assert f"{path} is a link to {away}, which isn't there" in reason


@pytest.mark.parametrize("kind", ["pipe", "circle"])
@pytest.mark.parametrize(
    "file",
    [
        epochs.epoch_key(2),
        attempt_key(NEWEST, MANIFEST),
        attempt_key(NEWEST, "done/n0000.json"),
        attempt_key(NEWEST, "r00000.json"),
        attempt_key(NEWEST, "r00001.0.safetensors"),
        bad_key(NEWEST),
        pin_key(NEWEST),
        LATEST,
    ],
)
def test_nobody_waits_for_it_and_everybody_copes(root: Root, file: str, kind: str) -> None:
    replace(root.path / file, KINDS[kind])
    assert reader.resume_point(root, "run").commit is not None
    roll_forward(root, "run", since=1, before=3, faults=Faults())
    assert epochs.claim(root, "run", fresh=False, parent=None).epoch == 3
    for words in (["ls"], ["show"], ["verify", "--all"], ["prune", "--dry-run"]):
        result = CliRunner().invoke(app, ["ckpt", words[0], str(root.path), *words[1:]])
        assert result.exit_code in (0, 1), result.output
        assert isinstance(result.exception, SystemExit | None)
    swept = Leftovers(root, run_id="run", epoch=3, wait=0.0)
    swept.sweep()
    swept.sweep()
    retention.apply(root, retention.KeepPolicy(2), run_id="run", since=1, parent=None)
    assert reader.resume_point(root, "run").commit is not None


@pytest.mark.parametrize("kind", ["isn't there", "directory"])
def test_a_checkpoint_with_an_odd_manifest_is_no_leftover(root: Root, kind: str) -> None:
    replace(root.path / attempt_key(NEWEST, MANIFEST), KINDS[kind])
    before = root.files(NEWEST)
    swept = Leftovers(root, run_id="run", epoch=epochs.claim(root, "run", fresh=False, parent=None).epoch, wait=0.0)
    root.write(LATEST, b"")  # which would spare it
    assert (swept.sweep(), swept.sweep()) == ([], [])
    assert root.files(NEWEST) == before


def test_a_link_that_leads_nowhere_is_no_place_for_a_root(tmp_path: Path) -> None:
    (tmp_path / "root").symlink_to("away/for/now")
    root = Root.open(tmp_path / "root")
    with pytest.raises(FileNotFoundError, match=f"leads nowhere.*{root.path}"):
        root.create("epochs/00000001.json", b"x")
    assert not (tmp_path / "away").exists()


# --- what can't be read is not damaged


def newer(path: Path) -> None:
    document = {"format": 99, "ftrun": "9.9", "attempt": str(NEWEST)}
    path.write_bytes(seal(document, "manifest_crc"))


@pytest.mark.parametrize("put", [os.mkfifo, newer])
def test_what_can_not_be_read_is_not_marked_as_bad(root: Root, put: Callable[[Path], object]) -> None:
    replace(root.path / attempt_key(NEWEST, MANIFEST), put)
    result = CliRunner().invoke(app, ["ckpt", "verify", str(root.path), "--all", "--mark-bad"])
    assert result.exit_code == 1
    assert "NOT READABLE" in result.output
    assert root.bad() == []


def test_nothing_is_marked_in_the_place_where_a_root_was_mounted(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with pytest.raises(CheckpointError, match="is it mounted"):
        reader.mark_bad(Root.open(tmp_path / "mount"), NEWEST, "r00000.json is missing")
    assert list((tmp_path / "mount").iterdir()) == []


ROLL = """
import sys
from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.commit import roll_forward
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.layout import Root
root = Root.open(sys.argv[1])
assert roll_forward(root, "run", since=1, before=2, faults=Faults()) == []
choice = reader.resume_point(root, "run")
print(choice.commit.name.step, choice.skipped)
"""


def without_privileges(*command: str) -> subprocess.CompletedProcess[str]:
    """Run something that files' permissions hold for, whoever runs the tests."""
    drop = "-dac_override,-dac_read_search"
    prefix = ["setpriv", "--bounding-set", drop, "--inh-caps", drop] if os.geteuid() == 0 else []
    if prefix and shutil.which("setpriv") is None:
        pytest.skip("permissions don't hold for root, and there is no setpriv")
    return subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("what", [f"ckpt/{NEWEST}", attempt_key(NEWEST, MANIFEST), attempt_key(NEWEST, "r00000.json")])
def test_a_checkpoint_that_may_not_be_read_is_passed_over_with_its_reason(root: Root, what: str) -> None:
    (root.path / what).chmod(0)
    done = without_privileges(sys.executable, "-c", ROLL, str(root.path))
    (root.path / what).chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 ")
    assert "Permission denied" in done.stdout


@pytest.mark.parametrize("what", ["ckpt", "epochs", "bad"])
def test_a_root_that_may_not_be_read_is_no_fresh_start(root: Root, what: str) -> None:
    (root.path / what).mkdir(exist_ok=True)
    (root.path / what).chmod(0)
    done = without_privileges(sys.executable, "-c", ROLL, str(root.path))
    (root.path / what).chmod(0o700)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"can't list {root.url}/{what}: Permission denied" in last


def test_a_root_that_is_away_while_a_run_restores_is_no_damage(root: Root) -> None:
    (root.path / "ckpt" / str(NEWEST) / MANIFEST).unlink()
    with pytest.raises(CorruptCheckpoint, match="is missing"):
        open_stored(root, NEWEST, 0, 1)
    root.path.rename(root.path.with_name("away"))
    root.path.mkdir()
    with pytest.raises(CheckpointError, match="is it mounted") as caught:
        open_stored(root, NEWEST, 0, 1)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_what_somebody_removes_of_a_download_is_downloaded_again(tmp_path: Path) -> None:
    content = bytes(range(256))
    chunk = Chunk("r00000.json", len(content), 0, crc32c(content))

    def deliver(file: str, offset: int, view: memoryview) -> None:
        view[:] = content[offset : offset + len(view)]

    cache = NodeCache(lambda: tmp_path / "restore", str(NEWEST), deliver)
    os.close(cache.open(chunk))
    (tmp_path / "restore" / str(NEWEST) / chunk.file).unlink()  # as those do who clean up /tmp
    descriptor = cache.open(chunk)
    assert os.pread(descriptor, 300, 0) == content
    os.close(descriptor)
    cache.close()
