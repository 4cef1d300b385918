"""Directories in memory: a recording must not wait for a disk, and its syncs are only noted."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/dev/shm")
_NEEDED = 64 * 2**20


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory in memory where there is room, else on disk; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="power-loss-", dir=_MEMORY if _roomy() else None) as name:
        yield Path(name).resolve()


def _roomy() -> bool:
    try:
        status = os.statvfs(_MEMORY)
    except OSError:
        return False
    return os.access(_MEMORY, os.W_OK) and status.f_bavail * status.f_frsize > _NEEDED
