"""For users of ``torch.distributed.checkpoint``: its ``save``, ``async_save`` and ``load`` with ftrun's guarantees.

::

    import torch.distributed.checkpoint as dcp
    import ftrun

    dcp.save(state, storage_writer=ftrun.dcp.Writer(root))
    dcp.load(state, storage_reader=ftrun.dcp.Reader(root))

Importing this module imports no torch; its two names do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrun.checkpoint.dcp.reader import Reader
    from ftrun.checkpoint.dcp.writer import Writer

__all__ = ["Writer", "Reader"]

_HOMES = {"Writer": "ftrun.checkpoint.dcp.writer", "Reader": "ftrun.checkpoint.dcp.reader"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'ftrun.dcp' has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
