"""What can go wrong with cached files, and what a message about it says."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextlib.contextmanager
def on_the_disk() -> Iterator[None]:
    """What goes wrong inside is the cache's own disk, not the remote."""
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        raise DiskTrouble(str(error), full=error.errno in FULL) from error
