"""File operations as values, and how they are read from the recorder's log."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CREATE, MKDIR, WRITE, TRUNCATE, LINK, UNLINK, RMDIR, RENAME, FSYNC, SYNC, EXTEND, UNSEEN = range(1, 13)
_NAMES = [
    "?",
    "create",
    "mkdir",
    "write",
    "truncate",
    "link",
    "unlink",
    "rmdir",
    "rename",
    "fsync",
    "sync",
    "extend",
    "unseen",
]
_HEADER = struct.Struct("=IIQqIIQ")


@dataclass(frozen=True)
class Op:
    """One operation, after it took effect.

    Attributes:
        kind: one of the constants above.
        pid: process that did it.
        inode: of the file or directory that it is about; 0 where names say it all.
        offset: of a write; the new size of a truncate or an extend.
        path: of the name that came or went, relative to the recorded directory; where a rename came from.
        target: where a rename went to.
        data: bytes written.
    """

    kind: int
    pid: int = 0
    inode: int = 0
    offset: int = 0
    path: str = ""
    target: str = ""
    data: bytes = b""

    def __str__(self) -> str:
        where = f"{self.path} -> {self.target}" if self.target else self.path or f"#{self.inode}"
        extent = f" {self.offset}+{len(self.data)}" if self.kind == WRITE else ""
        return f"{_NAMES[self.kind]} {where}{extent}"

    @property
    def name(self) -> str:
        """The name that comes into being, or goes."""
        return self.target or self.path


def parse(content: bytes, top: str) -> list[Op]:
    """Read a log. Paths become relative to ``top``, which is ``.`` itself.

    Raises:
        ValueError: the log ends in the middle of a record.
    """
    found, at = [], 0
    while at < len(content):
        kind, pid, inode, offset, first, second, size = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        parts = []
        for length in (first, second, size):
            parts.append(content[at : at + length])
            at += length
        if at > len(content):
            raise ValueError("the log is torn")
        path, target = (_relative(os.fsdecode(part), top) for part in parts[:2])
        found.append(Op(kind, pid, inode, offset, path, target, parts[2]))
    return found


def _relative(path: str, top: str) -> str:
    return os.path.relpath(path, top) if path.startswith("/") else path


def sections(ops: Sequence[Op]) -> dict[str, list[Op]]:
    """The operations by the directory at the top that they were done in, with paths relative to it.

    One section ends where the next directory is made: they come one after the other.
    """
    starts = [at for at, op in enumerate(ops) if op.kind == MKDIR and "/" not in op.path]
    found = {}
    for first, last in zip(starts, [*starts[1:], len(ops)], strict=True):
        name = ops[first].path
        found[name] = [
            replace(op, path=_within(op.path, name), target=_within(op.target, name)) for op in ops[first:last]
        ]
    return found


def _within(path: str, name: str) -> str:
    return os.path.relpath(path, name) if path else ""
