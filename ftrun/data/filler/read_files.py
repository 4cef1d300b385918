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
    files. When which shard is read is known only where the dataset knows their lengths.

    Args:
        loader: an :class:`ftrun.DataLoader`.

    Raises:
        UsageError: what the dataset says of its shards can't be.
    """
    found = files_of(loader.dataset)
    if found is not None:
        return ReadFiles(*found, None)
    files, ask = getattr(loader.dataset, "files", None), getattr(loader.dataset, "shard_urls", None)
    shards = getattr(loader.source, "shards", None)
    if not hasattr(files, "spec") or not callable(ask) or shards is None or shards.lengths is None:
        return None
    listed = [[str(url) for url in urls] for urls in ask(shards.count)]
    if len(listed) != shards.count:
        raise UsageError(
            f"{type(loader.dataset).__name__}.shard_urls({shards.count}) returned {len(listed)} lists; return one for "
            "each shard, of the files that it reads"
        )
    counts, lengths = tuple(map(len, listed)), tuple(shards.lengths.tolist())
    return ReadFiles(files, list(itertools.chain.from_iterable(listed)), ShardFiles(counts, lengths))
