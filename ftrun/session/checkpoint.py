"""A checkpoint, as scripts and callbacks see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint.

    Attributes:
        step: steps that were complete when it was taken.
        name: its directory under ``ckpt/`` in the root.
        root: the checkpoint root.
        total: the total that the script wanted, or None.
        reason: ``interval``, ``user``, ``stop`` or ``last``.
        extra: what ``on("save")`` callbacks returned, merged; empty on a checkpoint that was just committed.
    """

    step: int
    name: str
    root: str
    total: int | None = None
    reason: str = "interval"
    extra: dict[str, Any] = field(default_factory=dict)
