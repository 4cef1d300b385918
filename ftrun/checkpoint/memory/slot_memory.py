"""One slot's payload as memory: a file in shared memory, mapped, and filled by this process alone.

Pages are allocated before they are touched, so that too little room is an error here and never a SIGBUS in the middle
of a copy. The file has exactly the size of the payload and is used again by later saves and later attempts, as its
pages are: fresh ones cost several times the copy.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint.checksums import Checksums
from ftrun.checkpoint.memory.files import make_way

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.checksums import FileRecord

_CHUNK = 64 * 2**20  # allocated and mapped at a time, so that a thread that waits for the GIL gets it
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not among Python's constants before 3.14
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoRoomError(OSError):
    """The filesystem has too little room.

    Attributes:
        path: the file that was to grow.
        missing: bytes that are missing, as far as known.
    """

    def __init__(self, path: Path, missing: int) -> None:
        super().__init__(errno.ENOSPC, f"{missing} bytes are missing", str(path))
        self.path = path
        self.missing = missing


class SlotMemory:
    """The memory of one payload. One thread at a time uses it; the owner says which.

    Args:
        path: the file.
        device: a GPU for which to pin it, so that copies run beside everything else; None for none.

    Attributes:
        path: the file.
        size: its bytes, 0 before :meth:`resize`.
    """

    def __init__(self, path: Path, *, device: torch.device | None = None) -> None:
        self.path = path
        self.size = 0
        self._device = device
        self._registered = False
        self._descriptor: int | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._populated = 0

    @property
    def address(self) -> int:
        """Where its first byte is."""
        return self._bytes.data_ptr()

    @property
    def mapping(self) -> object:
        """Keeps the memory where it is as long as it lives."""
        return self._bytes

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of it as a tensor. ``offset`` is a multiple of the element size."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def record(self) -> FileRecord:
        """What its bytes are now. Other threads run meanwhile, but for the time between two chunks."""
        sums = Checksums()
        sums.update(self._bytes[: self.size].numpy().data)
        return sums.record()

    def resize(self, size: int) -> None:
        """Give the file this size, all its pages allocated, and map it. Quick when it has the size already.

        Raises:
            NoRoomError: too little room; what the file held is given back.
            OSError: anything else that the filesystem says.
        """
        self._open()
        if self.size == size and size <= len(self._bytes):
            return
        self._unregister()
        self.size = 0
        _allocate(self._file, self.path, size)
        if size > len(self._bytes):
            # The old mapping goes when nothing refers to it any more.
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
            self._populated = 0
        self._populated = min(self._populated, size)
        self.size = size
        self._register()

    def populate(self) -> None:
        """Enter its pages into this process's page table, which the first copy would pay for otherwise."""
        start = -(-self._populated // mmap.PAGESIZE) * mmap.PAGESIZE
        for offset in range(start, self.size, _CHUNK):
            length = min(_CHUNK, self.size - offset)
            where = ctypes.c_void_p(self.address + offset)
            if _LIBC.madvise(where, ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE)) != 0:
                self._bytes.numpy()[offset : offset + length : mmap.PAGESIZE].max()  # an older kernel: read each page
        self._populated = self.size

    def release(self) -> None:
        """Give its room back; the file stays, empty."""
        self.close()
        if self.path.exists():
            os.truncate(self.path, 0)

    def close(self) -> None:
        """Let go of the file, which stays as it is."""
        self._unregister()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.size = self._populated = 0
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _file(self) -> int:
        assert self._descriptor is not None, "opened before"
        return self._descriptor

    def _open(self) -> None:
        if self._descriptor is not None and not _is_at(self._descriptor, self.path):
            self.close()  # somebody removed the file: what is written to it would be seen by nobody
        if self._descriptor is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_way(self.path, link=True)  # what a link leads to is somebody else's
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _register(self) -> None:
        if self._device is None or not self.size:
            return
        with torch.cuda.device(self._device):  # the helper's own device may be another rank's
            code = _cuda().cudaHostRegister(self.address, self.size, 0)
        self._registered = int(code) == 0  # without it copies are slower, and as right

    def _unregister(self) -> None:
        if self._registered:
            with torch.cuda.device(self._device):
                _cuda().cudaHostUnregister(self.address)
            self._registered = False


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _allocate(descriptor: int, path: Path, size: int) -> None:
    status = os.fstat(descriptor)
    held = status.st_blocks * 512
    full = held >= status.st_size
    if status.st_size != size:
        os.ftruncate(descriptor, size)
    if full and size <= status.st_size:
        return
    missing = size - held - _room(descriptor)
    if missing > 0:
        os.ftruncate(descriptor, 0)
        raise NoRoomError(path, missing)
    try:
        for offset in range(status.st_size if full else 0, size, _CHUNK):
            os.posix_fallocate(descriptor, offset, min(_CHUNK, size - offset))
    except OSError as error:
        os.ftruncate(descriptor, 0)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise NoRoomError(path, max(1, size - _room(descriptor))) from error


def _room(descriptor: int) -> int:
    """Free bytes of its filesystem; without limit where it doesn't say."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize if status.f_blocks else 2**63
