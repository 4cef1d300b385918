"""What the tests of the loader share: datasets that draw, loaders over them, and whole runs of several ranks."""

from __future__ import annotations

import json
import os
import random
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ftrun.data.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

N, GLOBAL_BATCH, SEED = 53, 12, 17
STEPS = 4  # in an epoch: 53 // 12
Row = tuple[float, ...]


class Augmented(Dataset[torch.Tensor]):
    """Each sample is its index and one draw from each of the three generators."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [random.random(), np.random.rand(), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([index, *draws], dtype=torch.float64)


class Batched(Augmented):
    """Also answers for many samples at once, as datasets with a fast path do."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Broken(Augmented):
    def __init__(self, error: Exception, at: int) -> None:
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            raise self.error
        return super().__getitem__(index)


class WorkerPid(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


def make(world: int = 1, rank: int = 0, **arguments: Any) -> DataLoader[torch.Tensor]:
    arguments = {"global_batch": GLOBAL_BATCH, "shuffle": True, "seed": SEED, **arguments}
    dataset = arguments.pop("dataset") if "dataset" in arguments else Augmented()
    return DataLoader(dataset, rank=rank, world_size=world, **arguments)


def endless(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def rows(batch: torch.Tensor) -> list[Row]:
    return [tuple(row) for row in batch.tolist()]


def own(loader: DataLoader[torch.Tensor], batch: torch.Tensor) -> list[Row]:
    """The samples of a batch that count in the epoch."""
    return rows(batch)[: len(batch) - loader.padding]


def woven(shares: list[list[Row]]) -> list[Row]:
    """A global batch in its order, from every rank's share of it."""
    return [row for together in zip_longest(*shares) for row in together if row is not None]


def train(
    world: int, workers: int, steps: int, state: dict[str, Any] | None = None, **arguments: Any
) -> tuple[list[Row], dict[str, Any]]:
    """What a run of some steps consumes, in the order of the global batches, and the state that it leaves."""
    loaders = [make(world, rank, num_workers=workers, **arguments) for rank in range(world)]
    for loader in loaders if state else ():
        loader.load_state_dict(state or {})
    streams = [endless(loader) for loader in loaders]
    seen: list[Row] = []
    for _ in range(steps):
        seen += woven([own(loader, next(stream)) for loader, stream in zip(loaders, streams, strict=True)])
    for loader in loaders:
        loader.commit()
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1
    return seen, json.loads(states[0])


def indices(seen: list[Row]) -> list[int]:
    return [int(row[0]) for row in seen]


def failure(loop: Iterator[torch.Tensor]) -> tuple[type[Exception], str]:
    """How a loop ends: kind and text. The error itself would keep the loop, and its workers, from going away."""
    try:
        for _ in loop:
            pass
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("the loop ended well")


def drawing_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    noise = [random.random(), np.random.rand(), float(torch.rand(()))]
    return torch.stack([*samples, torch.tensor([0.0, *noise], dtype=torch.float64)])


def random_states() -> list[Any]:
    numpy: Any = np.random.get_state()
    return [
        random.getstate(),
        str(numpy[0]),
        np.asarray(numpy[1]).tolist(),
        numpy[2:],
        torch.get_rng_state().tolist(),
    ]


def failing_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    raise ValueError("ragged")
