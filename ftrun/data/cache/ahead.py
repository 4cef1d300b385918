"""Fetching ahead in this process: a few daemon threads that follow a hint, never far ahead of those who read."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
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
        self._ahead: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self._threads = 0

    def follow(self, urls: Iterable[str]) -> None:
        """Fetch these after what was asked for before. They are taken from the iterable as they are needed."""
        with self._changed:
            self._hints.append(iter(urls))
            self._one_more()
            self._changed.notify()

    def read(self, url: str) -> None:
        """Somebody of this process has read a file: there is room for another one."""
        if not self._ahead:
            return
        with self._changed:
            size = self._ahead.pop(url, None)
            if size is not None:
                self._bytes -= size
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
                    self._ahead[url] += size
                    self._bytes += size

    def _take(self) -> str | None:
        """The next file to fetch, once one more may be ahead; None to end."""
        with self._changed:
            while self._hints and (len(self._ahead) >= FILES or self._bytes > self._most):
                if not self._changed.wait(_UNREAD):
                    self._hints.clear()
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
                self._ahead.setdefault(url, 0)
                self._one_more()
                return url
            self._threads -= 1
            return None
