"""Fetching ahead in this process: a few daemon threads that follow a hint, never far ahead of those who read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.data.cache.refusals import RemoteError
from ftrun.data.cache.remote import local_path
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftrun.data.cache.records import Fetched

THREADS = 8
FILES = 64
"""Files that have been fetched ahead and not been read yet, at most."""
_UNREAD = 600.0
"""Seconds without a read after which nobody seems to want the rest."""
_SKIPPED = 30.0
"""Seconds after which a file counts as read that wasn't, while one that was asked for later was: it was left out."""


@dataclass
class _File:
    """One that was asked for ahead.

    Attributes:
        asked: when, on the monotonic clock.
        size: its bytes, once it is there.
    """

    asked: float
    size: int = 0


class Ahead:
    """Follows hints. Threads start with the first one, and end when there is nothing more to do."""

    def __init__(self, fetch: Callable[[str], Fetched], most: int) -> None:
        """Assign.

        Args:
            fetch: brings in one file.
            most: bytes that may be ahead; an eviction would take what was fetched too early.
        """
        self._fetch = fetch
        self._most = most
        self._changed = threading.Condition()
        self._hints: deque[Iterator[str]] = deque()
        self._ahead: OrderedDict[str, _File] = OrderedDict()
        self._bytes = 0
        self._passed = 0.0
        self._threads = 0

    def follow(self, urls: Iterable[str]) -> None:
        """Fetch these after what was asked for before. They are taken from the iterable as they are needed."""
        with self._changed:
            self._hints.append(iter(urls))
            self._one_more()
            self._changed.notify()

    @property
    def is_ahead(self) -> bool:
        """Whether anything has been fetched that nobody has read yet."""
        return bool(self._ahead)

    def read(self, url: str) -> None:
        """Somebody of this process has read a file: there is room for another one."""
        if not self._ahead:
            return
        with self._changed:
            found = self._ahead.pop(url, None)
            if found is not None:
                self._bytes -= found.size
                self._passed = max(self._passed, found.asked)
                self._changed.notify_all()

    def _one_more(self) -> None:
        """Start a thread, unless there are enough of them: each that finds something to do starts the next one."""
        if self._threads < THREADS:
            with contextlib.suppress(RuntimeError):  # no more threads in this process: then it is a hint to nobody
                threading.Thread(target=self._work, daemon=True, name="ftrun-ahead").start()
                self._threads += 1

    def _work(self) -> None:
        while (url := self._take()) is not None:
            try:
                size = self._fetch(url).size
            except (RemoteError, UsageError, OSError):  # whoever reads the file will be told
                self.read(url)
                continue
            with self._changed:
                if url in self._ahead:
                    self._ahead[url].size += size
                    self._bytes += size

    def _has_room(self) -> bool:
        """Whether one more may be ahead. What was left out isn't, else such files would stop all others in the end."""
        latest = min(self._passed, time.monotonic() - _SKIPPED)
        while self._ahead:
            url, oldest = next(iter(self._ahead.items()))
            if oldest.asked >= latest:
                break
            del self._ahead[url]
            self._bytes -= oldest.size
        return len(self._ahead) < FILES and self._bytes <= self._most

    def _take(self) -> str | None:
        """The next file to fetch, once one more may be ahead; None to end."""
        with self._changed:
            while self._hints and not self._has_room():
                if not self._changed.wait(_UNREAD):
                    self._hints.clear()
                    self._ahead.clear()
                    self._bytes = 0
            while self._hints:
                try:
                    url = next(self._hints[0])
                except Exception:  # its end, or whatever the caller's generator raises: a hint fails nobody
                    self._hints.popleft()
                    continue
                try:
                    url = local_path(url) or url  # as it will be read
                except UsageError:  # whoever reads it will be told
                    continue
                self._ahead.setdefault(url, _File(time.monotonic()))
                self._one_more()
                return url
            self._threads -= 1
            return None
