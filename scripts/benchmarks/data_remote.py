"""The slow remote of the data benchmarks: a directory behind a FUSE mount, from the tests' own module."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import data_peers
from common import JOBS, PROJECT
from peers import Absent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

SIZE = 100_000
"""Bytes of a file."""


@contextlib.contextmanager
def mounted(source: Path, seconds: float) -> Iterator[Any | Absent]:
    """Show a directory through a mount in which opening a file takes so long; or say why there is none."""
    python = data_peers.python()
    slow_mount = _module(PROJECT / "tests", "slow_mount")
    why = python.why if isinstance(python, Absent) else slow_mount.why_not(python)
    if why:
        yield Absent("the slow remote", why)
        return
    with slow_mount.SlowMount(
        source, source.with_name(f"{source.name}-slow"), python=python, open_seconds=seconds
    ) as mount:
        yield mount


def files(folder: Path, count: int) -> list[str]:
    """Write the remote's files; returns their names."""
    names: list[str] = _module(JOBS, "data_pictures").make(folder, count, SIZE)
    return names


def _module(folder: Path, name: str) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)
