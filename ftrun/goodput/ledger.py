"""Where the seconds of a run went: every moment belongs to exactly one class, so the classes sum to the wall clock.

The classes:

========== ================================================================================
starting   from the launcher's start to the first step: imports, process group, restore
training   steps that were new
saving     the training thread held by a snapshot, during training
repeating  steps done again after a failure
recovering from the failure's notice to the first step of the next attempt
finishing  from the last step to the launcher's end: last commit, leaving
waiting    the training thread waited for data, in steps new or done again
========== ================================================================================

Time between two launchers of one run is not part of it: nobody was running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.events import Record

CLASSES = ("starting", "training", "saving", "repeating", "recovering", "finishing", "waiting")


@dataclass(frozen=True)
class Ledger:
    """Seconds by class.

    Attributes:
        seconds: for every class of :data:`CLASSES`.
        wall: seconds that launchers were there; the sum of all classes.
    """

    seconds: dict[str, float]
    wall: float

    @property
    def goodput(self) -> float:
        """Share of the wall clock spent on new steps."""
        return self.seconds["training"] / self.wall if self.wall > 0 else 0.0


def account(records: Sequence[Record], *, until: float | None = None) -> Ledger:
    """Account for every second between the first event and the last.

    Args:
        records: a run's events in the order of time.
        until: for a run that is still going: the present, seconds since 1970.
    """
    seconds = dict.fromkeys(CLASSES, 0.0)
    fold = _Fold(seconds)
    for record in records:
        fold.take(record)
    if until is not None and records:
        fold.spend(until)
    return Ledger(seconds, sum(seconds.values()))


class _Fold:
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._class: str | None = None
        self._since = 0.0
        self._reached = 0
        self._exact = True
        self._several = False

    def take(self, record: Record) -> None:
        event = record.event
        if isinstance(event, events.RunStarted):
            # A launcher before this one may have gone without a word: its time ended with its last event.
            self._class, self._since = "starting", record.time
            return
        self._several = self._several or isinstance(event, events.Met)
        if self._class is None and self._several and isinstance(event, events.Met | events.AttemptStarted):
            self._class, self._since = "starting", record.time  # the first node has left, and another one is it now
            return
        if self._class is None:
            return  # the last words of a worker whose launcher has left
        self.spend(record.time)
        if isinstance(event, events.StepsBegan):
            self._exact = event.exact
            self._class = self._stepping(event.step)
        elif isinstance(event, events.Step):
            self._move(event.data_wait, "waiting")
            self._class = self._stepping(event.step)
            self._reached = max(self._reached, event.step)
        elif isinstance(event, events.Saved):
            self._move(event.seconds, "saving")
        elif isinstance(event, events.StepsEnded):
            self._class = "finishing"
        elif isinstance(event, events.Failed):
            self._reached = max(self._reached, event.step)
            self._class = "recovering" if event.restart else "finishing"
        elif isinstance(event, events.RunEnded):
            self._class = None

    def _stepping(self, step: int) -> str:
        return "training" if step >= self._reached or not self._exact else "repeating"

    def spend(self, until: float) -> None:
        """Book the time since the last event; clocks that step back book nothing."""
        if self._class is not None:
            self._seconds[self._class] += max(0.0, until - self._since)
        self._since = max(self._since, until)

    def _move(self, seconds: float, to: str) -> None:
        """A save, or a wait for data, has been booked as part of the step around it."""
        if self._class in ("training", "repeating"):
            moved = min(max(0.0, seconds), self._seconds[self._class])
            self._seconds[self._class] -= moved
            self._seconds[to] += moved
