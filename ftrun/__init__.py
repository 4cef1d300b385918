"""ftrun: a torchrun-compatible launcher that makes faults cheap, and the API for scripts that want more.

Importing the package has no effect and imports no torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrun import dcp
    from ftrun.checkpoint.offline import load
    from ftrun.data.cache.dataset import CachedDataset
    from ftrun.data.cache.files import CachedFiles
    from ftrun.data.loader import DataLoader
    from ftrun.errors import FtrunError, UsageError
    from ftrun.session.callbacks import on
    from ftrun.session.checkpoint import Checkpoint
    from ftrun.session.entry import entrypoint
    from ftrun.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "entrypoint",
    "Session",
    "on",
    "Checkpoint",
    "DataLoader",
    "CachedFiles",
    "CachedDataset",
    "load",
    "dcp",
    "FtrunError",
    "UsageError",
    "__version__",
]

_HOMES = {
    "entrypoint": "ftrun.session.entry",
    "Session": "ftrun.session.session",
    "on": "ftrun.session.callbacks",
    "Checkpoint": "ftrun.session.checkpoint",
    "DataLoader": "ftrun.data.loader",
    "CachedFiles": "ftrun.data.cache.files",
    "CachedDataset": "ftrun.data.cache.dataset",
    "load": "ftrun.checkpoint.offline",
    "FtrunError": "ftrun.errors",
    "UsageError": "ftrun.errors",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name == "dcp":
        return importlib.import_module("ftrun.dcp")
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'ftrun' has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
