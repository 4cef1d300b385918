"""What can go wrong with cached files, and what a message about it says."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from types import TracebackType

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class RemoteError(FtrunError, OSError):
    """A remote file couldn't be read, after every attempt; the message names its URL."""


class RemoteFileMissing(RemoteError, FileNotFoundError):
    """There is no such remote file (any more)."""


class DiskTrouble(Exception):
    """The cache's own disk doesn't take a file: full, read-only, broken, or its lock is not to be had.

    Attributes:
        full: the disk has no more space, or no more inodes.
    """

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class Outdated(Exception):
    """The remote file isn't the one that was looked at: look again."""


class Superseded(DiskTrouble):
    """Somebody took us for dead and downloads the file in our place."""


class OnTheDisk:
    """What goes wrong inside the ``with`` block is the cache's own disk, not the remote.

    Raises:
        DiskTrouble: for an OSError, unless the process is out of descriptors.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.errno not in OUT_OF_DESCRIPTORS:
            raise DiskTrouble(str(error), full=error.errno in FULL) from error
