"""Every way to change a file that the recorder has to see."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def data(directory: Path) -> None:
    root = directory / "root"
    root.mkdir()
    with (root / "stream").open("wb") as file:
        file.write(b"a" * 10_000)
        file.seek(100)
        file.write(b"b" * 50)
        file.truncate(9_000)
    with (root / "stream").open("ab") as file:
        file.write(b"end")
    with (root / "stream").open("r+b") as file:
        file.read(10)
        file.write(b"inside")
    descriptor = os.open(root / "raw", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"one")
    os.pwrite(descriptor, b"two", 1000)
    os.writev(descriptor, [b"three", b"four"])
    os.pwritev(descriptor, [b"five", b"six"], 500)
    os.ftruncate(descriptor, 2000)
    os.posix_fallocate(descriptor, 0, 3000)
    copy = os.open(root / "copy", os.O_WRONLY | os.O_CREAT)
    os.copy_file_range(descriptor, copy, 1500, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.sendfile(copy, descriptor, None, 600)
    os.fsync(copy)
    os.fdatasync(descriptor)
    os.close(descriptor)
    os.close(copy)
    os.truncate(root / "raw", 1200)
    shutil.copy(root / "raw", root / "copied")
    (root / "raw").write_text("again")
    os.sync()


def names(directory: Path) -> None:
    root = directory / "root"
    (root / "a" / "b").mkdir(parents=True)
    for name in ("one", "two", "three", "four"):
        (root / name).write_text(name)
    os.link(root / "one", root / "a" / "linked")
    (root / "two").rename(root / "a" / "moved")
    (root / "three").replace(root / "four")
    (root / "one").write_text("both names")
    (root / "one").unlink()
    here = os.open(root / "a", os.O_RDONLY)
    os.mkdir("in", dir_fd=here)
    os.close(os.open("in/file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.rename("in/file", "in/renamed", src_dir_fd=here, dst_dir_fd=here)
    os.link("in/renamed", "in/hard", src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
    os.unlink("in/hard", dir_fd=here)
    os.fsync(here)
    os.close(here)
    (root / "a" / "b").rename(root / "b")
    os.chdir(root)
    with open("relative name with ü", "x") as file:
        file.write("relative")
    os.chdir("/")
    shutil.rmtree(root / "a" / "in")
    nameless = os.open(root, os.O_TMPFILE | os.O_RDWR)
    os.write(nameless, b"born without a name")
    os.link(f"/proc/self/fd/{nameless}", root / "named", src_dir_fd=nameless, follow_symlinks=True)
    os.close(nameless)


def crowd(directory: Path) -> None:
    """Threads, forked and started processes at once."""
    root = directory / "root"
    root.mkdir()

    def work(name: str) -> None:
        for number in range(20):
            temporary = root / f"{name}-{number}.tmp"
            temporary.write_bytes(name.encode() * 300)
            temporary.rename(root / f"{name}-{number % 3}")

    script = f"open({str(root / 'started')!r}, 'w').write('from another program')"
    started = subprocess.Popen([sys.executable, "-c", script])
    child = os.fork()
    if child == 0:
        work("child")
        os._exit(0)
    threads = [threading.Thread(target=work, args=(f"thread{number}",)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert os.waitpid(child, 0)[1] == 0
    assert started.wait(30) == 0


def library_stream(directory: Path) -> None:
    """What the recorder can't see: the C library's own stream."""
    (directory / "root").mkdir()
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    stream = library.fopen(os.fsencode(directory / "root" / "file"), b"w")
    library.fputs(b"unseen", ctypes.c_void_p(stream))
    library.fclose(ctypes.c_void_p(stream))


def memory_map(directory: Path) -> None:
    import mmap

    (directory / "root").mkdir()
    with (directory / "root" / "file").open("w+b") as file:
        file.truncate(100)
        with mmap.mmap(file.fileno(), 100) as memory:
            memory[:4] = b"mmap"
