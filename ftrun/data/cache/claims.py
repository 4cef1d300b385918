"""Who downloads: a claim is an exclusive lock on an object's temporary file. All others wait, but not for ever."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.data.cache.refusals import Superseded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.cache.books import Account, Books
    from ftrun.data.cache.room import Room


@dataclass
class Claim:
    """A temporary file that is ours to fill.

    Attributes:
        path: where it lies.
        descriptor: of the file, exclusively locked.
        waited: seconds that somebody else had it.
    """

    path: str
    descriptor: int
    waited: float = 0.0

    @property
    def is_ours(self) -> bool:
        """Whether the name still means our file. Ask with the cache's lock held."""
        return _inode(self.path) == os.fstat(self.descriptor).st_ino

    def beat(self) -> None:
        """Give a sign of life to those who wait."""
        os.utime(self.descriptor)

    def reserve(self, account: Account, room: Room, size: int) -> bool:
        """Take room for ``size`` bytes in all; False where there isn't any. The caller holds the cache's lock.

        Raises:
            Superseded: somebody took us for dead.
            OSError: the disk doesn't take it.
        """
        if not self.is_ours:
            raise Superseded(self.path)
        held = os.fstat(self.descriptor).st_size
        if size > held and not room.make(account, size - held):
            return False
        account.total += size - os.fstat(self.descriptor).st_size
        os.ftruncate(self.descriptor, size)
        return True

    def drop(self, books: Books) -> None:
        """Give up: nothing is left of the file."""
        if os.fstat(self.descriptor).st_size == 0:  # it isn't in the sum
            if self.is_ours:
                os.unlink(self.path)
            return
        with books.held() as account:
            if self.is_ours:
                account.total -= os.fstat(self.descriptor).st_size
                os.unlink(self.path)

    def close(self) -> None:
        """Let go of the lock, for children that were forked meanwhile, too."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)
            self.descriptor = -1


def claim(path: str, stopped: float, books: Books, arrived: Callable[[], bool]) -> Claim | float:
    """Get the right to download, or wait for whoever has it. Returns the seconds waited once the object has arrived.

    Args:
        path: of the temporary file.
        stopped: seconds without a sign of life after which whoever downloads is passed over.
        books: the cache's lock.
        arrived: whether the object is there.

    Raises:
        OSError: the disk doesn't take the file.
        DiskTrouble: the cache's lock isn't to be had.
    """
    began = time.monotonic()
    waiting = 0.0
    sign, seen, pause = None, began, 0.001
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        found = os.fstat(descriptor)
        mine = _try_lock(descriptor)
        if mine and _inode(path) == found.st_ino:
            return Claim(path, descriptor, waiting)
        os.close(descriptor)
        if mine:  # it was finished, or given up, between open and lock
            if arrived():
                return time.monotonic() - began
            continue
        if (found.st_ino, found.st_mtime_ns) != sign:
            sign, seen = (found.st_ino, found.st_mtime_ns), time.monotonic()
        elif time.monotonic() - seen > stopped:
            _pass_over(path, found.st_ino, books)
            continue
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
        waiting = time.monotonic() - began
        if arrived():
            return waiting


def _pass_over(path: str, inode: int, books: Books) -> None:
    """Take the name away from a download whose process is stopped or hangs."""
    with books.held() as account:
        if _inode(path) == inode:
            account.total -= os.stat(path).st_size
            os.unlink(path)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _inode(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0
