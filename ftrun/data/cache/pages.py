"""A page of numbers for each process that uses the cache: what it has counted, and the limit that it was given.

A page is a small mapped file on which its process holds a shared lock as long as it lives. Pages of the dead are added
to ``p/total`` by the next sweep.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import struct
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from ftrun.data.cache import regular
from ftrun.data.cache.records import COUNTED, Counters
from ftrun.flock import let_go, try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

_LENGTH = len(COUNTED) + 1
_SIZE = 8 * _LENGTH
_LIMIT = len(COUNTED)
_INDEX = {name: number for number, name in enumerate(COUNTED)}
_MICRO = 1_000_000
TOTAL = "total"
_NEXT = f"{TOTAL}.new"
NO_LIMIT = 2**62


class Page:
    """The numbers of this process. Any thread may add to them.

    Attributes:
        limit: bytes that this process allows the cache to take.
    """

    def __init__(self, limit: int | None) -> None:
        """Count for this process alone, until the page is shared.

        Args:
            limit: bytes that this process allows the cache to take; None for no limit.
        """
        self.limit = NO_LIMIT if limit is None else limit
        self._guard = threading.Lock()
        self._path = ""
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._numbers: memoryview | array.array[int] = array.array("q", [0] * _LENGTH)
        self._numbers[_LIMIT] = self.limit

    @property
    def is_shared(self) -> bool:
        """Whether others see it."""
        return self._map is not None

    def share(self, directory: str) -> None:
        """Have others see it, where they don't yet, or not any more since somebody has removed the cache.

        The caller holds the cache's lock, so that no sweep takes a page that isn't locked yet. A full or read-only disk
        is no reason not to count.
        """
        if self._map is not None and os.path.exists(self._path):
            return
        with self._guard, contextlib.suppress(OSError, ValueError):
            self._leave()
            self._share(f"{directory}/{os.getpid()}-{uuid.uuid4().hex[:8]}")

    def add(self, name: str, amount: float = 1) -> None:
        """Count something. Seconds are held in microseconds."""
        number = int(amount * _MICRO) if name == "wait_seconds" else int(amount)
        with self._guard:
            self._numbers[_INDEX[name]] += number

    def counters(self) -> Counters:
        """What this process has counted."""
        with self._guard:
            return _counters(tuple(self._numbers))

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # the interpreter may be on its way out
            self.forget()

    def forget(self) -> None:
        """Let go of the page: it belongs to the process we were forked from, or nobody uses it any more."""
        self._leave()  # without the guard, which another thread of that process may have held

    def _share(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _hold(descriptor)
            assert isinstance(self._numbers, array.array)
            os.write(descriptor, self._numbers.tobytes())  # written, not only sized: a full disk would kill us later
            mapped = mmap.mmap(descriptor, _SIZE)
        except (OSError, ValueError):  # ValueError: the disk took a part of it
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        self._path, self._descriptor, self._map = path, descriptor, mapped
        self._numbers = memoryview(mapped).cast("q")

    def _leave(self) -> None:
        if self._map is None:
            return
        numbers, self._numbers = self._numbers, array.array("q", self._numbers)
        assert isinstance(numbers, memoryview)
        whole = numbers.obj
        numbers.release()
        assert whole is self._map
        self._map.close()  # it holds a descriptor of its own, and so the lock
        self._map = None
        os.close(self._descriptor)


def _hold(descriptor: int) -> None:
    """Lock our page, which somebody who asks whether we live may hold for a moment."""
    for _ in range(100):
        if try_lock(descriptor, shared=True):
            return
        time.sleep(0.001)
    raise BlockingIOError(errno.EAGAIN, "the page is locked")


def _counters(numbers: tuple[int, ...]) -> Counters:
    values: dict[str, Any] = {name: numbers[number] for name, number in _INDEX.items()}
    return Counters(**{**values, "wait_seconds": values["wait_seconds"] / _MICRO})


def _read(path: str) -> tuple[int, ...] | None:
    try:
        data = regular.read(path)
    except OSError:
        return None
    return struct.unpack(f"={_LENGTH}q", data) if len(data) == _SIZE else None


def _pages(directory: str) -> Iterator[tuple[str, bool]]:
    """Paths of the pages, and whether their process lives."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            if name in (TOTAL, _NEXT):
                continue
            path = f"{directory}/{name}"
            try:
                alive = in_use(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link or a socket is nobody's page
                    raise
                alive = False
            yield path, alive


def in_use(path: str) -> bool:
    """Whether a process holds a lock on a file."""
    descriptor = os.open(path, regular.READ)
    try:
        return not try_lock(descriptor)
    finally:
        let_go(descriptor)


def smallest_limit(directory: str) -> int:
    """The smallest limit that a living process of the node has been given."""
    limits = [NO_LIMIT]
    for path, alive in _pages(directory):
        numbers = _read(path) if alive else None
        if numbers is not None:
            limits.append(numbers[_LIMIT])
    return min(limits)


def node_counters(directory: str) -> Counters:
    """What all processes have counted since the cache was made."""
    paths = [f"{directory}/{TOTAL}", *(path for path, _ in _pages(directory))]
    read = [_counters(numbers) for path in paths if (numbers := _read(path)) is not None]
    return sum(read, Counters())


def fold(directory: str) -> None:
    """Add the pages of dead processes to the total, and remove them. The caller holds the cache's lock."""
    dead = [path for path, alive in _pages(directory) if not alive]
    if not dead:
        return
    total = [0] * _LENGTH
    for path in (f"{directory}/{TOTAL}", *dead):
        numbers = _read(path) or (0,) * _LENGTH
        total = [one + other for one, other in zip(total, numbers, strict=True)]
    total[_LIMIT] = 0
    written = f"{directory}/{_NEXT}"
    for path in (written, f"{directory}/{TOTAL}"):
        regular.make_way(path)
    with open(written, "wb") as file:
        file.write(struct.pack(f"={_LENGTH}q", *total))
    os.replace(written, f"{directory}/{TOTAL}")
    for path in dead:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # not ours, then
            os.unlink(path)
