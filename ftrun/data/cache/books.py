"""The one lock under which names change, and the sum of bytes that is kept with it.

The sum is that of the sizes of all objects and temporary files. Whoever takes the lock marks the sum as being changed;
whoever finds the mark of somebody who died, or no sum that can be one, counts afresh.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

from ftrun.data.cache.refusals import DiskTrouble, OnTheDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RECORD = struct.Struct("=8sqqq")
_MAGIC = b"ftcache1"
_AGAIN = 30.0
"""Seconds for which a lock that wasn't to be had isn't asked for again."""


class Account:
    """The sum of bytes, while the lock is held."""

    def __init__(self, total: int) -> None:
        self.total = total


class Books:
    """The cache's lock and sum, as one process sees them. Any thread may use them."""

    def __init__(self, path: str, count: Callable[[], int], deadline: float) -> None:
        """Assign; nothing is opened yet.

        Args:
            path: of the lock file.
            count: adds up what lies in the cache.
            deadline: seconds to wait for the lock.
        """
        self._path = path
        self._count = count
        self._deadline = deadline
        self._thread = threading.Lock()
        self._descriptor = -1
        self._inode = 0
        self._given_up = 0.0

    @contextlib.contextmanager
    def held(self) -> Iterator[Account]:
        """Hold the lock. What goes wrong inside makes the next holder count afresh.

        Raises:
            DiskTrouble: the lock isn't to be had, or the disk doesn't take what is written.
        """
        until = time.monotonic() + self._deadline
        if time.monotonic() < self._given_up or not self._thread.acquire(timeout=self._deadline):
            raise DiskTrouble(f"{self._path} is held by somebody who doesn't let go")
        try:
            with OnTheDisk():
                self._lock(until)
            try:
                with OnTheDisk():
                    account = Account(self._open())
                    yield account
                    self._write(account.total, 0)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # the interpreter may be on its way out
            os.close(self._descriptor)

    def forget(self) -> None:
        """Let go of what was inherited from the process we were forked from, which may be holding the lock."""
        self._thread = threading.Lock()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, until: float) -> None:
        if self._descriptor >= 0 and not self._is_there():
            os.close(self._descriptor)
            self._descriptor = -1
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._inode = os.fstat(self._descriptor).st_ino
        pause = 0.0002
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    self._given_up = time.monotonic() + _AGAIN
                    raise DiskTrouble(f"{self._path} was not to be had for {self._deadline:g} s") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _is_there(self) -> bool:
        """Whether the file that we have open is still the one of that name: somebody may have removed the cache."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        data = os.pread(self._descriptor, _RECORD.size, 0)
        magic, total, changing, check = _RECORD.unpack(data) if len(data) == _RECORD.size else (b"", 0, 1, 0)
        self._write(total, 1)
        return self._count() if changing or magic != _MAGIC or check != ~total else int(total)

    def _write(self, total: int, changing: int) -> None:
        os.pwrite(self._descriptor, _RECORD.pack(_MAGIC, total, changing, ~total), 0)
