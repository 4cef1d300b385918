"""Says what a keeper does and did: outcomes, events, progress; and takes up what the keeper before has left."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper import scan
from ftrun.checkpoint.keeper.decide import Known, Stage
from ftrun.checkpoint.keeper.pending import Pending
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ftrun.checkpoint.keeper.commit import Verdict
    from ftrun.checkpoint.keeper.jobs import Jobs
    from ftrun.checkpoint.keeper.lanes import Job
    from ftrun.checkpoint.keeper.work import NodeWork

_log = logging.getLogger(__name__)

_STAGES = {Stage.SEALED: "root", Stage.LOCAL: "root", Stage.DONE: "commit"}


class Reporter:
    """Tells workers, launcher and people. The loop's thread uses it.

    Args:
        jobs: what the keeper does.

    Attributes:
        over: attempts that have an outcome.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs, self._tier, self._config = jobs, jobs.tier, jobs.config
        self._outcomes = Outcomes(jobs.tier)
        self._pending = Pending(jobs.tier)
        self._shown: Progress | None = None
        self._unsaid: list[Outcome] = []
        self.over: set[str] = set()

    def news(self) -> list[Outcome]:
        """What workers said since the last call: snapshots that will never be whole."""
        unsaid, self._unsaid = self._unsaid, []
        for outcome in unsaid:
            self._say(outcome)
        found = self._outcomes.poll()
        self.over.update(outcome.attempt for outcome in found if outcome.heard)
        return [outcome for outcome in found if not outcome.heard and outcome.attempt not in self.over]

    def hear(self, outcome: Outcome) -> None:
        """Note that the other nodes have what a worker said, or need it no more."""
        self.over.add(outcome.attempt)
        self._say(replace(outcome, heard=True))

    def adopt(self, now: float) -> list[Known]:
        """What the keeper before was at, apart from what lies sealed in memory."""
        found = {}
        for work in self._local_works():
            attempt = str(work.name)
            outcome = self._outcomes.get(attempt)
            if outcome is not None or not work.files:
                self._settle_local(Known(work, Stage.LOCAL, now), outcome is not None and outcome.committed)
            else:
                found[attempt] = Known(work, Stage.LOCAL, now)
        for work in self._pending.works():
            if self._outcomes.get(str(work.name)) is not None:
                self._pending.remove(str(work.name))
            else:
                found.setdefault(str(work.name), Known(work, Stage.DONE, now))
        return list(found.values())

    def finish(self, known: Known, verdict: Verdict) -> None:
        """Say what became of an attempt, and give back what it holds."""
        work, seal = known.work, known.work.first
        seconds = max(0.0, time.time() - min(each.sealed_at for each in work.seals))
        faults = self._jobs.faults
        faults.hit("outcome")
        outcome = Outcome(
            attempt=known.attempt,
            step=seal.step,
            committed=verdict.committed,
            reason=verdict.reason,
            seconds=seconds,
            size=verdict.size,
            differ=verdict.differ,
            heard=True,
            final=verdict.final,
        )
        if work.leads:
            self._write_event(outcome, seal.run_attempt)
        self.over.add(known.attempt)
        self._say(outcome)
        faults.hit("outcome.said")
        self.free(work)
        self._pending.remove(known.attempt)
        self._settle_local(known, verdict.committed)
        _log.info("checkpoint %s %s", known.attempt, verdict.reason or "is committed")

    def free(self, work: NodeWork) -> None:
        """Give slots back, if that can be written now: the next look finds what is left to do."""
        with contextlib.suppress(OSError):
            scan.free(work)

    def _say(self, outcome: Outcome) -> None:
        try:
            self._outcomes.put(outcome)
        except FileNotFoundError:
            raise
        except OSError:  # shared memory is full: that passes
            self._unsaid.append(outcome)

    def show(self, known: Mapping[str, Known], jobs: Iterable[Job], now: float) -> None:
        """Show how far the oldest save is that still has no outcome."""
        under_way = sorted(
            (each for each in known.values() if each.stage in _STAGES and not each.work.missing),
            key=lambda each: each.work.name,
        )
        shown = self._progress(under_way, {job.attempt: job.lane for job in jobs}, now) if under_way else None
        if shown != self._shown:
            self._shown = shown
            with contextlib.suppress(OSError):
                Progress.clear(self._tier) if shown is None else shown.write(self._tier)

    def _progress(self, under_way: list[Known], lanes: Mapping[str, str], now: float) -> Progress:
        first = under_way[0]
        stage = lanes.get(first.attempt, _STAGES[first.stage])
        meter = self._jobs.meters.get(first.attempt)
        total = first.work.size
        done = total if first.stage is Stage.DONE else meter.done if meter is not None else 0
        rate = done / max(1e-3, now - meter.began) if meter is not None and first.stage is not Stage.DONE else 0.0
        return Progress(
            attempt=first.attempt,
            step=first.work.name.step,
            stage=stage,
            bytes_done=done,
            bytes_total=total,
            rate=round(rate, 1),
            eta=round((total - done) / rate, 1) if rate > 0 else None,
            waiting=first.trouble,
            queued=len(under_way) - 1,
        )

    def _write_event(self, outcome: Outcome, run_attempt: int) -> None:
        # Not at the start: a worker may be waiting for a keeper, and these are a fifth of what it imports.
        from ftrun import events
        from ftrun.rundir import RunDir

        path = RunDir(Path(self._config.run_dir)).events(self._jobs.node)
        log = events.EventLog(path, attempt=run_attempt, rank=0)
        name, step = outcome.attempt, outcome.step
        if outcome.committed:
            log.write(events.Committed(step=step, checkpoint=name, seconds=outcome.seconds, size=outcome.size))
        else:
            error = f"checkpoint {name} was not committed: {outcome.reason}"
            log.write(events.SaveFailed(step=step, checkpoint=name, error=error))

    def _settle_local(self, known: Known, committed: bool) -> None:
        local = self._jobs.local
        if local is None:
            return
        with contextlib.suppress(OSError):
            if not committed:
                local.drop(known.work)
            else:
                local.keep(known.work)

    def _local_works(self) -> list[NodeWork]:
        local = self._jobs.local
        if local is None:
            return []
        try:
            return [work for work in local.works() if not work.committed]
        except OSError as error:
            _log.warning("the local tier can't be read: %s", error)
            return []
