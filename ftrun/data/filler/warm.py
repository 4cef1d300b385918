"""Whether all that a loader reads is in the cache: then few of its files are looked for, as each look costs."""

from __future__ import annotations

_SOME = 64
"""Of so many files one is looked for where all are there: the cache may be cleared, or shrink."""


class Warm:
    """What is known of one loader's files. Whoever calls holds the filler's lock.

    Args:
        count: of the files.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._there = 0
        self._evictions: int | None = None
        self._is_warm = False
        self._passed_by = 0

    def is_there(self) -> bool:
        """One more file is in the cache; whether it is time for :meth:`evictions_are`."""
        self._there += 1
        return self._there in (1, self._count)

    def evictions_are(self, number: int) -> None:
        """So many files had to go from the cache so far: all are there, where none has while they came by."""
        if number != self._evictions:
            self._evictions, self._there = number, 1
        elif self._there >= self._count:
            self._is_warm = True

    def is_missing(self) -> bool:
        """A file isn't in the cache; whether that is news, so that those passed by are to be looked for."""
        if not self._is_warm:
            return False
        self._is_warm, self._there = False, 0
        return True

    def passes_by(self) -> bool:
        """Whether the next file needs no look."""
        self._passed_by += 1
        return self._is_warm and self._passed_by % _SOME != 0
