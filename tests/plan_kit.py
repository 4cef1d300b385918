"""What the tests of plans share: ranks as threads or processes, and putting together again what they store."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

from ftrun.checkpoint.layout import rank_shard
from ftrun.checkpoint.plan import digests
from ftrun.checkpoint.plan.pieces import ranks_of
from ftrun.checkpoint.plan.planner import Plan, Planner
from ftrun.checkpoint.records import RankRecord
from ftrun.checkpoint.state import Encoded, decode, encode
from ftrun.checkpoint.words import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    T = TypeVar("T")

POSITION = "position"

NO_COMPILER = Path(__file__).parent / "no_compiler"  # as in conftest.py, which takes long to import


def together(world_size: int, function: Callable[[int], T], timeout: float = 60.0) -> list[T]:
    """Call a function for each rank, in threads of their own."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if failures:
        raise failures[0]
    assert sorted(results) == list(range(world_size)), f"only ranks {sorted(results)} came to an end"
    return [results[rank] for rank in range(world_size)]


@dataclass
class Saved:
    """What one rank stores in one save."""

    rank: int
    plan: Plan
    encoded: Encoded

    @property
    def digests(self) -> dict[str, str]:
        return {name: digests.content(tensor) for name, tensor in self.plan.verify.items()}

    @property
    def words(self) -> dict[str, str]:
        return self.plan.word(self.digests, POSITION).groups

    @property
    def payload(self) -> bytes:
        """The file, as staging would fill it."""
        file = bytearray(self.plan.size)
        file[: len(self.plan.header)] = self.plan.header
        for copy in self.plan.copies:
            data = raw(copy.tensor)
            file[copy.piece.offset : copy.piece.offset + len(data)] = data
        return bytes(file)

    @property
    def record(self) -> RankRecord:
        made = RankRecord(
            attempt="e00000001-s0000000001-00000000",
            rank=self.rank,
            step=1,
            total=None,
            data=None,
            tree=self.encoded.tree,
            tensors=self.plan.with_digests(self.digests),
            pieces=tuple(copy.piece for copy in self.plan.copies),
        )
        return RankRecord.from_bytes(made.to_bytes())


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


class Ranks:
    """Ranks of one attempt, each with its planner, on one store."""

    def __init__(self, world_size: int, store: Any = None, deadline: float = 20.0) -> None:
        self.world_size = world_size
        store = dist.HashStore() if store is None else store
        store.set_timeout(dt.timedelta(seconds=deadline))
        self.store = store
        self.planners = [Planner(rank, world_size, store, deadline=deadline) for rank in range(world_size)]
        self.saves = 0

    def save(
        self, states: Sequence[Any], objects: Mapping[str, Any] | None = None, *, late: Collection[int] = ()
    ) -> list[Saved]:
        """Save; ranks that are late come after one that isn't, where else the machine says which thread is first."""
        self.saves += 1

        def one(rank: int) -> Saved:
            if rank in late:
                self.store.wait([f"plan/{self.saves}/go"], dt.timedelta(seconds=60))
            encoded = encode({"tracked": states[rank]})
            return Saved(rank, self.planners[rank].plan(encoded, objects or {}, self.saves), encoded)

        return together(self.world_size, one)


def restored(saved: Sequence[Saved]) -> list[Any]:
    """What each rank would get back. Every byte must be stored exactly once, in files that the library opens."""
    files = {rank_shard(each.rank): each.payload for each in saved}
    return reassembled([each.record for each in saved], files)


def reassembled(records: Sequence[RankRecord], files: Mapping[str, bytes]) -> list[Any]:
    for record in records:
        content = files.get(rank_shard(record.rank), b"")
        opened = safetensors.torch.load(content) if content else {}
        assert len(opened) == len(record.pieces)
    return [
        decode(record.tree, {name: _tensor(name, record, records, files) for name in record.tensors})
        for record in records
    ]


def _tensor(name: str, record: RankRecord, records: Sequence[RankRecord], files: Mapping[str, bytes]) -> torch.Tensor:
    entry = record.tensors[name]
    dtype = dtype_of(entry.dtype)
    whole = np.zeros((*entry.shape, dtype.itemsize), np.uint8)
    count = np.zeros(entry.shape, np.int64)
    for other in records:
        if other.rank not in ranks_of(entry.ranks):
            continue
        for piece in (each for each in other.pieces if each.tensor == name):
            where = tuple(slice(a, a + b) for a, b in zip(piece.box.offset, piece.box.shape, strict=True))
            size = (piece.stop - piece.start) * dtype.itemsize
            data = np.frombuffer(files[piece.file], np.uint8, size, piece.offset).reshape(-1, dtype.itemsize)
            block = np.ascontiguousarray(whole[where]).reshape(-1, dtype.itemsize)
            block[piece.start : piece.stop] = data
            whole[where] = block.reshape((*piece.box.shape, dtype.itemsize))
            counts = np.ascontiguousarray(count[where]).reshape(-1)
            counts[piece.start : piece.stop] += 1
            count[where] = counts.reshape(piece.box.shape)
    assert (count == 1).all(), f"{name}: stored {count.min()} to {count.max()} times"
    if not whole.size:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(whole.reshape(-1).copy()).view(dtype).reshape(entry.shape)


# ---------------------------------------------------------------- processes


def processes(world_size: int, function: Callable[[int, Path], None], where: Path, timeout: float = 100.0) -> None:
    """Call a function of a module for each rank, in processes with a gloo group."""
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=_process, args=(rank, world_size, function, where), daemon=True)
        for rank in range(world_size)
    ]
    try:
        with mock.patch.dict(os.environ, PYTHONPATH=str(NO_COMPILER)):
            for each in started:
                each.start()
        for each in started:
            each.join(timeout)
        codes = [each.exitcode for each in started]
    finally:
        for each in started:
            if each.is_alive():
                each.kill()
            each.join(10)
    assert codes == [0] * world_size


def _process(rank: int, world_size: int, function: Callable[[int, Path], None], where: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(where / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=dt.timedelta(seconds=60))
    function(rank, where)
    dist.barrier()
    dist.destroy_process_group()
    # Past the interpreter's own end, in which threads of torch's backward now and then abort the process.
    os._exit(0)


def plan_here(rank: int, state: Any, objects: Mapping[str, Any], save: int = 1) -> Saved:
    """Plan the save of a rank in a process."""
    planner = Planner(
        rank, dist.get_world_size(), dist.PrefixStore("ftrun", dist.distributed_c10d._get_default_store())
    )
    encoded = encode({"tracked": state})
    return Saved(rank, planner.plan(encoded, objects, save), encoded)


def keep(where: Path, saved: Saved, expected: Mapping[str, torch.Tensor]) -> None:
    """Write what a rank stores, and what it must get back by name of the tensor."""
    (where / rank_shard(saved.rank)).write_bytes(saved.payload)
    (where / f"{saved.rank}.record").write_bytes(saved.record.to_bytes())
    (where / f"{saved.rank}.words").write_text(json.dumps(saved.words))
    plain = {name: tensor.detach().contiguous().clone() for name, tensor in expected.items()}
    safetensors.torch.save_file(plain, where / f"{saved.rank}.expected")


@dataclass
class Kept:
    """What processes wrote."""

    records: list[RankRecord]
    words: list[dict[str, str]]
    sizes: list[int]
    values: list[Any]
    expected: list[dict[str, torch.Tensor]]


def kept(where: Path, world_size: int) -> Kept:
    records = [RankRecord.from_bytes((where / f"{rank}.record").read_bytes()) for rank in range(world_size)]
    files = {rank_shard(rank): (where / rank_shard(rank)).read_bytes() for rank in range(world_size)}
    return Kept(
        records=records,
        words=[json.loads((where / f"{rank}.words").read_text()) for rank in range(world_size)],
        sizes=[len(files[rank_shard(rank)]) for rank in range(world_size)],
        values=reassembled(records, files),
        expected=[safetensors.torch.load_file(where / f"{rank}.expected") for rank in range(world_size)],
    )


def agree(words: Sequence[Mapping[str, str]]) -> bool:
    """Whether the commit would go through: everybody of a group says the same, and nobody is silent."""
    groups = set().union(*words)
    return all(len({words[rank].get(text) for rank in ranks_of(text)}) == 1 for text in groups)
