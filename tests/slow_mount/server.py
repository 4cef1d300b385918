"""The process behind a slow mount: ``server.py SOURCE MOUNT PAGE PARENT``, or ``--check``.

It ends, and its mount with it, when the process PARENT ends.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import select
import shutil
import subprocess
import sys
import threading
from pathlib import Path


def main() -> None:
    # With libfuse2 beside it, requests would be of 4 KiB: the name must be known before the module is imported.
    library = ctypes.util.find_library("fuse3")
    if library is None:
        raise SystemExit("no libfuse3: install Debian's fuse3")
    os.environ["FUSE_LIBRARY_PATH"] = library
    try:
        import mfusepy
    except ImportError:
        raise SystemExit("no mfusepy: pip install mfusepy") from None
    if sys.argv[1:] == ["--check"]:
        return
    source, mount, page, parent = sys.argv[1:]
    _end_with(int(parent), Path(mount), Path(page).parent)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from slow_mount.operations import PassThrough

    # direct_io: each read is a request, and counted; attributes are asked for every time, as the remote may change.
    mfusepy.FUSE(
        PassThrough(Path(source), Path(page)),
        mount,
        foreground=True,
        fsname="slow",
        direct_io=True,
        ro=True,
        attr_timeout=0,
        entry_timeout=0,
    )
    _tidy(int(parent), Path(mount), Path(page).parent)


def _end_with(parent: int, mount: Path, state: Path) -> None:
    """Unmount and end as soon as the parent has ended, and tidy up for it; requests that hang don't matter."""
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:
        raise SystemExit("the process that wanted this mount has ended")

    def wait() -> None:
        select.select([watched], [], [])
        subprocess.run(["fusermount3", "-u", "-z", "-q", mount], check=False)
        _tidy(parent, mount, state)  # as the main thread does, unless requests hang in it
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _tidy(parent: int, mount: Path, state: Path) -> None:
    """Do what a parent that was killed has left undone."""
    if os.getppid() != parent:
        shutil.rmtree(state, ignore_errors=True)
        with contextlib.suppress(OSError):
            mount.rmdir()


if __name__ == "__main__":
    main()
