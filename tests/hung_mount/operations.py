"""What a mount that may hang answers the kernel. Only its server imports this, once libfuse3 is chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import mfusepy

if TYPE_CHECKING:
    from pathlib import Path


class Files(mfusepy.Operations):  # type: ignore[misc]
    """Every call is made on the directory itself."""

    use_ns = True

    def __init__(self, source: Path) -> None:
        self._source = source

    def _real(self, path: str) -> Path:
        return self._source / path.removeprefix("/")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(self._real(path))
        times = {"st_mtime": found.st_mtime_ns, "st_atime": found.st_atime_ns, "st_ctime": found.st_ctime_ns}
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags & ~os.O_CREAT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._real(path), length)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._real(old), self._real(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._real(source), self._real(target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._real(target))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times)
        return 0
