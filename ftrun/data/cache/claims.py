"""Who downloads: a claim is an exclusive lock on an object's temporary file. All others wait, but not for ever."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.data.cache import pages
from ftrun.data.cache.refusals import Superseded
from ftrun.flock import let_go, try_lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.cache.books import Account, Books
    from ftrun.data.cache.room import Room

_FIRST, _LONGEST = 0.001, 0.005
"""Seconds between looks at a download of somebody else's."""


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
        found = os.fstat(self.descriptor)
        if _inode(self.path) != found.st_ino:
            raise Superseded(f"{self.path} was taken over by somebody who has waited for it too long")
        held = found.st_size
        if size > held and not room.make(account, size - held):
            return False
        if size != held:
            account.total += size - held
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

    def give(self) -> None:
        """Let others have the file, which has got an object's name: whoever wants to read it must not wait for us."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock, for children that were forked meanwhile, too."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            let_go(descriptor)


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
    waited = 0.0
    while True:
        descriptor = _open(path, books)
        try:
            if _lock(descriptor, path):
                ours, descriptor = descriptor, -1
                return Claim(path, ours, waited)
            if not _wait(descriptor, path, stopped):
                _pass_over(path, os.fstat(descriptor).st_ino, books)
        finally:
            if descriptor >= 0:
                let_go(descriptor)
        waited = time.monotonic() - began
        if arrived():
            return waited


def _open(path: str, books: Books) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except PermissionError:  # what an older version leaves when it is killed has an object's rights
        with books.held() as account:
            drop_unclaimed(path, account)
        return os.open(path, flags, 0o600)


def _lock(descriptor: int, path: str) -> bool:
    """Lock our file, unless somebody else has it, or it was finished or given up between open and lock."""
    return try_lock(descriptor) and _inode(path) == os.fstat(descriptor).st_ino


def _wait(descriptor: int, path: str, stopped: float) -> bool:
    """Wait until a download of somebody else's has ended in whatever way; False where it gives no sign of life."""
    found = os.fstat(descriptor)
    sign, seen, pause = found.st_mtime_ns, time.monotonic(), _FIRST
    while _inode(path) == found.st_ino and not try_lock(descriptor):
        if found.st_mtime_ns != sign:
            sign, seen = found.st_mtime_ns, time.monotonic()
        elif time.monotonic() - seen > stopped:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST)
        found = os.fstat(descriptor)
    return True


def drop_unclaimed(path: str, account: Account) -> None:
    """Remove a temporary file whose downloader is gone. The caller holds the cache's lock.

    Raises:
        OSError: the disk is broken or read-only.
    """
    if not pages.in_use(path):
        size = os.stat(path).st_size
        os.unlink(path)
        account.total -= size


def _pass_over(path: str, inode: int, books: Books) -> None:
    """Take the name away from a download whose process is stopped or hangs."""
    with books.held() as account:
        if _inode(path) == inode:
            account.total -= os.stat(path).st_size
            os.unlink(path)


def _inode(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0
