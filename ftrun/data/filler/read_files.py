"""Which files a loader reads through a cache, if it does, and in what way: a sample each, or in shards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from ftrun.data.filler.shards import ShardFiles
from ftrun.data.filler.urls import files_of
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.data.filler.urls import Strings


class ReadFiles(NamedTuple):
    """What a loader reads.

    Attributes:
        files: the cache.
        urls: by dataset index, or shard by shard.
        shards: which of them a shard has; None where each is a sample.
    """

    files: Any
    urls: Strings
    shards: ShardFiles | None


def read_files(loader: Any) -> ReadFiles | None:
    """What a loader reads through a cache; None where it reads nothing so, or nobody knows when it does.

    A dataset in shards says it with ``files``, its cache, and ``shard_urls(count)``: of each shard the list of its
    files; what the loader made of a package's dataset says it in the same way. When which shard is read is known
    exactly where the dataset knows their lengths, and else about.

    Args:
        loader: an :class:`ftrun.DataLoader`.

    Raises:
        UsageError: what the dataset says of its shards can't be.
    """
    found = files_of(loader.dataset)
    if found is not None:
        return ReadFiles(*found, None)
    shards = getattr(loader.source, "shards", None)
    teller = loader.dataset if hasattr(loader.dataset, "shard_urls") else shards
    files, ask = getattr(teller, "files", None), getattr(teller, "shard_urls", None)
    if not hasattr(files, "spec") or not callable(ask) or shards is None or shards.one_for_each_rank:
        return None
    listed = [[str(url) for url in urls] for urls in ask(shards.count)]
    if len(listed) != shards.count:
        raise UsageError(
            f"{type(teller).__name__}.shard_urls({shards.count}) returned {len(listed)} lists; return one for "
            "each shard, of the files that it reads"
        )
    counts = tuple(map(len, listed))
    lengths = None if shards.lengths is None else tuple(shards.lengths.tolist())
    return ReadFiles(files, list(itertools.chain.from_iterable(listed)), ShardFiles(counts, lengths))


def mean_length(source: Any) -> float:
    """Samples of a shard, on the average, where a loader's dataset doesn't say how long they are; else 0."""
    ask = getattr(source, "mean_length", None)
    return 0.0 if ask is None else float(ask())
