"""Removing what the dead have left, and what nobody needs any more. The caller holds the cache's lock."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import durable
from ftrun.data.cache import eviction, pages, regular
from ftrun.data.cache.claims import drop_unclaimed

if TYPE_CHECKING:
    from ftrun.data.cache.books import Account
    from ftrun.data.cache.layout import Layout


def sweep(layout: Layout, account: Account) -> None:
    """Remove the temporary files and pages of processes that are gone.

    Raises:
        OSError: the disk is broken or read-only.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(layout.temps):
            _drop_temp(f"{layout.temps}/{name}", account)
    pages.fold(layout.pages)


def _drop_temp(path: str, account: Account) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            drop_unclaimed(path, account)
        else:  # a pointer in the making, whose maker held the lock that we hold; or nothing of ours
            regular.make_way(path)


def compact(path: str, present: set[str]) -> None:
    """Rewrite an index without the objects that are gone, when most of them are."""
    lines: dict[str, bytes] = {}
    count = 0
    regular.make_way(path)
    data = b""
    with contextlib.suppress(OSError):
        data = regular.read(path)
    for line in data.splitlines(keepends=True):
        count += line != b"\n"
        key = line.partition(b" ")[0].decode("ascii", "replace")
        if key in present and line.endswith(b"\n"):
            lines[key] = line
    if count > 2 * len(lines) + 64:
        durable.write(Path(path), b"".join(lines.values()))


def compact_all(layout: Layout) -> None:
    """Shorten every index that has grown too long."""
    for shard in eviction.shards(layout):
        present = {entry.name.partition(".")[0] for entry, _ in eviction.files(f"{layout.objects}/{shard}")}
        compact(layout.index(shard), present)
