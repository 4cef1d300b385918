"""The process behind the mount: ``server.py SOURCE MOUNT PARENT``. It ends, and the mount with it, when PARENT ends."""

from __future__ import annotations

import ctypes.util
import os
import select
import sys
import threading
from pathlib import Path


def main() -> None:
    # Before the module is imported, which would take libfuse2 where that is, too.
    os.environ["FUSE_LIBRARY_PATH"] = ctypes.util.find_library("fuse3") or ""
    import mfusepy

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from hung_mount.mount import unmount
    from hung_mount.operations import Files

    source, path, parent = sys.argv[1:]
    watched = os.pidfd_open(int(parent))

    def end_with_parent() -> None:
        select.select([watched], [], [])
        unmount(Path(path))
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    mfusepy.FUSE(Files(Path(source)), path, foreground=True, fsname="hung", attr_timeout=0, entry_timeout=0)


if __name__ == "__main__":
    main()
