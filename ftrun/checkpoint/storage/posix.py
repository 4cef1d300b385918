"""Storage in a directory: a local disk, NFS, or whatever is mounted."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun import durable
from ftrun.checkpoint.storage.base import IrregularError
from ftrun.checkpoint.storage.writing import Writer
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from ftrun.checkpoint.storage.base import Source

_MEBI = 2**20


@dataclass(frozen=True)
class PosixStorage:
    """A directory. It need not exist before the first write.

    Attributes:
        path: the directory, absolute.
        cached: leave large files in the page cache, since they are read soon after they are written.
    """

    path: Path
    cached: bool = False
    remote = False

    @property
    def url(self) -> str:
        """The path as text."""
        return str(self.path)

    def local(self, key: str) -> Path:
        """The plain path of a key."""
        return self.path / key

    def names(self, directory: str) -> list[str]:
        """Names directly within a directory."""
        try:
            return os.listdir(self.path / directory)
        except FileNotFoundError:
            return []

    def tree(self, directory: str) -> dict[str, int]:
        """Sizes of all regular files below a directory; links are not followed."""
        found: dict[str, int] = {}
        self._walk(self.path / directory, "", found)
        return found

    def size(self, key: str) -> int | None:
        """Size of a regular file."""
        # Through a new handle: network filesystems answer stat from a cache, but ask the server on open.
        try:
            descriptor = os.open(f"{self.path}/{key}", os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, key: str) -> bytes:
        """All bytes of a small file."""
        with io.FileIO(_open_regular(self.path / key)) as file:
            return file.readall()

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[OpenFile]:
        """Open a file for reading ranges of it."""
        descriptor = _open_regular(self.path / key)
        try:
            yield OpenFile(descriptor)
        finally:
            os.close(descriptor)

    def create(self, key: str, data: bytes) -> None:
        """Create a small file, exclusively."""
        path = self.path / key
        durable.make_dirs(path.parent)
        durable.create(path, data)
        # Not every filesystem keeps its word about exclusive creation; what lies there now says who won.
        if path.read_bytes() != data:
            raise FileExistsError(f"{path} was written by somebody else at the same time")

    def write(self, key: str, data: bytes) -> None:
        """Write or replace a small file."""
        durable.make_dirs((self.path / key).parent)
        durable.write(self.path / key, data)

    def put(self, key: str, source: Source, size: int) -> None:
        """Create a large file. A failure leaves nothing of it; trying again is the caller's to decide."""
        path = self.path / key
        durable.make_dirs(path.parent)
        with durable.creating(path) as file, Writer(file, size, cached=self.cached) as writer:
            for view in source():
                writer.write(view)
            writer.finish()
            if writer.written != size:
                raise ValueError(f"{path} is to have {size} bytes, and its source gave {writer.written}")
        kept = self.size(key)
        if kept != size:
            raise CheckpointError(f"{path} has {kept or 'no'} bytes instead of the {size} written: check the storage")

    def delete(self, keys: Collection[str]) -> None:
        """Delete files."""
        for key in keys:
            (self.path / key).unlink(missing_ok=True)

    def make_directory(self, directory: str) -> None:
        """Make a directory and its parents, durably."""
        durable.make_dirs(self.path / directory)

    def sync_directory(self, directory: str) -> None:
        """Make the names within a directory durable."""
        durable.fsync_dir(self.path / directory)

    def remove_directories(self, directories: Iterable[str]) -> None:
        """Remove those directories that are empty."""
        for directory in directories:
            with contextlib.suppress(OSError):
                (self.path / directory).rmdir()

    def abort_uploads(self, directory: str) -> None:
        """Nothing to do: what a write leaves behind is a temporary file, which :meth:`tree` shows."""

    def _walk(self, top: Path, prefix: str, found: dict[str, int]) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(top) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found[prefix + entry.name] = status.st_size
                    elif stat.S_ISDIR(status.st_mode):
                        self._walk(top / entry.name, f"{prefix}{entry.name}/", found)


def _open_regular(path: Path) -> int:
    """Open a plain file for reading, and never wait for anybody, as opening a pipe does.

    Raises:
        FileNotFoundError: there is nothing.
        IrregularError: there is something else.
        OSError: it can't be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        link = next((each for each in (path, path.parent) if each.is_symlink() and not each.exists()), None)
        if link is None:
            raise
        raise _irregular(link, f"a link to {os.readlink(link)}, which isn't there") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "a link that leads in a circle" if error.errno == errno.ELOOP else "a socket or device"
        raise _irregular(path, what) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise _irregular(path, next((name for is_it, name in _KINDS if is_it(mode)), "a device"))


_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"))


def _irregular(path: Path, what: str) -> IrregularError:
    return IrregularError(f"{path} is {what}, not a plain file: put the file back, or move this out of the way")


@dataclass(frozen=True)
class OpenFile:
    """A file that is open for reading.

    Attributes:
        descriptor: of the file.
    """

    descriptor: int
    granule = _MEBI  # what was read is still in the processor's cache when it is summed up

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        while len(view):
            count = os.preadv(self.descriptor, [view], offset)
            if count == 0:
                raise EOFError(f"the file ends {len(view)} bytes too early")
            view, offset = view[count:], offset + count
