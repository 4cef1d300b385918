"""A keeper's loop: look, decide, act. What takes long happens in lanes."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs
from ftrun.checkpoint.keeper import book, scan
from ftrun.checkpoint.keeper.beat import Beat
from ftrun.checkpoint.keeper.codes import Code
from ftrun.checkpoint.keeper.commit import Verdict
from ftrun.checkpoint.keeper.copying import SourceError
from ftrun.checkpoint.keeper.decide import LANES, Action, Known, Stage, View, decide
from ftrun.checkpoint.keeper.inventory import Inventory
from ftrun.checkpoint.keeper.lanes import Lanes
from ftrun.checkpoint.keeper.report import Reporter
from ftrun.checkpoint.keeper.results import Moved, Over, Skipped, Swept, Waits, outcome_of
from ftrun.checkpoint.keeper.takeover import owns
from ftrun.checkpoint.keeper.work import unsealed
from ftrun.checkpoint.layout import AttemptName
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.keeper.inbox import Inbox
    from ftrun.checkpoint.keeper.jobs import Jobs
    from ftrun.checkpoint.keeper.lanes import Job
    from ftrun.checkpoint.keeper.results import Result
    from ftrun.checkpoint.keeper.sharing import Sharing
    from ftrun.checkpoint.memory.outcomes import Outcome

_log = logging.getLogger(__name__)

_TICK = 1.0
_BUSY_TICK = 0.5
_GRACE = 1.0  # seconds that workers have to end after their launcher was killed
_NOTE_PATIENCE = 30.0  # seconds, once nobody waits for this keeper any more
_SWEEP = 300.0
_HANG = 120.0  # seconds beyond all patience


class Loop:
    """The keeper of one node.

    Args:
        jobs: what it can do.
        inbox: what it listens to.
        sharing: its part in copies from memory to memory, where those are wanted.
    """

    def __init__(self, jobs: Jobs, inbox: Inbox, sharing: Sharing | None = None) -> None:
        self._sharing = sharing
        self._jobs, self._inbox = jobs, inbox
        self._tier, self._config = jobs.tier, jobs.config
        self._scanner = scan.Scanner(jobs.tier)
        self._lanes = Lanes(inbox.wake)
        self._reporter = Reporter(jobs)
        self._beat = Beat(jobs.tier)
        self._inventory = Inventory(jobs.tier, jobs.config)
        self._known: dict[str, Known] = {}
        self._unheard: dict[str, tuple[Outcome, float]] = {}
        self._epoch: EpochRecord | None = None
        self._rolled = 0
        self._roll_due = 0.0
        self._sweep_due = 0.0
        self._closing_since: float | None = None
        self._orphaned_since: float | None = None
        self._lost: AttemptName | None = None  # the newest one, since nobody seals anything any more
        self._newest: AttemptName | None = None  # of those that are committed

    def run(self) -> int:
        """Work until the launcher is gone or says that it is enough; an exit code.

        Raises:
            OSError: the tier is gone.
        """
        self._known = {each.attempt: each for each in self._reporter.adopt(time.monotonic())}
        while True:
            now = time.monotonic()
            self._beat.write(now)
            mine = owns(self._tier, self._config)
            closing = self._is_closing(now)
            self._look(now)
            for job in self._lanes.finished():
                self._take(job, now)
            if mine:
                self._act(decide(self._view(now, closing)), now)
            self._reporter.show(self._known, self._lanes.jobs(), now)
            code = self._exit_code(now, closing, mine)
            if code is not None:
                if mine and code is Code.DONE:
                    self._inventory.close(self._jobs.node)
                return code
            self._inbox.wait(self._pause(now))

    def _look(self, now: float) -> None:
        self._read_epoch()
        self._unheard |= {outcome.attempt: (outcome, now) for outcome in self._reporter.news()}
        memory = self._scanner.scan()
        if self._sharing is not None:
            self._sharing.look(memory)
        self._inventory.look(memory, self._jobs.node)
        self._known = book.see(self._known, memory, self._reporter.over, now)
        self._hear(now)
        for work in book.to_free(self._known, memory, self._reporter.over):
            self._reporter.free(work)

    def _hear(self, now: float) -> None:
        """Take in what workers said of snapshots that will never be whole."""
        for attempt, (outcome, since) in list(self._unheard.items()):
            known = self._known.get(attempt)
            if known is not None and known.stage in (Stage.SEALED, Stage.LOCAL):
                self._known[attempt] = replace(known, told=outcome.reason)
            elif known is None and now - since < _GRACE and self._closing_since is None:
                continue  # other ranks of the node may seal it yet
            elif known is None and (name := AttemptName.parse(attempt)) is not None:
                work = unsealed(name, self._config.run_id, self._jobs.node)
                self._known[attempt] = Known(work, Stage.FAILED, now, told=outcome.reason)
                self._reporter.hear(outcome)
            del self._unheard[attempt]

    def _view(self, now: float, closing: bool) -> View:
        jobs = self._lanes.jobs()
        epoch = self._epoch
        leads = epoch is not None and self._jobs.node == 0
        return View(
            known=tuple(self._known.values()),
            now=now,
            run_id=self._config.run_id,
            epoch=0 if epoch is None else epoch.epoch,
            lineage=0 if epoch is None else epoch.since,
            idle=frozenset(LANES.values()) - {job.lane for job in jobs},
            busy=frozenset(job.attempt for job in jobs),
            local=self._jobs.local is not None,
            closing=closing,
            timeout=self._config.timeout,
            closed_for=0.0 if self._closing_since is None else now - self._closing_since,
            unrolled=leads and epoch is not None and self._rolled < epoch.epoch and now >= self._roll_due,
            unswept=leads and now >= self._sweep_due,
        )

    def _act(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if action.do == "drop":
                self._finish(self._known[action.attempt], Verdict(False, action.reason), now)
            else:
                self._lanes.start(LANES[action.do], action.attempt, self._call(action))

    def _call(self, action: Action) -> Callable[[], Result]:
        jobs, epoch = self._jobs, self._epoch
        if action.do == "roll":
            assert epoch is not None
            return lambda: jobs.roll(epoch)
        if action.do == "sweep":
            assert epoch is not None
            self._sweep_due = time.monotonic() + _SWEEP
            return lambda: jobs.sweep(epoch)
        known = self._known[action.attempt]
        calls: dict[str, Callable[[], Result]] = {
            "copy": lambda: jobs.copy(known),
            "upload": lambda: jobs.upload(known, epoch),
            "settle": lambda: jobs.settle(known, epoch),
            "tidy": lambda: jobs.tidy(known, epoch),
            "note": lambda: jobs.note(known),
        }
        return calls[action.do]

    def _take(self, job: Job, now: float) -> None:
        result: Result = job.result if job.error is None else outcome_of(job.error)
        if job.error is not None and not isinstance(job.error, OSError | UsageError | SourceError):
            _log.error("%s of checkpoint %s", job.lane, job.attempt, exc_info=job.error)
        known = self._known.get(job.attempt)
        if known is None:
            self._take_round(result, now)
        elif isinstance(result, Moved):
            self._known[job.attempt] = book.moved(known, result.stage, result.work, now)
        elif isinstance(result, Skipped):
            _log.warning("checkpoint %s skips the local tier: %s", job.attempt, result.reason)
            self._known[job.attempt] = book.skipped(known)
        elif isinstance(result, Waits):
            self._wait(known, result, now)
        elif known.stage in (Stage.COMMITTED, Stage.FAILED):
            self._forget(job.attempt)
        elif isinstance(result, Verdict):
            self._finish(known, result, now)

    def _take_round(self, result: Result, now: float) -> None:
        """What came of something that is for no one attempt."""
        if isinstance(result, Over) and self._epoch is not None:
            self._rolled = self._epoch.epoch
        elif not isinstance(result, Swept):
            self._roll_due = now + 30.0

    def _wait(self, known: Known, result: Waits, now: float) -> None:
        waits = book.waited(known, result, now)
        if result.reason != known.trouble and known.stage is not Stage.DONE:
            _log.warning("checkpoint %s (%s): %s", known.attempt, known.stage.value, result.reason)
        hurry = known.work.empty or self._closing_since is not None
        patience = _NOTE_PATIENCE if hurry else self._config.timeout
        if known.work.empty and self._closing_since is not None:
            patience = 0.0
        if known.stage is Stage.COMMITTED or (known.stage is Stage.FAILED and now - known.since >= patience):
            self._forget(known.attempt)
        else:
            self._known[known.attempt] = waits

    def _finish(self, known: Known, verdict: Verdict, now: float) -> None:
        """Say what became of an attempt, and give back what it holds."""
        # What was given up because a node was lost, or can't be whole because others have left for a later start, has
        # made way for what the run went on from then.
        earlier = self._epoch is not None and known.work.name.epoch < self._epoch.epoch
        past = earlier and (verdict.given_up or known.others)
        if verdict.committed:
            self._newest = max(self._newest or known.work.name, known.work.name)
        elif not known.work.missing and not past:
            self._lost = max(self._lost or known.work.name, known.work.name)
        self._reporter.finish(known, verdict)
        self._jobs.forget(known.attempt)
        if verdict.committed and self._epoch is not None and known.work.name.epoch == self._epoch.epoch:
            scan.drop_former_ranks(self._tier, known.work)
        if verdict.committed and not known.work.leads:
            self._forget(known.attempt)
            return
        stage = Stage.COMMITTED if verdict.committed else Stage.FAILED
        over = book.moved(known, stage, known.work, now)
        self._known[known.attempt] = replace(over, told=verdict.reason, stale=known.stale)

    def _forget(self, attempt: str) -> None:
        self._known.pop(attempt, None)
        self._jobs.forget(attempt)

    def _read_epoch(self) -> None:
        told = epochs.told(self._tier.path)
        if told is not None:  # else the one before is the best that is known
            self._epoch = told.record
            self._jobs.node = self._config.node if told.node is None else told.node

    def _is_closing(self, now: float) -> bool:
        """Whether nobody will seal anything any more."""
        if self._inbox.orphaned and self._orphaned_since is None:
            self._orphaned_since = now
            _log.info("the launcher is gone: what is sealed is finished")
        orphaned = self._orphaned_since is not None and now - self._orphaned_since >= _GRACE
        closing = self._inbox.terminated or orphaned
        if closing and self._closing_since is None:
            self._closing_since = now
            self._jobs.closing = True
            self._lost = None
        return closing

    def _exit_code(self, now: float, closing: bool, mine: bool) -> int | None:
        jobs = self._lanes.jobs()
        if any(self._is_hung(job, now) for job in jobs):
            return self._leave_hung(now)
        if not mine:
            return None if jobs else Code.DONE  # the next launcher's keeper goes on
        if not closing:
            return None
        if not self._known and not self._unheard and not jobs:
            # What is older than a commit was overtaken, by a snapshot that took its place in memory or by a later save.
            lost = self._lost is not None and (self._newest is None or self._newest < self._lost)
            return Code.LOST if lost else Code.DONE
        since = self._closing_since if self._orphaned_since is None else self._orphaned_since
        late = self._orphaned_since is not None and since is not None and now - since > self._config.timeout + _GRACE
        return Code.LOST if late else None

    def _is_hung(self, job: Job, now: float) -> bool:
        meter = self._jobs.meters.get(job.attempt)
        alive = job.began if meter is None else max(job.began, meter.latest)
        return now - alive > self._config.timeout + _HANG

    def _leave_hung(self, now: float) -> int:
        for job in self._lanes.jobs():
            known = self._known.get(job.attempt)
            if known is not None and known.stage not in (Stage.COMMITTED, Stage.FAILED) and self._is_hung(job, now):
                self._finish(known, Verdict(False, "the storage has not answered for too long"), now)
        return Code.HUNG

    def _pause(self, now: float) -> float:
        tick = _BUSY_TICK if self._lanes.jobs() else _TICK
        dues = [each.due - now for each in self._known.values() if each.due > now]
        return max(0.005, min([tick, *dues]))
