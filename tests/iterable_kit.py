"""Datasets that are read in order, and runs over them that are killed and resumed with other worlds and workers."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ftrun.data.iterable.marks import merged
from ftrun.data.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 17
Row = tuple[Any, ...]


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))


class Stream:
    """One shard: a row for each sample, with what was drawn for it and the epoch that the shard was told."""

    def __init__(self, shard: int, length: int) -> None:
        self.shard, self.length, self.epoch = shard, length, 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        for number in range(self.length):
            self.read += 1
            yield (self.shard, self.epoch, number, *draws())


class Seeking(Stream):
    start = 0

    def seek(self, number: int) -> None:
        self.start = number

    def __iter__(self) -> Iterator[Row]:
        for number in range(self.start, self.length):
            self.read += 1
            yield (self.shard, self.epoch, number, *draws())


class WithState(Stream):
    at = 0

    def __iter__(self) -> Iterator[Row]:
        while self.at < self.length:
            self.read += 1
            self.at += 1
            yield (self.shard, self.epoch, self.at - 1, *draws())
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "noise": torch.arange(self.at % 3), "pair": (1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["noise"].tolist() == list(range(state["at"] % 3))
        assert state["pair"] == (1, 2)
        self.at = state["at"]


class Iterating:
    """An iterator with a state, as torchdata has it too."""

    def __init__(self, stream: StateOfIterator) -> None:
        self.stream, self.at = stream, 0

    def __iter__(self) -> Iterating:
        return self

    def __next__(self) -> Row:
        if self.at == self.stream.length:
            raise StopIteration
        self.stream.read += 1
        self.at += 1
        return (self.stream.shard, self.stream.epoch, self.at - 1, *draws())

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.at = state


class StateOfIterator(Stream):
    def __iter__(self) -> Any:
        return Iterating(self)


class Choosy(Stream):
    """Drops samples by chance, so how many there are is not known before."""

    def __iter__(self) -> Iterator[Row]:
        return (row for row in super().__iter__() if hash((row[0], row[2])) % 3)


class Sharded:
    """Cut into any number of shards of unequal lengths."""

    def __init__(self, kind: type[Stream] = Stream, lengths: list[int] | None = None, *, known: bool = False) -> None:
        self.kind, self.lengths = kind, lengths
        self.opened: list[Stream] = []
        if known:
            self.shard_lengths = lambda count: [self.length(shard) for shard in range(count)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": []}

    def length(self, shard: int) -> int:
        return self.lengths[shard] if self.lengths is not None else 11 + shard * 7 % 5

    def shard(self, index: int, count: int) -> Stream:
        assert 0 <= index < count
        self.opened.append(self.kind(index, self.length(index)))
        return self.opened[-1]


class Whole(IterableDataset[Row]):
    """One stream, which each rank makes for itself."""

    def __init__(self, rank: int, length: int = 29) -> None:
        self.rank, self.length, self.epoch = rank, length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        for number in range(self.length):
            yield (self.rank, self.epoch, number, *draws())


def as_list(samples: list[Row]) -> list[Row]:
    return list(samples)


def endless(loader: DataLoader[Any]) -> Iterator[list[Row]]:
    while True:
        yield from loader


class Run:
    """Ranks of one run, one after another in this process."""

    def __init__(self, dataset: Any, world: int, workers: int, batch: int = 24, **options: Any) -> None:
        options = {"shuffle": True, "seed": SEED, "collate_fn": as_list, **options}
        self.loaders: list[DataLoader[Any]] = [
            DataLoader(
                dataset(rank) if callable(dataset) else dataset,
                rank=rank,
                world_size=world,
                num_workers=workers,
                global_batch=batch,
                **options,
            )
            for rank in range(world)
        ]
        self.streams = [endless(loader) for loader in self.loaders]

    def resume(self, states: list[dict[str, Any]] | None, *, share: bool = True) -> Run:
        for rank, loader in enumerate(self.loaders if states else ()):
            own = states[rank] if rank < len(states) else states[0]
            others = [each.get("shards") for each in states if each is not own] if share else []
            loader.load_state_dict({**own, "shards": merged([own.get("shards"), *others])})
        return self

    def train(self, steps: int) -> list[list[Row]]:
        """Global batches: the ranks' parts one after another."""
        return [[row for stream in self.streams for row in next(stream)] for _ in range(steps)]

    def states(self) -> list[dict[str, Any]]:
        for loader in self.loaders:
            loader.commit()
        found = [copy.deepcopy(loader.state_dict()) for loader in self.loaders]
        assert len({json.dumps({**each, "shards": None}) for each in found}) == 1
        return found

    def close(self) -> None:
        self.streams.clear()
        self.loaders.clear()
