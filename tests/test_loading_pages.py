"""Fresh memory is there before it is read into, and memory that holds something stays as it is."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from ftrun.checkpoint.loading.pages import make_ready

PAGE = mmap.PAGESIZE
SIZE = 2**20


def present(view: memoryview) -> int:
    """How many whole pages of a view are in memory."""
    pages = ctypes.create_string_buffer(len(view) // PAGE)
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    assert libc.mincore(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view) // PAGE * PAGE, pages) == 0
    return sum(each & 1 for each in pages.raw[: len(view) // PAGE])


def fresh(size: int = SIZE) -> memoryview:
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@pytest.fixture(autouse=True)
def _populates() -> None:
    mapping = mmap.mmap(-1, PAGE)
    try:
        mapping.madvise(23)
    except OSError:
        pytest.skip("this kernel can't do it: pages come as they are touched")


def test_fresh_memory_is_there_afterwards() -> None:
    view = fresh()
    assert present(view) == 0
    make_ready(view)
    assert present(view) == SIZE // PAGE


def test_only_whole_pages_of_the_view_itself() -> None:
    view = fresh(3 * SIZE)
    make_ready(view[SIZE + 5 : 2 * SIZE + 5])
    assert present(view[:SIZE]) == 0
    assert present(view[SIZE : 2 * SIZE]) == SIZE // PAGE - 1
    assert present(view[2 * SIZE :]) == 0


def test_small_views_are_left_to_themselves() -> None:
    view = fresh()
    make_ready(view[:PAGE])
    make_ready(view[:0])
    assert present(view) == 0


def test_what_memory_holds_stays() -> None:
    view = fresh()
    view[:] = bytes(range(256)) * (SIZE // 256)
    make_ready(view)
    make_ready(view[7:])
    assert view == bytes(range(256)) * (SIZE // 256)
