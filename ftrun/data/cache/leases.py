"""A lease: a shared lock on an object, so that it is not evicted while somebody reads it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING

from ftrun.data.cache import regular
from ftrun.flock import try_lock

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_NOTED = 60.0
"""Seconds for which a use isn't noted again."""


_PAUSES = (0.0002, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds between attempts at an object that is locked for a moment; the last ones for a machine that is overloaded."""

_NO_OBJECT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


class Owner:
    """The process that leases belong to, as far as forks matter.

    Attributes:
        has_forked: it has made a child, which holds a copy of every descriptor.
        is_copy: this is the child's copy.
    """

    def __init__(self) -> None:
        self.has_forked = False
        self.is_copy = False


class Lease:
    """A local file that stays where it is until the lease is released, or the process ends.

    Release it when the file is opened or read; what is open, or mapped, stays readable afterwards. A lease holds one
    file descriptor. It belongs to the process that took it: a forked child that releases its copy changes nothing.

    Attributes:
        path: the file. Only to be read.
        key: of the object; empty where the file was read past the cache.
    """

    __slots__ = ("_descriptor", "_owner", "key", "path")

    def __init__(self, path: Path, key: str, descriptor: int, owner: Owner) -> None:
        self.path = path
        self.key = key
        self._descriptor = descriptor
        self._owner = owner

    def release(self) -> None:
        """Let go of the file. Twice is no error."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self._owner.has_forked and not self._owner.is_copy:  # said aloud: a child may hold the lock, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError, AttributeError, TypeError):  # the interpreter may be on its way out
                self.release()


def lease(path: str, size: int) -> int | None:
    """A descriptor that holds a shared lock on an object of ``size`` bytes; None where there is no such object.

    Raises:
        OSError: out of descriptors, or the disk is broken.
    """
    try:
        descriptor = os.open(path, regular.READ)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return None
        raise
    try:
        if not try_lock(descriptor, shared=True):
            _share(descriptor)
        found = os.fstat(descriptor)
        # Nobody has evicted it between open and lock, and it is what was downloaded.
        if found.st_nlink and found.st_size == size and stat.S_ISREG(found.st_mode):
            if found.st_mtime + _NOTED < time.time():
                _note_use(descriptor)
            return descriptor
    except BlockingIOError:
        pass  # whoever evicts it has been stopped
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _share(descriptor: int) -> None:
    """Lock an object, which has this moment got its name, or is about to go, when it is locked otherwise."""
    for pause in _PAUSES:
        time.sleep(pause)
        if try_lock(descriptor, shared=True):
            return
    raise BlockingIOError(errno.EAGAIN, "the object is locked")


def _note_use(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a read-only disk: then nothing is evicted there either
        os.utime(descriptor)


def is_whole(path: str, size: int) -> bool:
    """Whether an object is there and has its size."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_size == size and stat.S_ISREG(found.st_mode)
