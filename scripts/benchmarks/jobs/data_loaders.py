"""The loaders that are measured, by name, over the same samples. Each ``iter()`` of one is an epoch."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

WIDTH = 64
SEED = 17


def table(n: int) -> TensorDataset:
    """Rows of a table in memory, which cost next to nothing."""
    return TensorDataset(torch.arange(n * WIDTH, dtype=torch.float32).reshape(n, WIDTH))


class Slow(Dataset[Any]):
    """Samples that take so many seconds besides, asleep: a busy core would measure the machine."""

    def __init__(self, dataset: Any, seconds: float) -> None:
        self._dataset, self._seconds = dataset, seconds

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._dataset[index]


class Rows(Dataset[Any]):
    """A dataset of the user's own class, of which no loader knows anything."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Noisy(Rows):
    """Its samples draw from one of the global generators."""

    def __getitem__(self, index: int) -> Any:
        (row,) = self._dataset[index]
        return (row + torch.rand(()),)


class Augmented(Rows):
    """Its samples draw from all three."""

    def __getitem__(self, index: int) -> Any:
        (row,) = self._dataset[index]
        return (row + (random.random() + np.random.rand() + torch.rand(())),)


@dataclass(frozen=True)
class Wish:
    """What is loaded.

    Attributes:
        dataset: map-style.
        batch: samples in a batch.
        folder: for those who need the samples in files of their own.
        seconds: that a sample of theirs takes besides.
        workers: number of worker processes.
        prefetch: batches that each worker prefetches; None for the loader's default.
    """

    dataset: Any
    batch: int
    folder: Path
    seconds: float = 0.0
    workers: int = 0
    prefetch: int | None = None

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that all take."""
        found: dict[str, Any] = {"shuffle": True, "num_workers": self.workers}
        return found | ({"prefetch_factor": self.prefetch} if self.workers and self.prefetch else {})


def build(name: str, wish: Wish) -> Iterable[Any]:
    """Make a loader; a second one of a kind is named ``... again``."""
    return _BUILDERS[name.removesuffix(" again")](wish)


def _torch(wish: Wish) -> Iterable[Any]:
    return DataLoader(wish.dataset, batch_size=wish.batch, drop_last=True, **wish.common)


def _over(kind: type[Rows], build: Callable[[Wish], Iterable[Any]]) -> Callable[[Wish], Iterable[Any]]:
    """The same loader over samples of another kind."""
    return lambda wish: build(replace(wish, dataset=kind(wish.dataset)))


def _stateful(wish: Wish) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(wish.dataset, batch_size=wish.batch, drop_last=True, **wish.common)


def _ftrun(wish: Wish, **options: Any) -> Iterable[Any]:
    from ftrun.data.loader import DataLoader as Ours

    return Ours(wish.dataset, global_batch=wish.batch, seed=SEED, **wish.common, **options)


def _ftrun_unseeded(wish: Wish) -> Iterable[Any]:
    return _ftrun(wish, sample_seeds=False)


def _streaming(wish: Wish) -> Iterable[Any]:
    import data_streams

    return data_streams.rows_streamed(wish)


def _litdata(wish: Wish) -> Iterable[Any]:
    import data_streams

    return data_streams.rows_chunked(wish)


def quieten() -> None:
    """One thread for torch, and no messages home."""
    torch.set_num_threads(1)
    os.environ["DO_NOT_TRACK"] = "1"


_BUILDERS: dict[str, Callable[[Wish], Iterable[Any]]] = {
    "torch": _torch,
    "StatefulDataLoader": _stateful,
    "ftrun": _ftrun,
    "torch, drawing from one": _over(Noisy, _torch),
    "ftrun, drawing from one": _over(Noisy, _ftrun),
    "torch, drawing from three": _over(Augmented, _torch),
    "ftrun, drawing from three": _over(Augmented, _ftrun),
    "ftrun, no sample seeds": _ftrun_unseeded,
    "streaming": _streaming,
    "litdata": _litdata,
}
