"""How far a keeper has come with a save: ``progress.json`` in the memory tier, for ``ftrun status``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.memory.files import put, read, remove

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.memory.tier import Tier


@dataclass(frozen=True)
class Progress:
    """The save that a node's keeper is at.

    Attributes:
        attempt: its name.
        step: number of finished steps in the state.
        stage: ``local`` (memory to local tier), ``root`` (to the checkpoint root), ``commit`` (waiting for the other
            nodes).
        bytes_done: of this node's files.
        bytes_total: bytes of this node's files.
        rate: bytes a second so far.
        eta: seconds until all bytes are there; None where that can't be said.
        waiting: what went wrong last, or what it waits for; empty while all is well.
        queued: how many other saves of this node are under way.
    """

    attempt: str
    step: int
    stage: str
    bytes_done: int
    bytes_total: int
    rate: float
    eta: float | None
    waiting: str
    queued: int

    @staticmethod
    def path(tier: Tier) -> Path:
        """Where it lies."""
        return tier.path / "progress.json"

    def write(self, tier: Tier) -> None:
        """Show it."""
        put(self.path(tier), json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, tier: Tier) -> Progress | None:
        """Look; None when the keeper has nothing to do."""
        try:
            return cls(**json.loads(read(cls.path(tier))))
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def clear(cls, tier: Tier) -> None:
        """Nothing is under way any more."""
        remove(cls.path(tier))
