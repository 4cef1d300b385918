"""The cache's own files and directories, where somebody may have put something else: a pipe, a link, a directory."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat

# A pipe that nobody writes to would be waited for.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read(path: str) -> bytes:
    """A file's bytes.

    Raises:
        OSError: it isn't there, can't be read, or is no regular file.
    """
    descriptor = os.open(path, READ)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:  # by ourselves: open() refuses a directory's, and leaves it open
        os.close(descriptor)


def append(path: str, data: bytes) -> None:
    """Add to a file's end in one write, so that lines of several processes never mix.

    Raises:
        OSError: the disk doesn't take it, or it is no file.
    """
    descriptor = os.open(path, APPEND, 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def make_directory(path: str) -> None:
    """Make a directory where there is none. What is there instead is removed: the place is the cache's own.

    Raises:
        OSError: its parent isn't there, or the disk doesn't take it.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            os.unlink(path)
            os.mkdir(path, 0o700)


def make_way(path: str) -> None:
    """Remove what is no regular file where one belongs: the place is the cache's own."""
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
        elif not stat.S_ISREG(mode):
            os.unlink(path)
