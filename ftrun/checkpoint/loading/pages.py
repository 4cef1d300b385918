"""Fresh memory, made ready for reading into: many pages by one call instead of one by one as they are touched."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

_LEAST = 2**18  # bytes that are worth the calls
_POPULATE_WRITE = 23  # Linux 5.14 has it
_OneByte = ctypes.c_char * 1


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def is_there(view: memoryview) -> bool:
    """Whether a view seems to have its memory: its first and its last whole page do."""
    first, size = _pages(view)
    return size > 0 and _has_page(first) and _has_page(first + size - mmap.PAGESIZE)


def make_ready(view: memoryview) -> None:
    """Have the system give memory to a view that has none yet. Where it can't, it does so page by page later.

    Args:
        view: writable; its first page says whether the others are there.
    """
    if len(view) < _LEAST:
        return
    first, size = _pages(view)
    if not _has_page(first):
        _libc().madvise(first, size, _POPULATE_WRITE)


def _pages(view: memoryview) -> tuple[int, int]:
    """Address of the whole pages of a view, and their bytes."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, (address + len(view) - first) // mmap.PAGESIZE * mmap.PAGESIZE


def _has_page(address: int) -> bool:
    there = _OneByte()
    return _libc().mincore(address, mmap.PAGESIZE, there) != 0 or bool(there.raw[0] & 1)
