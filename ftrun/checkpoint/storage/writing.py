"""Writing a large file of a checkpoint to a disk of this machine: past the page cache, straight from where it lies.

Nobody reads a checkpoint soon after it is written. Copying it into the page cache first takes several times the
processor time that the disk's own transfer does, from the training that runs meanwhile, and drives out of the cache
what the training reads.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from typing import BinaryIO

BATCH = 8 * 2**20
"""Bytes that are written at a time, past the cache, or before the disk is asked to begin."""

BLOCK = 4096
"""What addresses and lengths must be multiples of; no disk asks for more."""

_MOST_VIEWS = 256  # of one system call
_DEPTH = 2  # batches under way
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


class Writer:
    """Writes a file from its start to its end, in a block that ends when nothing is under way any more.

    Past the cache the disk is kept busy with the bytes before while the next ones are summed up. One thread uses it.

    Args:
        file: just created; nothing else writes to it.
        size: how many bytes it will have.
        cached: leave it in the page cache, since it is read soon.

    Attributes:
        written: how many it has got, or is about to.
    """

    def __init__(self, file: BinaryIO, size: int, *, cached: bool = False) -> None:
        self.written = 0
        self._descriptor = file.fileno()
        self._waiting: list[memoryview] = []
        self._count = 0  # bytes in it
        self._at = 0  # where in the file they go
        self._begun = 0
        self._flying: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._direct = size >= BATCH and not cached and _set_direct(self._descriptor)
        if self._direct:
            # Filesystems put writes beyond the end one after the other.
            os.ftruncate(self._descriptor, size)
            self._pool = ThreadPoolExecutor(_DEPTH, "ftrun-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def write(self, view: memoryview) -> None:
        """Add bytes, which stay as they are until the block ends.

        Raises:
            OSError: writing failed, these bytes or earlier ones.
        """
        self.written += len(view)
        self._waiting.append(view)
        self._count += len(view)
        # Through the cache they are written at once, as they lie in the processor's own.
        if not self._direct or self._count >= BATCH or len(self._waiting) == _MOST_VIEWS:
            self._flush()

    def finish(self) -> None:
        """Write what is left.

        Raises:
            OSError: writing failed.
        """
        odd = self._count % BLOCK if self._direct else 0
        last = self._waiting.pop() if odd else memoryview(b"")
        odd = min(odd, len(last))
        self._waiting.append(last[: len(last) - odd])
        self._count -= odd
        self._flush()
        while self._flying:
            self._flying.popleft().result()
        if odd:
            self._leave_direct()
            self._put([last[-odd:]], self._at)

    def _flush(self) -> None:
        views, at = self._waiting, self._at
        self._at += self._count
        self._waiting, self._count = [], 0
        if self._direct and self._pool is not None:
            if len(self._flying) == _DEPTH:
                self._flying.popleft().result()
            self._flying.append(self._pool.submit(self._put, views, at))
        else:
            self._put(views, at)
            self._begin_writing()

    def _put(self, views: list[memoryview], at: int) -> None:
        while views := [view for view in views if len(view)]:
            direct = self._direct
            try:
                count = os.pwritev(self._descriptor, views, at)
            except OSError as error:
                if not direct or error.errno not in _REFUSALS:
                    raise
                count = 0
            if direct and (count == 0 or count % BLOCK):
                self._leave_direct()
            views, at = behind(views, count), at + count

    def _leave_direct(self) -> None:
        """Go on through the cache: this filesystem, or these bytes, can't do without."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False  # only now: another thread may be about to judge what it is told

    def _begin_writing(self) -> None:
        """Have the kernel write what has gathered, so that the disk works while the rest is summed."""
        if self.written - self._begun < BATCH:
            return
        # The kernel starts to write pages that it is told nobody wants; it can't drop them before they are written.
        os.posix_fadvise(self._descriptor, self._begun, self.written - self._begun, os.POSIX_FADV_DONTNEED)
        self._begun = self.written


def _set_direct(descriptor: int) -> bool:
    """Have a file written past the cache, if it lies on a disk. What a network filesystem makes of it differs."""
    if not _DIRECT or not os.major(os.fstat(descriptor).st_dev):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _DIRECT)
    except OSError:
        return False
    return True


def behind(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of views after their first ``done`` bytes."""
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
