"""Files that are whole or absent, also after a power loss. One place knows the order of flush, fsync and rename."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

# A filesystem without hard links says so with one of these.
_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable. A filesystem that can't sync directories (some FUSE) is left alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes ``path`` when the block ends well, and disappears when it doesn't.

    Raises:
        OSError: anything the filesystem says; ``path`` is then as it was before.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write(path: Path, data: bytes) -> None:
    """Write or replace a file, whole or not at all."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def creating(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes ``path``, which must not exist yet, when the block ends well.

    Two writers that write the same file at once don't disturb each other: one of them is told that it was late.

    Raises:
        FileExistsError: the file is there, before or after.
        OSError: anything the filesystem says; there is then no ``path``.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def _place(temporary: Path, path: Path) -> None:
    """Give a whole file its name, exclusively where the filesystem has links."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.replace(path)


def create(path: Path, data: bytes) -> None:
    """Create a file that must not exist yet: one of many racing writers wins, and the file is whole once visible.

    ``os.link`` is the exclusive step. Where the filesystem has no links, an exclusive open is: the file is then
    visible while it grows, so readers of such files check a checksum inside them.

    Raises:
        FileExistsError: somebody else was first.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            fsync_dir(path.parent)  # its maker may have ended before the name was durable
            raise
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            _create_without_links(path, data)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def _create_without_links(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_dirs(path: Path) -> None:
    """Create a directory and its parents, each made durable in its own parent."""
    missing = []
    current = path
    while not current.exists():
        missing.append(current)
        current = current.parent
    # Whoever made the last one that is there may have ended before it synced it; those above came before that one.
    with contextlib.suppress(PermissionError):
        fsync_dir(current.parent)
    for directory in reversed(missing):
        if directory.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(directory))
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def append_line(path: Path, line: bytes) -> None:
    """Append one line with a single write, so that lines of several processes on one machine never mix.

    A line that a full disk has cut off is ended first: it must not take the next one with it. One that another process
    is writing at this moment can look cut off, too; an empty line comes between them then, which readers pass over.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
