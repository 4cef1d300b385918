"""Log files that survive a full disk, and their further names."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class LogFile:
    """Appends to a file, and goes on when that fails: what is missing is said in the file once it can be written.

    Used by one thread.

    Args:
        path: the file; made when it is first written, emptied if it is there.
        say: told once when writing begins to fail.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._fd: int | None = None
        self._missing = 0
        self._reason = ""
        self._open(os.O_TRUNC)

    def _open(self, more: int = 0) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | more, 0o666)
        except OSError as error:
            self._failed(error)
        return self._fd is not None

    def write(self, data: bytes) -> None:
        """Append as much as the disk takes."""
        if not data:
            return
        if self._fd is None and not self._open():
            self._missing += len(data)
            return
        if self._missing:
            gap = f"\n[ftrun: {self._missing:,} bytes are missing here: {self._reason}]\n".encode()
            if self._append(gap):
                self._missing += len(data)
                return
            self._missing = 0
        self._missing += self._append(data)

    def _append(self, data: bytes) -> int:
        """Write, and give how many bytes could not be written."""
        assert self._fd is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._failed(error)
        return len(rest)

    def _failed(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if reason != self._reason:
            self._reason = reason
            self._say(f"{self._path} can't be written: {reason}. Training goes on; this log will have a gap.")

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def name_also(file: Path, other: Path) -> None:
    """Give a log file a further name: the same file, so that removing the one doesn't take the other away.

    Where the file system can't (or they are on two), a symbolic link; where it can't do that either, nothing.
    """
    if not file.is_file() or other.is_symlink() or other.exists():
        return
    try:
        other.hardlink_to(file)
    except OSError:
        target = file.name if file.parent == other.parent else file.absolute()
        try:
            other.symlink_to(target)
        except OSError:
            return


def keep(link: Path) -> None:
    """Make a symbolic link to a file a name of that file, which stays when the other one is removed."""
    if not link.is_symlink() or not link.is_file():
        return
    temporary = link.with_name(f".{link.name}")
    with contextlib.suppress(OSError):  # on another file system it stays a symbolic link
        os.link(link.resolve(), temporary)
        temporary.replace(link)
