"""Fresh memory, made ready for reading into: many pages by one call instead of one by one as they are touched."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

_LEAST = 2**18  # bytes that are worth the calls
_POPULATE_WRITE = 23  # Linux 5.14 has it


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def make_ready(view: memoryview) -> None:
    """Have the system give memory to a view that has none yet. Where it can't, it does so page by page later.

    Args:
        view: writable; its first page says whether the others are there.
    """
    if len(view) < _LEAST:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + len(view) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    there = ctypes.create_string_buffer(1)
    libc = _libc()
    if libc.mincore(first, mmap.PAGESIZE, there) == 0 and not there.raw[0] & 1:
        libc.madvise(first, size, _POPULATE_WRITE)
