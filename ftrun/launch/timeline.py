"""Where the seconds of a restart go: from the failure to the first step of the next attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftrun.pulse import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftrun.pulse import Beat

SINCE_FAILURE = "the failure"
"""From when on they are counted, in words, where nothing else has happened."""

_BY_WORKER = {
    "booted": "start",
    "script": "bootstrap",
    "group": "imports",
    "grouped": "process group",
    "restored": "restore",
}
"""What has been done when a worker sets a mark in its pulse page."""


class Clock:
    """Notes when each part of a restart is done. Main thread of the agent."""

    def __init__(self) -> None:
        self._began = 0.0
        self._done: list[tuple[str, float]] = []

    @property
    def running(self) -> bool:
        """Whether a failure has been noticed whose restart isn't complete."""
        return self._began > 0.0

    def begin(self, at: float) -> None:
        """A failure happened, ``at`` seconds since 1970."""
        self._began, self._done = at, []
        self.mark("notice")

    def mark(self, name: str) -> None:
        """A part is done. Without a failure nothing is noted: the first start is no restart."""
        if self.running:
            self._done.append((name, time.time()))

    def end(self, beats: Sequence[Beat]) -> dict[str, float]:
        """Seconds of each part in order; they add up to the whole. The quickest rank speaks for all.

        Args:
            beats: of ranks that have completed their first step, at least one.
        """
        first = min(beats, key=lambda beat: beat.first_step)
        marks = [(name, getattr(first.marks, mark)) for mark, name in _BY_WORKER.items()]
        parts = [*self._done, *marks, ("first step", first.first_step)]
        self._done, since = [], self._began
        self._began = 0.0
        return split(since, parts)


def read(beats: Iterable[Beat]) -> dict[str, int]:
    """Bytes of a checkpoint that some ranks have read together, by the tier that they came from."""
    sums = (sum(sizes) for sizes in zip(*(beat.read for beat in beats), strict=True))
    return {tier: size for tier, size in zip(TIERS, sums, strict=True) if size}


def split(since: float, parts: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Durations between moments: those that are unknown (0.0) or out of order belong to the next one.

    Args:
        since: the first moment.
        parts: what was done, and when.
    """
    seconds: dict[str, float] = {}
    for name, at in parts:
        if at > since:
            seconds[name] = seconds.get(name, 0.0) + at - since
            since = at
    return seconds
