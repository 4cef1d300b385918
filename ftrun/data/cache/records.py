"""What the cache's parts tell each other and their users: frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class Listing:
    """What a remote says of a file without reading it.

    Attributes:
        size: bytes; None where the remote doesn't know.
        version: its ETag or time of change; two that differ are two objects.
    """

    size: int | None
    version: str


@dataclass(frozen=True)
class CachedObject:
    """One object in the cache.

    Attributes:
        key: 40 hex digits of the SHA-256 of URL, size and version.
        url: where it came from; empty where the record of it was lost.
        size: bytes.
        used: time of the last use that was noted, at most a minute old, as ``time.time()`` has it.
        path: where it lies. Open it through a lease alone.
    """

    key: str
    url: str
    size: int
    used: float
    path: str


@dataclass(frozen=True)
class Fetched:
    """What :meth:`~ftrun.data.cache.files.CachedFiles.fetch` did.

    Attributes:
        kind: ``hit`` (it was there, or somebody else has brought it meanwhile), ``filled`` or ``bypassed`` (there is
            no room for it, or the disk doesn't take it).
        key: of the object; empty where it was bypassed before the remote was asked.
        size: bytes; 0 where nobody knows them.
    """

    kind: Literal["hit", "filled", "bypassed"]
    key: str
    size: int


@dataclass(frozen=True)
class Counters:
    """What has happened since the process began, or on the node since the cache was made.

    Attributes:
        hits: files that were there when they were asked for.
        misses: files that weren't.
        fills: downloads that became objects.
        bytes: that they held.
        bypasses: files that were read past the cache: no room, or a disk that is full or read-only.
        waits: files that somebody else was downloading when they were asked for.
        wait_seconds: time that those who asked waited for files that weren't there.
        retries: attempts at the remote that failed and were made again.
        evictions: objects that had to go.
        rechecks: times that the remote was asked whether a file is still the same.
    """

    hits: int = 0
    misses: int = 0
    fills: int = 0
    bytes: int = 0
    bypasses: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    retries: int = 0
    evictions: int = 0
    rechecks: int = 0

    def __add__(self, other: Counters) -> Counters:
        mine, others = asdict(self), asdict(other)
        return Counters(**{name: mine[name] + others[name] for name in mine})


COUNTED = tuple(each.name for each in fields(Counters))
"""Names of the counters, in the order in which pages hold them."""


@dataclass(frozen=True)
class Patience:
    """How long what is waited for; seconds.

    Attributes:
        timeout: for a remote that sends nothing.
        attempts: at a remote that fails, in all.
        first: pause after the first failure; it doubles.
        longest: pause between attempts.
        stopped: a downloader that gives no sign of life for so long is passed over.
        lock: for the lock of the cache, held for microseconds; then files are read past it.
    """

    timeout: float = 60.0
    attempts: int = 4
    first: float = 0.2
    longest: float = 5.0
    stopped: float = 20.0
    lock: float = 10.0
