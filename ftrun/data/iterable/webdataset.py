"""Pipelines of the package ``webdataset``, recognised without importing it, and made exact where that can be.

Each tar file is a shard. A pipeline is run for one file at a time, without the stages that split files by rank and
worker, as that is the loader's part here. Shuffle buffers get a seed that belongs to the shard and the epoch.

With an attribute ``files``, a :class:`ftrun.CachedFiles`, the tar files come through the node's cache::

    pipeline = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb")
    pipeline.files = ftrun.CachedFiles()
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

from ftrun.data.cache.remote import local_path
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ftrun.data.cache.files import CachedFiles
    from ftrun.data.cache.leases import Lease

_SPLITTERS = ("split_by_node", "split_by_worker", "single_node_only")
_READERS = ("tar_file_expander", "group_by_keys", "tarfile_samples")
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
        self.files = _files_of(dataset, self._urls)
        self._stages = [each for each in dataset.pipeline[1:] if getattr(each, "__name__", "") not in _SPLITTERS]
        self._named = max(
            (place for place, each in enumerate(self._stages, 1) if _function(each) in _READERS),
            default=len(self._stages),
        )
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
        stages = [_seeded(each, own) for each in self._stages]
        if self.files is None:
            piece.pipeline = [[{"url": self._urls[shard]}], *stages]
        else:
            cached = _Cached(self.files, self._urls[shard])
            piece.pipeline = [cached.opened, *stages[: self._named], cached.named, *stages[self._named :]]
        return piece

    def shard_urls(self, count: int) -> list[list[str]]:
        """The file of each shard; see :func:`ftrun.data.filler.read_files.read_files`."""
        assert count == self.count
        return [[url] for url in self._urls]

    def expect(self, shard: int) -> None:
        """See :meth:`ftrun.data.iterable.datasets.Shards.expect`: without a cache the package reads in its own way."""
        if self.files is not None:
            self.files.prefetch([self._urls[shard]])


class _Cached:
    """Stages of a pipeline: its one tar file, on the local disk for as long as it is read.

    Args:
        files: the cache.
        url: of the file.
    """

    def __init__(self, files: CachedFiles, url: str) -> None:
        self._files, self._url = files, url
        self._lease: Lease | None = None

    def opened(self) -> Iterator[dict[str, str]]:
        """What the package's stages that open files begin with.

        It is :meth:`named` that lets go of the file: a shuffle of the shards (``shardshuffle=100``) asks for more of
        them before it passes this one on, and would be told that it may go, and its path with it.
        """
        self._lease = self._files.get(self._url)
        yield {"url": str(self._lease.path)}

    def named(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Samples say where they came from: as they would without the cache. With the last of them the file may go."""
        place = local_path(self._url)
        try:
            for sample in samples:
                if isinstance(sample, dict) and "__url__" in sample:
                    sample["__url__"] = self._url
                    if sample.pop("__local_path__", None) is not None and place is not None:
                        sample["__local_path__"] = place
                yield sample
        finally:
            if self._lease is not None:
                self._lease.release()


def _files_of(dataset: Any, urls: Sequence[Any]) -> CachedFiles | None:
    files: CachedFiles | None = getattr(dataset, "files", None)
    if files is None or not hasattr(files, "spec"):
        return None
    piped = [url for url in urls if str(url).startswith("pipe:")]
    if piped:
        raise UsageError(
            f"{piped[0]!r}: the cache fetches files itself and runs no commands: give their own URLs (s3://..., "
            "https://...), or leave the pipeline's attribute files out"
        )
    return files


def _function(stage: Any) -> str:
    """The name of what a stage calls."""
    return str(getattr(getattr(stage, "f", None), "__name__", ""))


def _seeded(stage: Any, seed: int) -> Any:
    """A stage with random numbers that come out the same again; the stage itself where it draws none."""
    if type(stage).__name__ == "detshuffle":
        stage = copy.copy(stage)
        stage.seed, stage.epoch = seed, -1
    elif _function(stage) == "_shuffle":
        stage = copy.copy(stage)
        stage.args = stage.args[:2]  # the size of the buffer and of its first filling; then comes a generator
        stage.kw = {**stage.kw, "rng": None, "seed": seed}
    return stage
