"""Large files of a checkpoint on a disk: written past the page cache where that works, and right everywhere."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.storage.posix import PosixStorage
from ftrun.checkpoint.storage.writing import BATCH, BLOCK, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

MEBI = 2**20
PATTERN = bytes(range(251))  # of prime length, so that no two blocks are alike


def content(size: int) -> memoryview:
    """Bytes that begin with a page, as the memory tier's files do when they are mapped."""
    mapping = mmap.mmap(-1, max(1, size))
    mapping.write((PATTERN * (size // len(PATTERN) + 1))[:size])
    return memoryview(mapping)[:size]


def sliced(view: memoryview, step: int) -> Iterator[memoryview]:
    return (view[start : start + step] for start in range(0, len(view), step))


def is_direct(file: BinaryIO) -> bool:
    return bool(fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("size", [0, 1, BATCH - 1, BATCH, BATCH + 1, BATCH + BLOCK, 2 * BATCH + 5 * MEBI + 777])
@pytest.mark.parametrize("step", [MEBI, 2**16, 999_983, 4 * BATCH], ids=["usual", "limited", "odd", "whole"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_of_any_size_in_pieces_of_any_size(tmp_path: Path, size: int, step: int, cached: bool) -> None:
    view = content(size)
    PosixStorage(tmp_path, cached).put("a/x", lambda: sliced(view, step), size)
    assert (tmp_path / "a/x").read_bytes() == view
    assert os.listdir(tmp_path / "a") == ["x"]


def test_a_file_in_very_many_pieces(tmp_path: Path) -> None:
    view = content(BATCH + 3)
    PosixStorage(tmp_path).put("x", lambda: sliced(view, BLOCK), len(view))
    assert (tmp_path / "x").read_bytes() == view


def test_bytes_that_lie_as_no_disk_takes_them(tmp_path: Path) -> None:
    view = content(2 * BATCH + 1)[1:]
    with (tmp_path / "x").open("xb") as file, Writer(file, len(view)) as writer:
        for piece in sliced(view, MEBI):
            writer.write(piece)
        writer.finish()
    assert writer.written == len(view)
    assert (tmp_path / "x").read_bytes() == view


def test_what_is_large_goes_past_the_page_cache_of_a_disk(tmp_path: Path) -> None:
    view = content(BATCH + 3)
    with (tmp_path / "x").open("xb") as file, Writer(file, len(view)) as writer:
        if not os.major(os.fstat(file.fileno()).st_dev):
            pytest.skip("the temporary directory lies on no disk")
        if not is_direct(file):
            pytest.skip("its filesystem always uses the cache")
        writer.write(view[:BATCH])
        writer.write(view[BATCH:])
        writer.finish()
        os.fsync(file.fileno())
        assert resident(tmp_path / "x") == 1
        assert not is_direct(file), "the odd bytes at the end need the cache"
    for name, size, cached in (("small", BATCH - 1, False), ("read soon", BATCH, True)):
        with (tmp_path / name).open("xb") as file, Writer(file, size, cached=cached):
            assert not is_direct(file)


def resident(path: Path) -> int:
    """Pages of a file in the page cache."""
    code = (
        "import ctypes, mmap, sys\n"
        "size = int(sys.argv[2])\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    mapping = mmap.mmap(file.fileno(), size)\n"
        "pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)\n"
        "libc.mincore(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size, pages)\n"
        "print(sum(each & 1 for each in pages.raw))\n"
    )
    command = [sys.executable, "-c", code, str(path), str(path.stat().st_size)]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


LIMITED = """
import errno, resource, sys
from pathlib import Path
from ftrun.checkpoint.storage.posix import PosixStorage
from ftrun.checkpoint.storage.writing import BATCH
resource.setrlimit(resource.RLIMIT_FSIZE, (BATCH + 2**20 + 5, resource.RLIM_INFINITY))
piece = memoryview(bytearray(2**20))
try:
    PosixStorage(Path(sys.argv[1])).put("x", lambda: iter([piece] * 20), 20 * 2**20)
except OSError as error:
    assert error.errno == errno.EFBIG, error
    print("refused")
"""


def test_a_disk_that_is_full_half_way_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr
    assert os.listdir(tmp_path) == []


def test_a_source_with_too_few_bytes_is_refused(tmp_path: Path) -> None:
    view = content(BATCH)
    with pytest.raises(ValueError, match="its source gave"):
        Root.open(tmp_path / "root").put("x", lambda: sliced(view, MEBI), BATCH + 1)
    assert os.listdir(tmp_path / "root") == []
