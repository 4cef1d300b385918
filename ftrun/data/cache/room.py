"""Whether a file fits: within the limit of every job that uses the cache, and beside what the disk is to keep free."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ftrun.data.cache import eviction, pages
from ftrun.data.cache.settings import reserve_of

if TYPE_CHECKING:
    from ftrun.data.cache.books import Account
    from ftrun.data.cache.layout import Layout
    from ftrun.data.cache.pages import Page

_FRESH = 2.0
"""Seconds for which the limits of other jobs, and a look at the cache that found nothing to evict, hold good."""


_SHED = 16


class Room:
    """Makes room. Every method that changes something is called with the cache's lock held."""

    def __init__(self, layout: Layout, reserve: int | str, page: Page) -> None:
        self._layout = layout
        self._home = str(layout.home)
        self._reserve = reserve
        self._disk = self._kept = 0
        self._page = page
        self._queue: list[eviction.Candidate] = []
        self._limit = page.limit
        self._limit_read = float("-inf")
        self._nothing_left = float("-inf")

    def make(self, account: Account, size: int, *, again: bool = False) -> bool:
        """Evict the least recently used objects until ``size`` more bytes fit; False where they won't.

        Args:
            account: the sum of bytes.
            size: to make room for.
            again: look once more, although a moment ago there was nothing to evict.

        Raises:
            OSError: the disk is broken.
        """
        if size > self.limit():
            return False
        looked = False
        while self.left(account) < size:
            if not self._queue:
                if looked:
                    self._nothing_left = time.monotonic()
                    return False
                if time.monotonic() < self._nothing_left + _FRESH and not again:
                    return False
                self._look(account)
                looked = True
                continue
            if self._drop(account, self._queue.pop()):
                looked = False
        return True

    def make_by(self, account: Account, size: int, candidates: list[eviction.Candidate]) -> None:
        """Evict these, in their order, until ``size`` more bytes fit or there are none left."""
        for candidate in candidates:
            if self.left(account) >= size:
                return
            self._drop(account, candidate)

    def shed(self, account: Account) -> None:
        """Evict a few objects, whatever the sums say: the disk takes no more, perhaps for want of inodes."""
        self._look(account)
        for _ in range(min(len(self._queue), _SHED)):
            self._drop(account, self._queue.pop())

    def left(self, account: Account) -> int:
        """Bytes that fit now."""
        disk = os.statvfs(self._home)
        if disk.f_blocks * disk.f_frsize != self._disk:
            self._disk = disk.f_blocks * disk.f_frsize
            self._kept = reserve_of(self._reserve, self._disk)
        return max(0, min(disk.f_bavail * disk.f_frsize - self._kept, self.limit() - account.total))

    def limit(self) -> int:
        """The smallest limit of the jobs that use the cache now."""
        if time.monotonic() > self._limit_read + _FRESH:
            # Ours as well: as long as the disk takes no page of ours, it isn't among them.
            self._page.share(self._layout.pages)
            self._limit = min(self._page.limit, pages.smallest_limit(self._layout.pages))
            self._limit_read = time.monotonic()
        return self._limit

    def _look(self, account: Account) -> None:
        account.total = eviction.count(self._layout)  # somebody may have removed files by hand
        self._queue = eviction.least_recent(self._layout)[::-1]

    def _drop(self, account: Account, candidate: eviction.Candidate) -> bool:
        size = eviction.evict(candidate)
        if size is None:
            return False
        account.total -= size
        self._page.add("evictions")
        return True
