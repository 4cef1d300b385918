"""What lies sealed in memory and must never be committed: bytes that changed, records that can't be read back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import eventually
from keeper_kit import Node, a_record, name_of, nodes_fixture  # noqa: F401

from ftrun import events
from ftrun.checkpoint.checksums import CHUNK, record_of
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.layout import rank_json
from ftrun.checkpoint.memory.tier import put
from ftrun.checkpoint.sealed import seal

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., Node]

A, B, C = (name_of(1, step) for step in (10, 20, 30))


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def assert_refused(node: Node, words: str) -> None:
    """A was refused with these words, nothing of it is left, and the save after it was committed."""
    outcome = node.outcome(A)
    assert not outcome.committed
    assert words in outcome.reason, outcome.reason
    assert node.outcome(B).committed, node.log()
    node.assert_whole(B)
    assert node.keepers[-1].finish(60)
    assert [str(each) for each in node.root.attempts()] == [B]
    failed = [each for each in node.events() if isinstance(each, events.SaveFailed)]
    assert [each.checkpoint for each in failed] == [A]
    assert words in failed[0].error


def first(path: Path) -> None:
    flip(path, 0)


def last(path: Path) -> None:
    flip(path, -1)


@pytest.mark.parametrize(
    ("damage", "part", "local"),
    [
        (last, "payload", False),
        (zero, "payload", True),
        (first, "payload", True),
        (first, "record", False),
        (zero, "record", True),
    ],
)
def test_bytes_that_changed_in_memory_are_not_committed(
    nodes: Make, tmp_path: Path, damage: Callable[[Path], None], part: str, *, local: bool
) -> None:
    node = nodes(world=2, local=str(tmp_path / "nvme") if local else "")
    node.begin()
    node.seal(A, 0)
    damage(getattr(node.tier.slots(1)[0], part))
    node.seal(B, 1)
    node.keeper()
    path = node.tier.slots(1)[0].payload if part == "payload" else node.tier.slots(1)[0].record
    assert_refused(node, f"{path} has changed since it was written")
    assert not (tmp_path / "nvme" / A).exists()


def stopped_in_the_middle(node: Node) -> int:
    """The process of a keeper that has read half of the first file."""
    pid = node.keeper("root.middle:stop").pid
    assert pid is not None
    stat = Path(f"/proc/{pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="a keeper that is stopped")
    return pid


def test_bytes_that_change_while_they_are_drained_are_not_committed(nodes: Make) -> None:
    node = nodes()
    node.begin()
    size = 2 * CHUNK + 1000
    node.seal(A, size=size)
    pid = stopped_in_the_middle(node)
    flip(node.tier.slots(0)[0].payload, size - 500)
    os.kill(pid, signal.SIGCONT)
    node.seal(B, 1)
    assert_refused(node, f"chunk 2 (bytes {2 * CHUNK} to {size - 1}) fails its checksum")


def test_bytes_that_make_way_while_they_are_drained_are_not_called_damaged(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A, size=CHUNK)
    pid = stopped_in_the_middle(node)
    slot = node.tier.slots(0)[0]
    slot.seal.unlink()
    flip(slot.payload, -1)
    os.kill(pid, signal.SIGCONT)
    node.seal(B, 1)
    assert_refused(node, "its memory was taken for another snapshot while it was copied")


def not_json(_: bytes) -> bytes:
    return b"\0" * 500


def of_another_save(_: bytes) -> bytes:
    return a_record(C, 0).to_bytes()


def of_another_rank(_: bytes) -> bytes:
    return a_record(A, 1).to_bytes()


def no_tensor(content: bytes) -> bytes:
    document = json.loads(content)
    del document["crc"]
    document["tensors"] = {"w": ["uint8"]}
    return seal(document, sort=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (not_json, "the record of rank 0 can't be read back: r00000.json holds nothing but 500 zero bytes"),
        (no_tensor, "the record of rank 0 can't be read back: r00000.json has a malformed tensor"),
        (of_another_save, f"r00000.json is that of rank 0 of {C}"),
        (of_another_rank, f"r00000.json is that of rank 1 of {A}"),
    ],
)
def test_a_record_that_no_restart_could_use_is_not_committed(
    nodes: Make, change: Callable[[bytes], bytes], words: str
) -> None:
    node = nodes()
    node.begin()
    node.seal(A, 0)
    slot = node.tier.slots(0)[0]
    sealed = slot.read_seal()
    assert sealed is not None
    content = change(slot.record.read_bytes())
    slot.record.write_bytes(content)
    files: dict[str, Any] = sealed.files | {rank_json(0): (str(slot.record), record_of(content))}
    node.seal_rank(A, 0, slot)
    slot.record.write_bytes(content)
    put(slot.seal, _with_files(sealed, files))
    node.seal(B, 1)
    node.keeper()
    assert_refused(node, words)


def _with_files(sealed: Any, files: dict[str, Any]) -> bytes:
    from dataclasses import replace

    return replace(sealed, files=files).to_bytes()


# --- something else where a file of the tier should be ------------------------------------------------------------


def directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def elsewhere(path: Path) -> None:
    other = path.parent.parent / "other"
    other.write_text("somebody's")
    path.symlink_to(other)


OBSTACLES = [directory, pipe, loop, elsewhere]
BESIDE = ["keeper.json", "keeper.log", "keeper.sock", "keeper.beat", "progress.json", "epoch.json", "outcomes"]


@pytest.mark.parametrize("part", ["seal", "record", "payload", "draining", "drained"])
def test_obstacles_in_slots_cost_that_snapshot_at_most(nodes: Make, part: str) -> None:
    node = nodes(world=len(OBSTACLES))
    node.begin()
    node.seal(A, 0)
    for rank, obstacle in enumerate(OBSTACLES):
        path = getattr(node.tier.slots(rank)[0], part)
        path.unlink(missing_ok=True)
        obstacle(path)
    node.seal(B, 1)
    keeper = node.keeper()
    assert node.outcome(B).committed
    if part in ("record", "payload"):
        outcome = node.outcome(A)
        assert not outcome.committed
        assert str(getattr(node.tier.slots(0)[0], part)) in outcome.reason
    assert keeper.finish(60), node.log()
    assert node.committed() == ([B] if part in ("seal", "record", "payload") else [B, A])
    assert not node.tier.path.exists()


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_obstacles_beside_the_slots_are_moved_aside(
    nodes: Make, obstacle: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    node = nodes()
    node.begin()
    node.seal(A, 0)
    (node.tier.path / "outcomes").rmdir()
    (node.tier.path / "epoch.json").unlink()
    for name in BESIDE:
        obstacle(node.tier.path / name)
    keeper = node.keeper()
    assert node.outcome(A).committed, node.log()
    log = node.log()
    assert keeper.finish(60), node.log()
    if obstacle in (directory, pipe):
        for name, said in (("keeper.json", caplog.text), ("keeper.log", caplog.text), ("keeper.beat", log)):
            assert f"{node.tier.path / name} is a" in said
    if obstacle is elsewhere:
        assert (node.tier.path.parent / "other").read_text() == "somebody's"


def test_a_keepers_settings_that_are_damaged_are_not_followed(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.keeper()
    path = KeeperConfig.path(node.tier)
    assert KeeperConfig.read(node.tier) is not None
    path.write_bytes(path.read_bytes().replace(b"checkpoints", b"checkqoints"))
    assert KeeperConfig.read(node.tier) is None
