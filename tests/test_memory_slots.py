"""Memory of slots: its size, its pages, and what happens when there is too little of it."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from typing import TYPE_CHECKING

import pytest
import torch

from ftrun.checkpoint.memory.arena import Arena
from ftrun.checkpoint.memory.slot_memory import NoRoomError, SlotMemory
from ftrun.checkpoint.memory.tier import SHARED_MEMORY, Slot, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 2**20


@pytest.fixture
def shared() -> Iterator[Path]:
    """A file in real shared memory."""
    path = SHARED_MEMORY / f"ftrun-test-{uuid.uuid4().hex[:8]}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    made = Tier(tmp_path / "shm" / "user" / "tier")
    made.create()
    return made


def held(path: Path) -> int:
    return path.stat().st_blocks * 512


def room(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def write(memory: SlotMemory, value: int) -> None:
    memory.tensor(torch.uint8, 0, (memory.size,)).fill_(value)


def test_a_file_has_the_size_of_the_payload_and_all_its_pages(shared: Path) -> None:
    memory = SlotMemory(shared)
    for size in (3 * MIB + 17, 5 * MIB, 4096, 1, 3 * MIB):
        memory.resize(size)
        assert shared.stat().st_size == memory.size == size
        assert held(shared) >= size
        memory.populate()
        write(memory, 7)
        assert set(shared.read_bytes()) == {7}
    assert shared.stat().st_mode & 0o777 == 0o600
    memory.close()


def test_the_pages_are_used_again_by_the_next_attempt(shared: Path) -> None:
    first = SlotMemory(shared)
    first.resize(MIB)
    write(first, 5)
    inode = shared.stat().st_ino
    second = SlotMemory(shared)
    second.resize(MIB)
    assert shared.stat().st_ino == inode
    assert set(shared.read_bytes()) == {5}
    write(second, 6)
    assert int(first.tensor(torch.uint8, 0, (MIB,)).min()) == 6
    first.close()
    second.close()


def test_a_sparse_leftover_gets_its_pages(shared: Path) -> None:
    with shared.open("wb") as file:
        file.truncate(4 * MIB)
    memory = SlotMemory(shared)
    memory.resize(4 * MIB)
    assert held(shared) >= 4 * MIB
    memory.close()


def test_a_file_that_somebody_removed_is_made_again(shared: Path) -> None:
    memory = SlotMemory(shared)
    memory.resize(MIB)
    shared.unlink()
    memory.resize(MIB)
    write(memory, 3)
    assert set(shared.read_bytes()) == {3}
    memory.close()


def test_too_little_room_is_an_error_with_the_bytes_that_are_missing(shared: Path) -> None:
    memory = SlotMemory(shared)
    memory.resize(MIB)
    wanted = room(shared.parent) + 4096 * MIB  # others take some of it, and give it back, at the same time
    with pytest.raises(NoRoomError) as caught:
        memory.resize(wanted)
    assert 2048 * MIB < caught.value.missing < 6144 * MIB
    assert held(shared) == 0, "a refused file keeps no room from others"
    memory.resize(MIB)
    write(memory, 1)
    memory.close()


def test_typed_parts(tmp_path: Path) -> None:
    memory = SlotMemory(tmp_path / "new" / "0.safetensors")
    memory.resize(64)
    memory.tensor(torch.bfloat16, 8, (2, 3)).fill_(1)
    assert memory.tensor(torch.uint8, 8, (12,)).tolist() == [128, 63] * 6
    assert memory.tensor(torch.int64, 16, ()).shape == ()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    memory.close()


class Scarce(SlotMemory):
    """Memory in a directory that has room for so many bytes in all: what a small /dev/shm would do."""

    limit = 0

    def resize(self, size: int) -> None:
        if "shm" in self.path.parts:
            others = sum(held(each) for each in self.path.parent.glob("*.safetensors") if each != self.path)
            if others + size > self.limit:
                if self.path.exists():
                    os.truncate(self.path, 0)
                raise NoRoomError(self.path, others + size - self.limit)
        super().resize(size)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> type[Scarce]:
    monkeypatch.setattr("ftrun.checkpoint.memory.arena.SlotMemory", Scarce)
    return Scarce


def arena_of(tier: Tier, tmp_path: Path) -> Arena:
    return Arena(tier, 3, tmp_path / "files")


def test_two_slots_are_prepared(tier: Tier, tmp_path: Path) -> None:
    arena = arena_of(tier, tmp_path)
    arena.prepare(MIB)
    assert [held(slot.payload) >= MIB for slot in arena.slots()] == [True, True]
    assert not (tmp_path / "files").exists()
    assert [path.stat().st_mode & 0o777 for path in (tier.path.parent, tier.path, tier.path / "r00003")] == [0o700] * 3
    arena.close()


def test_what_is_sealed_stays_until_a_save_takes_the_slot(tier: Tier, tmp_path: Path) -> None:
    first, second = tier.slots(3)
    first.directory.mkdir()
    for slot, content in ((first, b"x" * 100), (second, b"y" * MIB)):
        slot.payload.write_bytes(content)
        slot.seal.write_bytes(b"sealed")
    arena = arena_of(tier, tmp_path)
    arena.prepare(MIB)
    assert first.payload.read_bytes() == b"x" * 100
    assert second.payload.read_bytes() == b"y" * MIB
    assert arena.memory(first, MIB).size == first.payload.stat().st_size == MIB
    arena.close()


def test_room_for_one(tier: Tier, tmp_path: Path, scarce: type[Scarce], caplog: pytest.LogCaptureFixture) -> None:
    scarce.limit = MIB + 4096
    arena = arena_of(tier, tmp_path)
    with caplog.at_level(logging.WARNING):
        arena.prepare(MIB)
        arena.prepare(MIB)
    assert arena.slots() == tier.slots(3)[:1]
    (message,) = (record.getMessage() for record in caplog.records)
    assert f"lacks {MIB - 4096:,} bytes" in message
    assert "one snapshot is kept in memory" in message
    assert "--shm-size" in message
    arena.close()


def test_room_for_none(tier: Tier, tmp_path: Path, scarce: type[Scarce], caplog: pytest.LogCaptureFixture) -> None:
    scarce.limit = 0
    arena = arena_of(tier, tmp_path)
    with caplog.at_level(logging.WARNING):
        arena.prepare(MIB)
    slots = arena.slots()
    assert len(slots) == 2
    assert len(caplog.records) == 1
    for slot in slots:
        memory = arena.memory(slot, MIB)
        write(memory, 9)
        assert memory.path.is_relative_to(tmp_path / "files")
        assert slot.payload.is_symlink()
        assert set(slot.payload.read_bytes()) == {9}
    arena.close()
    again = arena_of(tier, tmp_path)
    assert again.memory(slots[0], MIB).path.is_relative_to(tmp_path / "files")
    again.close()


def test_growth_takes_the_room_of_an_idle_slot_only(tier: Tier, tmp_path: Path, scarce: type[Scarce]) -> None:
    scarce.limit = 4 * MIB
    first, second = tier.slots(3)
    for idle, usable, place in (([first], (second,), "shm"), ([], (first, second), "files")):
        arena = arena_of(tier, tmp_path)
        arena.prepare(2 * MIB)
        memory = arena.memory(second, 3 * MIB, idle)
        assert arena.slots() == usable
        assert place in memory.path.parts
        assert memory.path.stat().st_size == 3 * MIB
        arena.close()


def test_not_even_files(tier: Tier, tmp_path: Path, scarce: type[Scarce]) -> None:
    scarce.limit = 0
    (tmp_path / "files").write_text("in the way")
    arena = arena_of(tier, tmp_path)
    with pytest.raises(OSError, match="files"):
        arena.memory(tier.slots(3)[0], MIB)
    with contextlib.suppress(OSError):
        arena.prepare(MIB)
    arena.close()


def test_a_slot_knows_its_files(tmp_path: Path) -> None:
    slot = Slot(tmp_path, 1)
    slot.mark(slot.drained, "e1")
    assert slot.is_marked(slot.drained, "e1")
    assert not slot.is_marked(slot.drained, "e2")
    assert not slot.is_marked(slot.draining, "e1")


def test_a_seal_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    tier.create()
    assert tier.damaged() == []
    first, second = tier.slots(0)
    first.directory.mkdir()
    first.seal.write_bytes(b'{"attempt":1,\n"crc":"00000000"}\n')
    second.seal.mkdir()
    assert tier.damaged() == [
        (first, "differs from its own checksum (crc)"),
        (second, "can't be read: it is no regular file"),
    ]
    assert tier.sealed() == []
