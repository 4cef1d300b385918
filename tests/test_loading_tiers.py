"""Reading from the nearest tier that holds the same bytes: sealed memory, the local tier, the root, near and far."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import eventually
from loading_kit import NAME, Written, commit, flip, in_rows, path_of, replicated, seal, written

from ftrun.checkpoint.checksums import CHUNK, record_of
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root, rank_json, rank_shard
from ftrun.checkpoint.loading import files as loading_files
from ftrun.checkpoint.loading.chunks import Chunk, Damaged
from ftrun.checkpoint.loading.node_cache import NodeCache, roomy
from ftrun.checkpoint.loading.sealed import SealedPoint, choose, newest_sealed
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.checkpoint.memory import files as memory_files
from ftrun.checkpoint.memory.tier import Tier
from ftrun.errors import CheckpointError, CorruptCheckpoint, LostSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WEIGHTS = torch.arange(300_000.0)
FILES = {"payload": rank_shard(1), "record": rank_json(1)}


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "memory")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def made(world_size: int = 2, name: AttemptName = NAME, offset: float = 0.0) -> Written:
    state = {"w": WEIGHTS + offset}
    return written(
        world_size,
        lambda rank: {"tracked": {"it": state}, "extra": {"rank": rank}},
        replicated(world_size),
        name,
    )


def keep(local: Path, written: Written) -> Path:
    directory = local / str(written.name)
    directory.mkdir(parents=True)
    for file, content in written.files.items():
        (directory / file).write_bytes(content)
    return directory


def read(root: Root, rank: int = 0, world_size: int = 1, **options: Any) -> tuple[torch.Tensor, tuple[str, ...]]:
    state = open_stored(root, NAME, rank, world_size, **options)
    tensor = state.value("tracked", "it")["w"]
    notes = state.notes
    state.close()
    return tensor, notes


# --- which snapshot ------------------------------------------------------------------------------------------


def test_the_newest_snapshot_that_all_ranks_sealed(tier: Tier) -> None:
    assert newest_sealed(tier, "run", 0) is None
    older, newer = AttemptName(2, 900, "00000001"), AttemptName(3, 20, "00000002")
    seal(tier, made(2, older), 0)
    assert newest_sealed(tier, "run", 0) == SealedPoint(str(older), 900, 2)
    seal(tier, made(2, newer), 1, ranks=[0])
    assert newest_sealed(tier, "run", 0) == SealedPoint(str(older), 900, 2)
    seal(tier, made(2, newer), 1, ranks=[1])
    assert newest_sealed(tier, "run", 0) == SealedPoint(str(newer), 20, 2)
    assert newest_sealed(tier, "run", 3) == SealedPoint(str(newer), 20, 2)
    assert newest_sealed(tier, "run", 4) is None
    assert newest_sealed(tier, "other", 0) is None


def test_snapshots_of_which_a_node_has_only_a_part_are_left_alone(tier: Tier) -> None:
    seal(tier, made(3), ranks=[0, 1])
    assert newest_sealed(tier, "run", 0) is None


def lost(path: Path) -> None:
    path.unlink()


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("damage", [lost, shorter, longer, linked])
@pytest.mark.parametrize("part", ["payload", "record"])
def test_snapshots_whose_files_are_not_whole_are_left_alone(
    tier: Tier, damage: Callable[[Path], None], part: str
) -> None:
    seal(tier, made())
    damage(getattr(tier.slots(1)[0], part))
    assert newest_sealed(tier, "run", 0) is None


def test_a_record_that_found_no_room_in_shared_memory_is_no_damage(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    seal(tier, made())
    record = tier.slots(1)[0].record
    elsewhere = memory_files._spare_of(record)
    elsewhere.parent.mkdir(parents=True)
    record.rename(elsewhere)
    record.symlink_to(elsewhere)
    assert newest_sealed(tier, "run", 0) == SealedPoint(str(NAME), NAME.step, 2)
    shorter(elsewhere)
    assert newest_sealed(tier, "run", 0) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": "e3-s20"},
        {"attempt": None},
        {"step": 21},
        {"rank": 2},
        {"rank": True},
        {"rank": -1},
        {"world_size": 3},
        {"world_size": "2"},
        {"node_ranks": (0, "x")},
        {"total": 5},
        {"files": {}},
        {"files": {"../r00001.json": ("x", record_of(b"x")), "r00001.json": ("x", record_of(b"x"))}},
    ],
    ids=str,
)
def test_seals_that_make_no_sense_are_left_alone(tier: Tier, changes: dict[str, Any]) -> None:
    seals = seal(tier, made())
    assert choose(seals, "run", 0) is not None
    assert choose([seals[0], replace(seals[1], **changes)], "run", 0) is None


def test_choosing_a_snapshot_needs_no_torch() -> None:
    code = "import sys, ftrun.checkpoint.loading.sealed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- a snapshot that nobody has committed ---------------------------------------------------------------------


def test_a_snapshot_is_read_from_memory_alone(root: Root, tier: Tier) -> None:
    seal(tier, made())
    for rank, world_size in ((0, 1), (1, 2), (2, 3)):
        tensor, notes = read(root, rank, world_size, tier=tier, sealed=True)
        assert torch.equal(tensor, WEIGHTS)
        assert notes == ()
    state = open_stored(root, NAME, 1, 2, tier=tier, sealed=True)
    assert (state.manifest, state.reason, state.world_size, state.step) == (None, "interval", 2, 20)
    assert state.value("extra", "rank") == 1
    assert not root.path.exists()


def refill(tier: Tier) -> None:
    """What a worker does that takes a slot for its next snapshot."""
    seal(tier, made(2, AttemptName(3, 30, "0000abcd"), 1.0), ranks=[1])


def test_a_slot_that_is_filled_anew_while_it_is_read_is_noticed(root: Root, tier: Tier) -> None:
    seal(tier, made())
    state = open_stored(root, NAME, 0, 1, tier=tier, sealed=True)
    outline = state.outline("tracked", "it")
    refill(tier)
    with pytest.raises(LostSnapshot, match=r"memory can't be used.*replaced by a later.*isn't committed either"):
        state.fill(outline)


def test_a_snapshot_that_was_committed_meanwhile_is_read_from_there(root: Root, tier: Tier) -> None:
    seal(tier, made())
    state = open_stored(root, NAME, 0, 1, tier=tier, sealed=True)
    commit(root, made())
    refill(tier)
    assert torch.equal(state.value("tracked", "it")["w"], WEIGHTS)
    assert state.manifest is not None
    assert "its commit is read instead" in state.notes[0]


def test_a_snapshot_that_is_gone_is_read_from_its_commit(root: Root, tier: Tier) -> None:
    with pytest.raises(LostSnapshot, match="not all of its ranks have sealed it"):
        open_stored(root, NAME, 0, 1, tier=tier, sealed=True)
    commit(root, made())
    seal(tier, made(), ranks=[0])
    assert torch.equal(read(root, tier=tier, sealed=True)[0], WEIGHTS)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def at_the_start(path: Path) -> None:
    flip(path, 0)


@pytest.mark.parametrize("damage", [zeroed, flip, at_the_start, shorter, longer, lost])
@pytest.mark.parametrize("part", ["payload", "record"])
def test_damage_in_memory_is_noticed_without_a_manifest(
    root: Root, tier: Tier, damage: Callable[[Path], None], part: str
) -> None:
    seal(tier, made())
    damage(getattr(tier.slots(1)[0], part))
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(CorruptCheckpoint, match=f"{FILES[part]} .* in this node's memory, and it isn't committed"):
            read(root, rank, world_size, tier=tier, sealed=True)
    commit(root, made())
    assert torch.equal(read(root, tier=tier, sealed=True)[0], WEIGHTS)


def test_damage_in_one_ranks_memory_is_noticed_by_that_rank_where_each_reads_its_own(root: Root, tier: Tier) -> None:
    state = {"w": WEIGHTS}
    seal(tier, written(2, lambda rank: {"tracked": {"it": state}, "extra": {"own": WEIGHTS + rank}}, in_rows(2)))
    zeroed(tier.slots(1)[0].payload)
    mine = open_stored(root, NAME, 0, 2, tier=tier, sealed=True)
    assert torch.equal(mine.value("extra", "own"), WEIGHTS)
    other = open_stored(root, NAME, 1, 2, tier=tier, sealed=True)
    with pytest.raises(CorruptCheckpoint, match=r"chunk 0 .* fails its checksum"):
        other.value("extra", "own")


@pytest.mark.parametrize("damage", [flip, lost])
def test_a_whole_local_copy_stands_in_for_damaged_memory(
    root: Root, tier: Tier, local: Path, damage: Callable[[Path], None]
) -> None:
    seal(tier, made())
    copies = keep(local, made())
    damage(tier.slots(1)[0].payload)
    tensor, notes = read(root, tier=tier, local=local, sealed=True)
    assert torch.equal(tensor, WEIGHTS)
    assert [f"{rank_shard(1)} in memory" in note for note in notes] == [True]
    flip(copies / rank_shard(1))
    with pytest.raises(CorruptCheckpoint, match=f"{rank_shard(1)} .* in this node's memory"):
        read(root, tier=tier, local=local, sealed=True)


def test_a_sealed_record_that_can_not_be_read_back_is_an_error(root: Root, tier: Tier) -> None:
    snapshot = made()
    snapshot.files[rank_json(1)] = b"{}"
    seal(tier, snapshot)
    with pytest.raises(CorruptCheckpoint, match=r"r00001\.json is torn"):
        read(root, tier=tier, sealed=True)


# --- a commit of which nearer tiers hold copies ----------------------------------------------------------------


def test_the_nearest_copy_is_read(root: Root, tier: Tier, local: Path) -> None:
    commit(root, made())
    keep(local, made())
    seal(tier, made())
    for file in made().files:
        path_of(root, file).unlink()
    assert torch.equal(read(root, tier=tier)[0], WEIGHTS)
    assert torch.equal(read(root, local=local)[0], WEIGHTS)
    with pytest.raises(CorruptCheckpoint, match=r"r00000\.json is missing"):
        read(root)


def test_what_another_snapshot_or_checkpoint_left_is_no_copy(root: Root, tier: Tier, local: Path) -> None:
    commit(root, made())
    other = AttemptName(3, 20, "deadbeef")
    seal(tier, made(2, other, 1.0))
    keep(local, made(2, other, 1.0))
    tensor, notes = read(root, tier=tier, local=local)
    assert torch.equal(tensor, WEIGHTS)
    assert notes == ()


@pytest.mark.parametrize("part", ["payload", "record"])
@pytest.mark.parametrize("damage", [flip, shorter, longer])
def test_damage_in_a_nearer_tier_costs_nothing_but_a_note(
    root: Root, tier: Tier, local: Path, part: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    commit(root, made())
    seal(tier, made())
    damage(getattr(tier.slots(1)[0], part))
    damage(keep(local, made()) / FILES[part])
    tensor, notes = read(root, tier=tier, local=local)
    assert torch.equal(tensor, WEIGHTS)
    assert [f"{FILES[part]} in memory" in notes[0], f"{FILES[part]} in the local tier" in notes[1]] == [True, True]
    assert len(notes) == 2
    assert notes[0] in caplog.text


def test_a_missing_local_file_is_nothing_to_speak_of(root: Root, local: Path) -> None:
    commit(root, made())
    (keep(local, made()) / rank_shard(0)).unlink()
    tensor, notes = read(root, local=local)
    assert torch.equal(tensor, WEIGHTS)
    assert notes == ()


def test_a_slot_that_is_filled_anew_leaves_the_other_tiers(root: Root, tier: Tier) -> None:
    commit(root, made())
    seal(tier, made())
    state = open_stored(root, NAME, 0, 1, tier=tier)
    refill(tier)
    assert torch.equal(state.value("tracked", "it")["w"], WEIGHTS)
    assert "in memory" in state.notes[0]


@pytest.mark.parametrize("file", [rank_shard(0), rank_shard(1), rank_json(0), rank_json(1)])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"chunk 0 \(bytes 0 to \d+\) fails its checksum"),
        (lambda path: flip(path, 0), r"chunk 0 \(bytes 0 to \d+\) fails its checksum"),
        (shorter, r"ends before its \d+ bytes"),
        (longer, r"is longer than its \d+ bytes"),
        (lost, "is missing"),
    ],
)
def test_damage_in_the_root_is_an_error_that_names_the_file(
    root: Root, tier: Tier, file: str, damage: Callable[[Path], None], message: str
) -> None:
    commit(root, made())
    damage(path_of(root, file))
    with pytest.raises(CorruptCheckpoint, match=f"{file} {message}") as caught:
        read(root)
    assert caught.value.attempt == str(NAME)
    assert caught.value.detail.startswith(file)
    seal(tier, made())
    assert torch.equal(read(root, tier=tier)[0], WEIGHTS)


@pytest.mark.parametrize("position", [0, 40, -10])
def test_a_damaged_manifest_is_an_error(root: Root, position: int) -> None:
    commit(root, made())
    flip(path_of(root, MANIFEST), position)
    with pytest.raises(CorruptCheckpoint, match=r"MANIFEST\.json"):
        read(root)


def test_a_root_that_can_not_be_read_is_no_damage(root: Root) -> None:
    commit(root, made())
    path = path_of(root, rank_shard(0))
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptCheckpoint, match="is no regular file"):
        read(root)
    path.rmdir()
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match=r"r00000\.0\.safetensors can't be read: .*; check the storage") as caught:
        read(root)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_damage_in_one_of_many_chunks_is_found_by_every_number_of_threads(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {"w": torch.arange(3.0 * CHUNK / 4)}
    commit(root, written(1, lambda rank: {"tracked": {"it": big}}, replicated(1)))
    for threads in (1, 3):
        monkeypatch.setattr(loading_files, "num_threads", lambda ranks, threads=threads: threads)
        assert torch.equal(read(root)[0], big["w"])
    flip(path_of(root, rank_shard(0)), 2 * CHUNK + 5)
    for threads in (1, 3):
        monkeypatch.setattr(loading_files, "num_threads", lambda ranks, threads=threads: threads)
        with pytest.raises(CorruptCheckpoint, match=rf"chunk 2 \(bytes {2 * CHUNK} to"):
            read(root)


# --- a root far away -------------------------------------------------------------------------------------------


class Far:
    """A root without paths that counts what is downloaded."""

    url = "far://bucket/run"

    def __init__(self, root: Root) -> None:
        self._root = root
        self.asked: list[tuple[str, int, int]] = []
        self.broken = 0

    def open_local(self, key: str) -> None:
        return None

    def read(self, key: str) -> bytes:
        return self._root.read(key)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self.asked.append((key, offset, len(view)))
        self._root.read_into(key, offset, view)
        if self.broken:
            self.broken -= 1
            view[0] ^= 1


@pytest.fixture
def far(root: Root) -> Any:
    return Far(root)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_all_ranks_of_a_node_download_each_byte_once(root: Root, far: Any, elsewhere: Path) -> None:
    state = {"w": torch.arange(CHUNK / 2)}  # two chunks over two files
    commit(root, written(2, lambda rank: {"tracked": {"it": state}}, replicated(2)))
    opened = [open_stored(far, NAME, rank, 3) for rank in range(3)]
    for each in opened:
        assert torch.equal(each.value("tracked", "it")["w"], state["w"])
    assert len(far.asked) == len(set(far.asked))
    sizes = [path_of(root, file).stat().st_size for file in (rank_json(0), rank_json(1), rank_shard(0), rank_shard(1))]
    assert sum(size for _, _, size in far.asked) == sum(sizes)
    for each in opened[:2]:
        each.close()
    assert any(elsewhere.rglob(rank_shard(0)))
    opened[2].close()
    assert not list(elsewhere.rglob("restore*"))


@pytest.mark.usefixtures("elsewhere")
def test_only_chunks_that_are_wanted_are_downloaded(root: Root, far: Any) -> None:
    state = {"a": torch.arange(CHUNK / 4), "b": torch.arange(CHUNK / 4)}
    commit(root, written(1, lambda rank: {"tracked": state}, replicated(1)))
    stored = open_stored(far, NAME, 0, 1)
    assert torch.equal(stored.value("tracked", "a"), state["a"])
    assert {offset for key, offset, _ in far.asked if key.endswith("safetensors")} == {0, CHUNK}
    stored.close()


@pytest.mark.usefixtures("elsewhere")
def test_what_was_damaged_on_the_way_is_downloaded_again(root: Root, far: Any) -> None:
    commit(root, made())
    far.broken = 1
    assert torch.equal(read(far)[0], WEIGHTS)
    flip(path_of(root, rank_shard(1)))
    with pytest.raises(CorruptCheckpoint, match=r"r00001\.0\.safetensors chunk 0 .*fails its checksum"):
        read(far)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("damage", "message"), [(lost, "is missing"), (shorter, "ends before its")])
def test_missing_and_short_files_far_away(root: Root, far: Any, damage: Callable[[Path], None], message: str) -> None:
    commit(root, made())
    damage(path_of(root, rank_shard(1)))
    with pytest.raises(CorruptCheckpoint, match=rf"r00001\.0\.safetensors {message}"):
        read(far)


def test_a_place_that_can_not_be_used_costs_only_downloads(root: Root, far: Any, tmp_path: Path) -> None:
    commit(root, made())
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "restore").write_text("a file where the directory should be")
    assert torch.equal(read(far, local=blocked)[0], WEIGHTS)


def test_near_copies_save_downloads(root: Root, far: Any, tier: Tier, local: Path) -> None:
    commit(root, made())
    seal(tier, made())
    keep(local, made())
    assert torch.equal(read(far, tier=tier)[0], WEIGHTS)
    assert torch.equal(read(far, local=local)[0], WEIGHTS)
    assert far.asked == []


def test_downloads_lie_where_there_is_room(tmp_path: Path) -> None:
    near, other = tmp_path / "near", tmp_path / "other" / "deep"
    assert roomy([near, other], 1) == near
    assert roomy([near, other], 2**62) == near
    free = shutil.disk_usage(tmp_path).free
    assert roomy([Path("/proc/nowhere"), other], free // 2) == other


CONTENT = bytes(range(256)) * 64


def chunk() -> Chunk:
    from crc32c import crc32c

    return Chunk("r00000.0.safetensors", len(CONTENT), 0, crc32c(CONTENT))


def cache(base: Path, read_into: Callable[[str, int, memoryview], None], timeout: float = 30.0) -> NodeCache:
    return NodeCache(lambda: base, str(NAME), read_into, timeout)


def content_of(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, len(CONTENT) + 1, 0)
    finally:
        os.close(descriptor)


def deliver(file: str, offset: int, view: memoryview) -> None:
    view[:] = CONTENT[offset : offset + len(view)]


def refuse(file: str, offset: int, view: memoryview) -> None:
    pytest.fail("must not be downloaded again")


def hang(base: Path, started: Any) -> None:
    def forever(file: str, offset: int, view: memoryview) -> None:
        started.set()
        threading.Event().wait()

    cache(base, forever).open(chunk())


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that has claimed the chunk, and downloads for ever."""
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=hang, args=(tmp_path / "base", started))
    process.start()
    assert started.wait(60)
    yield process
    process.kill()
    process.join(60)


def test_a_download_is_taken_over_from_a_process_that_died(
    tmp_path: Path, hanging: multiprocessing.process.BaseProcess
) -> None:
    mine = cache(tmp_path / "base", deliver)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(content_of(mine.open(chunk()))))
    waiting.start()
    assert not found
    hanging.kill()
    waiting.join(60)
    assert found == [CONTENT]
    assert content_of(cache(tmp_path / "base", refuse).open(chunk())) == CONTENT


@pytest.mark.usefixtures("hanging")
def test_a_download_that_hangs_elsewhere_is_done_here(tmp_path: Path) -> None:
    mine = cache(tmp_path / "base", deliver, timeout=0.05)
    assert content_of(mine.open(chunk())) == CONTENT
    mine.close()
    assert (tmp_path / "base" / str(NAME)).exists()  # the other one is still there


def test_what_dead_processes_left_is_removed_by_who_comes_next(
    tmp_path: Path, hanging: multiprocessing.process.BaseProcess
) -> None:
    base = tmp_path / "base"
    old = NodeCache(lambda: base, "e00000001-s0000000001-00000000", deliver)
    os.close(old.open(chunk()))
    (base / str(NAME)).rename(base / "e00000001-s0000000002-00000000")
    hanging.kill()
    hanging.join(60)
    mine = cache(base, deliver)
    assert content_of(mine.open(chunk())) == CONTENT
    assert sorted(each.name for each in base.iterdir() if each.is_dir()) == [
        "e00000001-s0000000001-00000000",
        str(NAME),
    ]
    mine.close()
    old.close()
    old.close()
    assert not base.exists()


def test_many_who_come_and_go_at_once_leave_nothing(tmp_path: Path) -> None:
    base, failures = tmp_path / "base", []

    def live() -> None:
        for _ in range(20):
            each = cache(base, deliver)
            if content_of(each.open(chunk())) != CONTENT:
                failures.append("content")
            each.close()

    threads = [threading.Thread(target=live) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert failures == []
    assert not base.exists()


def test_a_download_that_fails_its_checksum_is_never_shared(tmp_path: Path) -> None:
    def spoil(file: str, offset: int, view: memoryview) -> None:
        deliver(file, offset, view)
        view[-1] ^= 1

    first = cache(tmp_path / "base", spoil)
    with pytest.raises(Damaged, match="chunk 0"):
        first.open(chunk())
    second = cache(tmp_path / "base", deliver)
    assert content_of(second.open(chunk())) == CONTENT
    first.close()
    second.close()
    eventually(lambda: not (tmp_path / "base").exists(), what="the end of the cache")
