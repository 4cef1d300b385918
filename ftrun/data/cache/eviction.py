"""What lies in the cache, and which of it goes first. The caller holds the cache's lock wherever something goes."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ftrun.data.cache import regular
from ftrun.data.cache.records import CachedObject
from ftrun.flock import let_go, try_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftrun.data.cache.layout import Layout

_QUEUE = 4096
"""Candidates that one look at the whole cache yields."""


class Candidate(NamedTuple):
    """An object that may go; the smallest one first.

    Attributes:
        order: when it is used next, negated; the same for all where nobody knows.
        used: nanoseconds, as the file's time says.
        size: bytes.
        path: where it lies.
    """

    order: float
    used: int
    size: int
    path: str


def shards(layout: Layout) -> list[str]:
    """Two-digit names of the directories of objects."""
    try:
        return sorted(name for name in os.listdir(layout.objects) if len(name) == 2)
    except (FileNotFoundError, NotADirectoryError):
        return []


def files(directory: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The regular files of a directory; one that vanishes meanwhile is left out, and so is a missing directory."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    yield entry, entry.stat(follow_symlinks=False)


def size_of(path: str) -> int:
    """What a file counts in the sum; 0 where there is none, or none that counts."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def count(layout: Layout) -> int:
    """Bytes of all objects and temporary files."""
    places = [layout.temps, *(f"{layout.objects}/{shard}" for shard in shards(layout))]
    return sum(found.st_size for place in places for _, found in files(place))


def objects(layout: Layout, shard: str) -> list[CachedObject]:
    """The objects of one directory, with where they came from."""
    urls = {line.key: line.url for line in index_lines(layout, shard)}
    return [
        CachedObject(key, urls.get(key, ""), found.st_size, found.st_mtime, entry.path)
        for entry, found in files(f"{layout.objects}/{shard}")
        for key in [entry.name.partition(".")[0]]
    ]


class IndexLine(NamedTuple):
    """Where an object came from."""

    key: str
    crc: int
    url: str


def index_lines(layout: Layout, shard: str) -> Iterator[IndexLine]:
    """What is written of the objects of one directory, the newest last; a torn line is left out."""
    try:
        data = regular.read(layout.index(shard))
    except OSError:
        return
    for line in data.split(b"\n"):
        key, _, rest = line.partition(b" ")
        crc, _, url = rest.partition(b" ")
        with contextlib.suppress(ValueError):
            yield IndexLine(key.decode("ascii"), int(crc, 16), json.loads(url))


def least_recent(layout: Layout) -> list[Candidate]:
    """The objects that were not used for the longest time, those first."""
    found = (
        Candidate(0.0, told.st_mtime_ns, told.st_size, entry.path)
        for shard in shards(layout)
        for entry, told in files(f"{layout.objects}/{shard}")
    )
    return heapq.nsmallest(_QUEUE, found)


def furthest(layout: Layout, next_use: Callable[[Sequence[CachedObject]], Sequence[float]]) -> list[Candidate]:
    """The objects whose next use is furthest away, those first; ties go to the least recently used."""

    def found() -> Iterator[Candidate]:
        for shard in shards(layout):
            there = objects(layout, shard)
            for each, when in zip(there, next_use(there) if there else (), strict=True):
                if when != float("-inf"):
                    yield Candidate(-when, int(each.used * 1e9), each.size, each.path)

    return heapq.nsmallest(_QUEUE, found())


def evict(candidate: Candidate) -> int | None:
    """Remove an object and return its bytes; None where somebody uses it, or has used it meanwhile."""
    try:
        descriptor = os.open(candidate.path, regular.READ)
    except FileNotFoundError:
        return None
    try:
        if not try_lock(descriptor):
            return None
        found = os.fstat(descriptor)
        if found.st_mtime_ns > candidate.used + 1_000_000_000 or not found.st_nlink:
            return None
        os.unlink(candidate.path)
    except FileNotFoundError:
        return None
    else:
        return found.st_size
    finally:
        let_go(descriptor)
