"""A run's history: a fold over its events. ``ftrun status``, the last screen and the ledger all look at this."""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ftrun.events import Record
    from ftrun.rundir import RunDir


@dataclass(frozen=True)
class Fall:
    """One failure of the worker group, and what became of it.

    Attributes:
        attempt: number of the attempt that fell.
        time: when it was noticed, seconds since 1970.
        what: the event.
        training_again: when the next attempt of the same launcher completed its first step, or None.
        recovery: seconds from the failure itself, which came before it was noticed, to that step, or None.
    """

    attempt: int
    time: float
    what: events.Failed
    training_again: float | None = None
    recovery: float | None = None

    @property
    def seconds_to_training(self) -> float | None:
        """How long it took to train again; None if it didn't."""
        if self.recovery is not None:
            return self.recovery
        return self.training_again - self.time if self.training_again is not None else None


@dataclass
class History:
    """What has happened in a run so far.

    Attributes:
        run_id: identity of the run.
        started: when its first launcher started, seconds since 1970; 0.0 if none has.
        launches: how many launchers have worked on it.
        pid, host: of the last launcher.
        node: its number in its last round; other than 0 only in a run directory that is that node's own.
        attempts: number of attempts.
        world_size: of the last attempt.
        step: steps completed and not lost.
        total: steps that the script wants, or None.
        finished: the script reached its total, or ended well without one.
        loop_ended: the loop of the last attempt that had one came to its end (a script without a Session has none).
        outcome: how the last launcher left, or None while it is there.
        exit_code: what it left with.
        falls: failures, in order.
        commits: checkpoints that were committed, in order.
        save_failures: snapshots that did not become checkpoints.
        saves_skipped: checkpoints that were due while two others were still on their way.
        interval: what ``every: auto`` chose last, or None.
        unsaid_lost_steps: steps done again because a launcher died without a word.
        launch_falls: how many of the failures are the last launcher's.
        launch_stepped: the last launcher's attempts completed a step.
        losses: (step, loss), without what a restart took back.
        pace: recent steps per second, or None.
        last_time: time of the last event.
        records: all events.
    """

    run_id: str = ""
    started: float = 0.0
    launches: int = 0
    pid: int | None = None
    host: str = ""
    node: int = 0
    attempts: int = 0
    world_size: int = 0
    step: int = 0
    total: int | None = None
    finished: bool = False
    loop_ended: bool = True
    outcome: str | None = None
    exit_code: int | None = None
    falls: list[Fall] = field(default_factory=list)
    commits: list[events.Committed] = field(default_factory=list)
    save_failures: int = 0
    saves_skipped: int = 0
    interval: events.IntervalChosen | None = None
    unsaid_lost_steps: int = 0
    launch_falls: int = 0
    launch_stepped: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    pace: float | None = None
    last_time: float = 0.0
    records: list[Record] = field(default_factory=list)
    _beats: list[tuple[float, int]] = field(default_factory=list)
    _met: int = 0
    _recovering: bool = False
    _exact: bool = True
    _exact_step: int | None = None

    @property
    def restarts(self) -> int:
        """Restarts after failures."""
        return sum(fall.what.restart for fall in self.falls)

    @property
    def lost_steps(self) -> int:
        """Steps that had to be done again, over all failures and vanished launchers."""
        return sum(fall.what.lost_steps for fall in self.falls) + self.unsaid_lost_steps

    def add(self, record: Record) -> None:
        """Take one more event into account."""
        self.records.append(record)
        self.last_time = record.time
        event = record.event
        if isinstance(event, events.RunStarted):
            self._run_started(record, event)
        elif isinstance(event, events.AttemptStarted):
            self._attempt_started(record, event)
        elif isinstance(event, events.StepsBegan):
            self.total = event.total
            self._exact = event.exact
            self.loop_ended = not event.exact
        elif isinstance(event, events.Step):
            self._step(record, event)
        elif isinstance(event, events.StepsEnded):
            self.step = event.step
            self.loop_ended = event.finished
        elif isinstance(event, events.Committed):
            self.commits.append(event)
            self.step = max(self.step, event.step)
            if self._exact_step is not None:
                self._exact_step = max(self._exact_step, event.step)
        elif isinstance(event, events.SaveFailed):
            self.save_failures += 1
        elif isinstance(event, events.SaveSkipped):
            self.saves_skipped += 1
        elif isinstance(event, events.IntervalChosen):
            self.interval = event
        elif isinstance(event, events.Failed):
            self.falls.append(Fall(record.attempt, record.time, event))
            self.launch_falls += 1
            self._recovering = event.restart
            self._exact_step = None
            self.step = max(self.step, event.step)
        else:
            self._launcher_says(record.attempt, event)

    def _launcher_says(self, attempt: int, event: events.Event) -> None:
        if isinstance(event, events.Recovered) and self.falls:
            # A snapshot in memory may have been newer than what was known to be committed when the attempt fell.
            fall = self.falls[-1]
            what = dataclasses.replace(fall.what, lost_steps=event.lost_steps)
            self.falls[-1] = dataclasses.replace(fall, recovery=event.total, what=what)
        elif isinstance(event, events.Met):
            # Where "own" directories are one after all, each node tells of each round: the first one's word counts.
            if attempt != self._met or event.node <= self.node:
                self.host, self.pid, self.node = event.host, event.pid, event.node
            self._met = attempt
            self.outcome = self.exit_code = None  # the node that was the first before may have left
            self.finished = False
        elif isinstance(event, events.RunEnded):
            self.outcome, self.exit_code = event.outcome, event.exit_code
            # Workers that all end well before their total (a time limit in the script, say) have not finished the run.
            self.finished = event.outcome == "finished" and self.loop_ended

    def _run_started(self, record: Record, event: events.RunStarted) -> None:
        self.run_id, self.pid, self.host = event.run_id, event.pid, event.host
        self.started = self.started or record.time
        self.launches += 1
        self.launch_falls, self.launch_stepped = 0, False
        self.outcome = self.exit_code = None
        self.finished = False
        # The launcher that wanted to restart is gone: what comes now is not its recovery.
        self._recovering = False

    def _attempt_started(self, record: Record, event: events.AttemptStarted) -> None:
        # Where the first of several nodes left, its last word may have come after the others had met.
        self.outcome = self.exit_code = None
        self.finished = False
        self.attempts = max(self.attempts, record.attempt)
        self.world_size = event.world_size
        if self._exact_step is not None:
            self.unsaid_lost_steps += max(0, self._exact_step - event.resume_step)
        self._exact_step = None
        self.step = event.resume_step
        self.losses = [(step, loss) for step, loss in self.losses if step <= event.resume_step]
        self._beats.clear()
        self.pace = None

    def _step(self, record: Record, event: events.Step) -> None:
        self.step = event.step
        self.launch_stepped = True
        self._exact_step = event.step if self._exact else None
        if self._recovering:
            self._recovering = False
            fall = self.falls[-1]
            self.falls[-1] = dataclasses.replace(fall, training_again=record.time)
        loss = event.metrics.get("loss")
        if loss is not None:
            self.losses.append((event.step, loss))
        self._beats = [*self._beats[-19:], (record.time, event.step)]
        (first, from_step), (last, to_step) = self._beats[0], self._beats[-1]
        self.pace = (to_step - from_step) / (last - first) if last > first else None


def load(run_dir: RunDir) -> History:
    """Read a run's history from the events of its first node; a node with a directory of its own, from all it has."""
    history = History()
    for record in _records(run_dir.event_files()):
        history.add(record)
    return history


def _records(files: Sequence[Path]) -> Iterator[Record]:
    if len(files) == 1:
        yield from events.read(files[0])
        return
    fallen: set[int] = set()
    for record in heapq.merge(*map(events.read, files), key=lambda each: each.time):
        if isinstance(record.event, events.Failed):
            if record.attempt in fallen:  # told once more when this node had become the first one
                continue
            fallen.add(record.attempt)
        yield record
