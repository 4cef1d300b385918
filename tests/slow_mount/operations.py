"""What a slow mount answers the kernel. Only its server imports this, once libfuse3 is chosen."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import mfusepy

from slow_mount.page import Counts, Page

if TYPE_CHECKING:
    from pathlib import Path

_HANGING = 0.01
_TOLD = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")


class PassThrough(mfusepy.Operations):  # type: ignore[misc]
    """Reads of a directory, with what the page wants to happen to them.

    Args:
        source: the directory.
        page: shared with whoever made the mount; the names of opened files go into a file beside it.
    """

    use_ns = True

    def __init__(self, source: Path, page: Path) -> None:
        self._source = source
        self._page = Page(page)
        self._opened = os.open(f"{page}.opened", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._counting = threading.Lock()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        time.sleep(self._page.wanted.stat_seconds)
        status = self._real(os.lstat, path)
        times = {"st_mtime": status.st_mtime_ns, "st_atime": status.st_atime_ns, "st_ctime": status.st_ctime_ns}
        return {each: getattr(status, each) for each in _TOLD} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._real(os.listdir, path)]

    def readlink(self, path: str) -> str:
        return str(self._real(os.readlink, path))

    def open(self, path: str, flags: int) -> int:
        self._behave(self._page.wanted.open_seconds)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise mfusepy.FuseOSError(errno.EROFS)
        descriptor = int(self._real(os.open, path, os.O_RDONLY))
        os.write(self._opened, f"{path.removeprefix('/')}\n".encode())
        self._count(opens=1)
        return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._behave(self._page.wanted.read_seconds)
        end = self._page.wanted.truncate
        data = os.pread(fh, size if end < 0 else max(0, min(size, end - offset)), offset)
        self._count(reads=1, size=len(data))
        return data

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def _behave(self, seconds: float) -> None:
        time.sleep(seconds)
        while (wanted := self._page.wanted).hang:
            time.sleep(_HANGING)
        if wanted.error:
            raise mfusepy.FuseOSError(wanted.error)

    def _count(self, opens: int = 0, reads: int = 0, size: int = 0) -> None:
        with self._counting:
            now = self._page.counts
            self._page.counts = Counts(now.opens + opens, now.reads + reads, now.bytes + size)

    def _real(self, call: Any, path: str, *arguments: Any) -> Any:
        try:
            return call(self._source / path.removeprefix("/"), *arguments)
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from error
