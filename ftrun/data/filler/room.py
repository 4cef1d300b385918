"""Making room in a cache: what is read last of all goes first, and nothing that is read sooner than what comes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ftrun.data.cache.records import CachedObject

_CHUNK, _CHUNK_FILES = 1 << 30, 256
"""Room is made for so much at a time: each time all objects are looked at."""
_FILES = 16
_PAUSE = 0.1
_LONG, _SHARE = 0.5, 10
"""After a long look at the whole cache that found no room, there is none for ten times its duration."""
_UNKNOWN = 1 << 20
"""Bytes for a file that nobody knows the size of."""


class Room:
    """The room in one cache, as one filler has it. Any thread may call it.

    Args:
        files: the cache.
        uses: steps until the files of these URLs are read next; infinity where nobody knows.
        pace: steps per second.
    """

    def __init__(
        self, files: Any, uses: Callable[[Sequence[str]], NDArray[np.float64]], pace: Callable[[], float]
    ) -> None:
        self._files = files
        self._uses = uses
        self._pace = pace
        self._guard = threading.Lock()
        self._left = 0
        self._pending = 0
        self._not_before = 0.0
        self.full = False

    def take(self, size: float, steps: float) -> bool:
        """Take room for a file; whether there is any.

        Args:
            size: its bytes, as far as anybody knows.
            steps: until it is read.
        """
        wanted = self._bytes(size)
        with self._guard:
            if self._left < wanted and time.monotonic() >= self._not_before:
                self._make(wanted, steps)
            self.full = self._left < wanted
            if not self.full:
                self._left -= wanted
                self._pending += wanted
            return not self.full

    def correct(self, taken: float, used: int) -> None:
        """A file was larger or smaller than was taken for it; all of it comes back when it isn't there."""
        with self._guard:
            self._left += self._bytes(taken) - used
            self._pending -= self._bytes(taken)

    def wait(self, seconds: float) -> None:
        """The disk takes nothing: ask again after a while."""
        with self._guard:
            self._left, self.full = 0, True
            self._not_before = time.monotonic() + seconds

    def _bytes(self, size: float) -> int:
        limit = self._files.limit
        return int(size) or (_UNKNOWN if limit is None else max(1, min(_UNKNOWN, limit // _FILES)))

    def _make(self, wanted: int, steps: float) -> None:
        limit = self._files.limit
        chunk = min(_CHUNK, _CHUNK_FILES * wanted)
        # What ranks bring in themselves must find room without evicting: they don't know what is read soon.
        spare = min(chunk, _FILES * wanted)
        if limit is not None:
            chunk = max(wanted, min(chunk, limit // _FILES))
            spare = min(spare, limit // _FILES)
        began = time.monotonic()
        fits = self._files.make_room(chunk + spare + self._pending, lambda objects: self._next_uses(objects, steps))
        took = time.monotonic() - began
        # What is under way may not have reserved its room yet.
        fits -= self._pending
        # A cache that is smaller than what is spared has nothing to spare.
        self._left = max(0, fits - spare) if fits - spare >= wanted or spare < wanted else 0
        if self._left < wanted:
            self._not_before = time.monotonic() + max(_PAUSE, (_SHARE if took > _LONG else 1) * took)

    def _next_uses(self, objects: Sequence[CachedObject], steps: float) -> list[float]:
        uses = self._uses([each.url for each in objects])
        now, pace = time.time(), self._pace() or 1.0
        # Files of others: what was used a moment ago is likely to be used in a moment.
        ages = np.array([max(0.0, now - each.used) * pace for each in objects])
        uses = np.where(np.isinf(uses), ages, uses)
        return np.where(uses <= steps, -np.inf, uses).tolist()  # type: ignore[no-any-return]
