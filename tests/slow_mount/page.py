"""The page that a mount's server and its user share: what the user wants, what the server has counted.

A file of a few numbers, mapped by both. Each number has one writer, so there is nothing to lock between them.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_WANTED = struct.Struct("<dddqqq")
_COUNTED = struct.Struct("<qqq")
_AT = 512
_SIZE = 1024


@dataclass(frozen=True)
class Wanted:
    """How the mount is to behave.

    Attributes:
        open_seconds: that every open takes.
        read_seconds: that every read request takes (of at most 1 MiB).
        stat_seconds: that every look-up of a name or its attributes takes, where the kernel doesn't know them.
        error: number of the error that opens and reads end with; 0 for none.
        hang: opens and reads don't come back until this is taken back.
        truncate: files end after so many bytes, whatever size they say they have; -1 for not at all.
    """

    open_seconds: float = 0.0
    read_seconds: float = 0.0
    stat_seconds: float = 0.0
    error: int = 0
    hang: bool = False
    truncate: int = -1


@dataclass(frozen=True)
class Counts:
    """What went through the mount.

    Attributes:
        opens: files opened.
        reads: read requests.
        bytes: bytes that were read.
    """

    opens: int = 0
    reads: int = 0
    bytes: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(self.opens - earlier.opens, self.reads - earlier.reads, self.bytes - earlier.bytes)


class Page:
    """The shared file, mapped."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    @property
    def wanted(self) -> Wanted:
        *seconds, error, hang, truncate = _WANTED.unpack_from(self._map)
        return Wanted(*seconds, error, bool(hang), truncate)

    @wanted.setter
    def wanted(self, now: Wanted) -> None:
        seconds = (now.open_seconds, now.read_seconds, now.stat_seconds)
        _WANTED.pack_into(self._map, 0, *seconds, now.error, now.hang, now.truncate)

    @property
    def counts(self) -> Counts:
        return Counts(*_COUNTED.unpack_from(self._map, _AT))

    @counts.setter
    def counts(self, now: Counts) -> None:
        _COUNTED.pack_into(self._map, _AT, now.opens, now.reads, now.bytes)

    def close(self) -> None:
        self._map.close()
