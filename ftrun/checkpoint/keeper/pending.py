"""Attempts whose files are safe in the root and that wait for their commit, so that a new keeper goes on with them.

Their slots may have been filled again. One file for each, ``pending/e…-s….json``, in the memory tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.work import NodeWork
from ftrun.checkpoint.memory.files import make_directory, put, read, remove

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.tier import Tier


class Pending:
    """What waits.

    Args:
        tier: the memory tier.
    """

    def __init__(self, tier: Tier) -> None:
        self._directory = tier.path / "pending"

    def put(self, work: NodeWork) -> None:
        """Note that an attempt waits for its commit."""
        make_directory(self._directory)
        put(self._directory / f"{work.name}.json", work.to_bytes())

    def remove(self, attempt: str) -> None:
        """It is over."""
        remove(self._directory / f"{attempt}.json")

    def works(self) -> list[NodeWork]:
        """What waits, oldest first."""
        found = []
        for path in sorted(self._directory.glob("e*.json")):
            try:
                found.append(NodeWork.from_bytes(read(path)))
            except (OSError, ValueError):
                continue
        return found
