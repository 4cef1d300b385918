"""``scripts/bench recovery``: how fast and how surely training goes on, and what it costs while nothing happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import agent_cpu
import kills
import starts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings
    from figures import Figure

_PARTS = (
    (("recovery.help",), starts.help_),
    (("recovery.cold_start",), starts.cold_start),
    (("recovery.first_step",), kills.first_step),
    (("recovery.restarts", "recovery.lost_steps"), kills.in_a_row),
    (("recovery.agent_cpu",), agent_cpu.agent_cpu),
)


def measure(settings: Settings) -> Iterator[Figure]:
    """All figures that were asked for."""
    for ids, part in _PARTS:
        if settings.wants(*ids):
            yield from part(settings)
