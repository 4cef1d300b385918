"""From where a checkpoint was read, as people see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.config.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES = {
    "memory": "memory",
    "peer": "copies of other nodes' memory",
    "local": "the local disk",
    "root": "the checkpoint root",
}
"""The tiers of :class:`ftrun.events.Restored`, nearest first."""


def text(read: Mapping[str, int]) -> str:
    """Which tier how many bytes came from: ``1.2 GB from memory, 3.0 MB from the checkpoint root``.

    Args:
        read: bytes by tier, as the events have them.
    """
    return ", ".join(f"{format_size(read[tier])} from {name}" for tier, name in _NAMES.items() if read.get(tier))
