"""What ``ftrun cache`` does: read every object, or throw the cache away."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.data.cache import eviction, sweeping
from ftrun.data.cache.books import Books
from ftrun.data.cache.layout import OURS
from ftrun.data.cache.names import Pointer
from ftrun.data.cache.obtaining import checksum
from ftrun.data.cache.refusals import DiskTrouble
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.data.cache.books import Account
    from ftrun.data.cache.layout import Layout
    from ftrun.data.cache.records import CachedObject

_LOCK = 10.0


@dataclass(frozen=True)
class Damage:
    """An object whose bytes are not those that were downloaded.

    Attributes:
        object: which.
        detail: what is wrong.
        removed: it was thrown away.
    """

    object: CachedObject
    detail: str
    removed: bool = False


@dataclass(frozen=True)
class Cleared:
    """What :func:`clear` did.

    Attributes:
        objects: how many went.
        size: bytes that they held.
        in_use: how many stayed, as somebody reads them.
    """

    objects: int
    size: int
    in_use: int


def damages(layout: Layout) -> Iterator[tuple[CachedObject, str | None]]:
    """Every object, and what is wrong with it; None where nothing is. Reads every byte."""
    pointed: dict[str, int] | None = None
    for shard in eviction.shards(layout):
        known = {line.key: line.crc for line in eviction.index_lines(layout, shard)}
        for each in eviction.objects(layout, shard):
            found = checksum(each.path)
            if found is None:  # evicted meanwhile
                continue
            expected = known.get(each.key)
            if expected is None:  # its line was lost, to a full disk perhaps: its pointer knows it, too
                pointed = _pointed(layout) if pointed is None else pointed
                expected = pointed.get(each.key)
            if expected is None:
                yield each, "nothing is known of where it came from"
            else:
                yield each, None if found == expected else f"CRC32C {found:08x} instead of {expected:08x}"


def _pointed(layout: Layout) -> dict[str, int]:
    """The checksums that pointers tell, by key."""
    found: dict[str, int] = {}
    for directory, _, names in os.walk(layout.pointers):
        for name in names:
            with contextlib.suppress(OSError):
                pointer = Pointer.decode(os.readlink(f"{directory}/{name}"))
                if pointer is not None:
                    found[pointer.key] = pointer.crc
    return found


def remove(layout: Layout, objects: list[CachedObject]) -> int:
    """Remove objects that nobody reads. Returns how many.

    Raises:
        UsageError: the cache can't be locked.
    """
    with _held(layout) as account:
        sizes = [eviction.evict(eviction.Candidate(0.0, 2**62, each.size, each.path)) for each in objects]
        gone = [size for size in sizes if size is not None]
        account.total -= sum(gone)
    return len(gone)


def clear(layout: Layout) -> Cleared:
    """Remove every object that nobody reads, and what is known of remotes. Counters stay.

    Raises:
        UsageError: the cache can't be locked.
        OSError: its disk is broken or read-only.
    """
    layout.make()  # what isn't as it should be is made so, too
    there = [each for shard in eviction.shards(layout) for each in eviction.objects(layout, shard)]
    size = sum(each.size for each in there)
    remove(layout, there)
    with _held(layout) as account:
        sweeping.sweep(layout, account)
        sweeping.compact_all(layout)
        account.total = eviction.count(layout)  # somebody may have removed files by hand
        shutil.rmtree(layout.pointers, ignore_errors=True)
        os.makedirs(layout.pointers, mode=0o700, exist_ok=True)
    left = [each for shard in eviction.shards(layout) for each in eviction.objects(layout, shard)]
    return Cleared(len(there) - len(left), size - sum(each.size for each in left), len(left))


def discard(layout: Layout) -> None:
    """Throw away a cache of another version, whatever is in it.

    Raises:
        UsageError: it is no cache, or not ours.
    """
    found = os.lstat(layout.home)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or not ((layout.home / "VERSION").is_file() or set(os.listdir(layout.home)) <= OURS):
        raise UsageError(f"{layout.home} is no data cache of yours; nothing was removed")
    shutil.rmtree(layout.home)


@contextlib.contextmanager
def _held(layout: Layout) -> Iterator[Account]:
    try:
        with Books(layout.lock, lambda: eviction.count(layout), _LOCK).held() as account:
            yield account
    except DiskTrouble as error:
        raise UsageError(f"data cache {layout.root}: {error}; look with `ftrun cache ls` and try again") from error
