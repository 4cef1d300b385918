"""Pipelines of the package ``webdataset``, recognised without importing it, and made exact where that can be.

Each tar file is a shard. A pipeline is run for one file at a time, without the stages that split files by rank and
worker, as that is the loader's part here. Shuffle buffers get a seed that belongs to the shard and the epoch.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

from ftrun.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SPLITTERS = ("split_by_node", "split_by_worker", "single_node_only")
_OWN = "ftrun.data.iterable.tar.TarShards reads the same files, resumes without skipping and knows epochs"


def is_one(dataset: Any) -> bool:
    """Whether it is a ``webdataset`` pipeline."""
    return any(
        each.__name__ == "DataPipeline" and each.__module__.split(".")[0] == "webdataset"
        for each in type(dataset).__mro__
    )


class Tars:
    """A pipeline as one shard for each tar file. Resumes by skipping: the package can't seek."""

    lengths: NDArray[np.int64] | None = None
    one_for_each_rank = False
    states_hold = False
    how_many = "write the data into more tar files"

    def __init__(self, dataset: Any, virtual_shards: int | None) -> None:
        source: Any = dataset.pipeline[0] if dataset.pipeline else None
        if type(source).__name__ != "SimpleShardList":
            raise UsageError(
                f"this webdataset pipeline begins with {type(source).__name__}, which draws shards without end or in "
                "an order that can't be found again (resampled=True does that): build it from a list of urls without "
                f"resampling; or {_OWN}"
            )
        if dataset.repetitions != 1:
            raise UsageError(
                "with_epoch() and repeat() on a webdataset pipeline count samples per worker: leave them out, the "
                "loader goes on by itself, and epoch_samples= says how long an epoch is"
            )
        self._urls = list(source.urls)
        self._stages = [each for each in dataset.pipeline[1:] if getattr(each, "__name__", "") not in _SPLITTERS]
        self._dataset = dataset
        self.count = len(self._urls)
        if virtual_shards not in (None, self.count):
            raise UsageError(
                f"virtual_shards={virtual_shards}: leave it out, each of the {self.count} files is a shard"
            )
        text = "\n".join(self._urls)
        self.name = f"{self.count} tars/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def open(self, shard: int, epoch: int, seed: int) -> Any:
        """See :meth:`ftrun.data.iterable.datasets.Shards.open`."""
        piece = copy.copy(self._dataset)
        text = f"webdataset/{seed}/{epoch}/{shard}"
        own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        piece.pipeline = [[{"url": self._urls[shard]}], *(_seeded(each, own) for each in self._stages)]
        return piece

    def expect(self, shard: int) -> None:
        """See :meth:`ftrun.data.iterable.datasets.Shards.expect`: the package reads files in its own way."""


def _seeded(stage: Any, seed: int) -> Any:
    """A stage with random numbers that come out the same again; the stage itself where it draws none."""
    if type(stage).__name__ == "detshuffle":
        stage = copy.copy(stage)
        stage.seed, stage.epoch = seed, -1
    elif getattr(getattr(stage, "f", None), "__name__", "") == "_shuffle":
        stage = copy.copy(stage)
        stage.args = stage.args[:2]  # the size of the buffer and of its first filling; then comes a generator
        stage.kw = {**stage.kw, "rng": None, "seed": seed}
    return stage
