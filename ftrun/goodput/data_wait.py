"""How long steps wait for their data, from the events of the steps. Pure."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.events import Record

_RECENT = 200
"""Events that count: a few times a second, at most, one is written."""


@dataclass(frozen=True)
class DataWait:
    """Waits of rank 0, in recent steps of the last attempt without its first one, in which loaders start.

    Attributes:
        median: seconds per step. An event speaks for the steps since the one before.
        share: of the time of these steps.
        steps: how many they were.
        seconds: that they took.
        total: seconds that all steps of the run have waited.
    """

    median: float
    share: float
    steps: int
    seconds: float
    total: float


def measure(records: Sequence[Record]) -> DataWait | None:
    """How long steps wait; None before there are two events of steps in the last attempt."""
    told: list[tuple[float, int, float]] = []
    for record in reversed(records):
        if isinstance(record.event, events.AttemptStarted) or len(told) > _RECENT:
            break
        if isinstance(record.event, events.Step):
            told.append((record.time, record.event.step, record.event.data_wait))
    told.reverse()
    pairs = [(later, earlier) for earlier, later in itertools.pairwise(told) if later[1] > earlier[1]]
    seconds = sum(max(0.0, later[0] - earlier[0]) for later, earlier in pairs)
    if not pairs or seconds <= 0:
        return None
    waited = sum(later[2] for later, _ in pairs)
    return DataWait(
        median=statistics.median(later[2] / (later[1] - earlier[1]) for later, earlier in pairs),
        share=min(1.0, waited / seconds),
        steps=sum(later[1] - earlier[1] for later, earlier in pairs),
        seconds=seconds,
        total=sum(each.event.data_wait for each in records if isinstance(each.event, events.Step)),
    )
