"""Which files of a loader are known to be in the cache: they aren't looked for in each epoch, as each look costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SOME = 64
"""Of so many files that are known to be there one is looked for all the same: the cache may be cleared."""
_FRESH = 0.5
"""Seconds after which the number of evictions is to be asked again."""


class Seen:
    """What is known of one loader's files. Whoever calls holds the filler's lock.

    Args:
        count: of the files.
    """

    def __init__(self, count: int) -> None:
        self._is_there = np.zeros(count, dtype=bool)
        self._evictions: int | None = None
        self._asked = float("-inf")
        self._passed_by = 0

    def is_stale(self, now: float) -> bool:
        """Whether it is time for :meth:`evictions_are`, on the monotonic clock."""
        return now - self._asked > _FRESH

    def evictions_are(self, number: int, now: float) -> None:
        """So many files had to go from the cache so far: which, nobody says."""
        self._asked = now
        if number != self._evictions:
            self._evictions = number
            self._is_there[:] = False

    def is_there(self, sample: int) -> None:
        """A file is in the cache."""
        self._is_there[sample] = True

    def is_missing(self, sample: int) -> bool:
        """A file isn't in the cache; whether that is news, so that all others are to be looked for."""
        if not self._is_there[sample]:
            return False
        self._is_there[:] = False
        return True

    def to_look_for(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.bool_], bool]:
        """Which of these files are to be looked for, and whether all of them are known to be there."""
        wanted = ~self._is_there[samples]
        is_known = not wanted.any()
        wanted[_SOME - 1 - self._passed_by :: _SOME] = True
        self._passed_by = (self._passed_by + len(samples)) % _SOME
        return wanted, is_known
