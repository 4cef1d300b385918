"""Which filesystem a directory lies on: a cache belongs on a local disk, where locks and renames mean what they say."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NO_DISKS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x01021997: "9P",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x786F4256: "VirtualBox's shared folders",
    0x00009FA0: "proc",
    0x62656572: "sysfs",
}


def refused(magic: int) -> str | None:
    """The filesystem's name where a cache may not lie on it; None where it may.

    Args:
        magic: ``f_type`` as ``statfs`` gives it.
    """
    return _NO_DISKS.get(magic & 0xFFFFFFFF)


def magic_of(path: Path) -> int:
    """``f_type`` of the filesystem that a path lies on, or will lie on once it is made."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    space = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes on 64-bit machines; f_type comes first
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), space) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int(ctypes.cast(space, ctypes.POINTER(ctypes.c_long))[0])
