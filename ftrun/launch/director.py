"""The director: what the agent asks at each turn. It reads evidence, lets the policy decide, and keeps the record."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import events, pulse
from ftrun.checkpoint import epochs, layout, reader
from ftrun.config.units import format_duration
from ftrun.errors import FtrunError, NoValidCheckpoint, UsageError
from ftrun.goodput import history
from ftrun.launch import failure, plan, policy
from ftrun.launch.console import Fall, Start

if TYPE_CHECKING:
    from torch.distributed import Store

    from ftrun.checkpoint.reader import Commit
    from ftrun.contract import WorkerContract
    from ftrun.launch.console import Console
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.policy import Decision


@dataclass(frozen=True)
class Round:
    """One answer for all ranks: published by the leader, obeyed by every agent."""

    epoch: int
    since: int
    attempt: int
    resume: str | None
    resume_step: int
    resume_world: int | None
    error: str | None = None


class Director:
    """Decides for one launcher. Called on the agent's main thread only."""

    def __init__(self, plan: LaunchPlan, log: events.EventLog, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._log = log
        self._root = layout.Root.open(plan.root)
        self._rounds = 0
        self._round: Round | None = None
        self._node = 0
        self._ranks: list[int] = []
        self._restarts = 0
        self._streak = 0
        self._resumed_last: str | None = None
        self._bad: set[str] = set()
        self._warned: set[str] = set()
        self._made_a_step = False
        self._stepped_before = plan.continues and plan.resume is not None
        self._failed_at: float | None = None
        self.decision: Decision | None = None

    @property
    def grace(self) -> float:
        """Seconds that workers get to leave in order."""
        return self._plan.grace

    def begin_round(self, store: Store, node: int) -> WorkerContract:
        """Settle epoch, attempt and commit for the attempt that is about to start.

        The leader (node 0) decides and publishes; the others obey.

        Raises:
            NoValidCheckpoint: commits exist and none is whole.
            UsageError: the checkpoint root can't be used.
        """
        key = f"ftrun/round/{self._rounds}"
        self._rounds += 1
        self._node = node
        if node == 0:
            self._round = self._lead(store, key)
        else:
            self._round = Round(**json.loads(store.get(key)))
            if self._round.error is not None:
                raise UsageError(self._round.error)
        self._log = events.EventLog(self._plan.run_dir.events(node), attempt=self._round.attempt)
        return self._contract(self._round)

    def _lead(self, store: Store, key: str) -> Round:
        try:
            chosen = self._choose()
        except FtrunError as error:
            store.set(key, json.dumps(Round(0, 0, 0, None, 0, None, str(error)).__dict__))
            raise
        store.set(key, json.dumps(chosen.__dict__))
        return chosen

    def _choose(self) -> Round:
        fresh = self._plan.fresh and self._rounds == 1
        commit = None if fresh else self._latest()
        if commit is None and not fresh:
            self._require_no_commit_is_lost()
        name = str(commit.name) if commit else None
        record = epochs.claim(self._root, self._plan.run_id, fresh=fresh, parent=name)
        number = self._plan.run_dir.next_attempt()
        if commit is None:
            return Round(record.epoch, record.since, number, None, 0, None)
        return Round(record.epoch, record.since, number, name, commit.name.step, commit.manifest.world_size)

    def _latest(self) -> Commit | None:
        """The commit to resume from; None where this run has none yet."""
        choice = reader.resume_point(self._root, self._plan.run_id, exclude=self._bad)
        for name, reason in choice.skipped:
            if name not in self._warned:
                self._warned.add(name)
                self._console.warn(f"checkpoint {name} is passed over: {reason}")
        return choice.commit

    def _require_no_commit_is_lost(self) -> None:
        """The run's own events remember commits that the root doesn't show: it was emptied, or isn't mounted."""
        commits = history.load(self._plan.run_dir).commits
        if commits:
            raise NoValidCheckpoint(plan.lost_commits(self._plan.run_id, commits[-1].step, self._plan.root))

    def _contract(self, current: Round) -> WorkerContract:
        return replace(
            self._plan.contract,
            attempt=current.attempt,
            epoch=current.epoch,
            since=current.since,
            resume=current.resume,
            node=self._node,
        )

    def workers_started(self, pids: dict[int, Any], world_size: int) -> None:
        """Record the start of an attempt."""
        current = self._current
        self._ranks = sorted(pids)
        self._log.write(
            events.AttemptStarted(
                epoch=current.epoch,
                world_size=world_size,
                resume=current.resume,
                resume_step=current.resume_step,
                pids={str(rank): int(pid) for rank, pid in pids.items()},
            )
        )
        self._resumed_last = current.resume
        start = Start(current.resume, current.resume_step, current.resume_world, first=current.attempt == 1)
        self._console.attempt_started(current.attempt, world_size, start)

    def leaving(self, signal_name: str) -> None:
        """Say at once that a request to stop has arrived, and what comes of it."""
        self._console.say(
            f"[yellow]■[/] {signal_name}: saving at the next step boundary (at most "
            f"{format_duration(self.grace)}); once more ends it at once"
        )

    def sessions_lead(self) -> bool:
        """Whether the workers of the current attempt run a Session, which knows how to leave in order."""
        return self._round is not None and any(beat.owned for beat in self._beats())

    def watch(self) -> None:
        """Look at the pulses while the first step of an attempt is awaited. Called at every turn of the monitor."""
        if self._failed_at is None:
            return
        first = [beat for beat in self._beats() if beat.first_step]
        if first:
            earliest = min(first, key=lambda beat: beat.first_step)
            step = earliest.base + 1 if earliest.owned else None
            self._console.training_again(step, earliest.first_step - self._failed_at)
            self._failed_at = None

    def decide(self, exits: list[failure.RankExit]) -> Decision:
        """Explain a fallen worker group, decide what to do, and say and record both."""
        self.watch()
        self._failed_at = time.time()
        self._made_a_step = self._made_a_step or self._steps_made()
        what = failure.explain(exits)
        if what.kind is failure.Kind.CORRUPT_CHECKPOINT:
            self._bad.add(what.attempt)
            with contextlib.suppress(OSError):  # remembered here anyway, for as long as this launcher lives
                reader.mark_bad(self._root, what.attempt, what.message)
        newest = self._newest_commit()
        self._streak = 0 if newest not in (None, self._resumed_last) else self._streak
        # A killed rank of a run that has trained before is bad luck, wherever it was; other failures tell of a change.
        known = what.kind is failure.Kind.KILLED and self._stepped_before
        situation = policy.Situation(what, self._restarts, self._streak, self._made_a_step or known, newest is not None)
        self.decision = policy.decide(situation, self._plan.limits)
        self._record(what, self.decision, newest)
        if self.decision.restart:
            self._restarts += 1
            self._streak += 1
        return self.decision

    def _record(self, what: failure.Failure, decision: Decision, newest: str | None) -> None:
        step = self._furthest()
        back_to = layout.AttemptName.of(newest).step if newest else 0
        # A script without a Session resumes by its own means, if at all: what it repeats isn't known here.
        lost = max(0, step - back_to) if self.sessions_lead() else 0
        if what.kind is failure.Kind.STOPPED and not decision.restart:
            self._console.failed(what, decision, Fall(self._current.attempt, self._where(step), 0, Path(), shown=True))
            return
        self._log.write(
            events.Failed(
                cause=what.kind.value,
                failed_rank=what.rank,
                exit_code=what.exit_code,
                message=what.message,
                step=step,
                lost_steps=lost,
                decision=decision.reason,
                restart=decision.restart,
                victims=list(what.victims),
            )
        )
        attempt = self._current.attempt
        log = self._plan.run_dir.worker(attempt, self._node, what.rank) / "stderr.log"
        tee = self._plan.job.config.logs.tee
        shown = tee == "all" or self._ranks.index(what.rank) in tee
        self._console.failed(what, decision, Fall(attempt, self._where(step), lost, log, shown))

    def _where(self, step: int) -> str:
        if self._steps_made():
            return f"after step {step:,}"
        resumed = f", while it resumed from step {self._current.resume_step:,}" if self._current.resume else ""
        return f"before its first step{resumed}"

    def _newest_commit(self) -> str | None:
        try:
            commit = self._latest()
        except FtrunError:
            # Said again, and in full, when the next round looks for a commit to resume from.
            return None
        return str(commit.name) if commit else None

    def outcome_of_success(self) -> str:
        """``finished``, or ``left`` when a Session's workers ended well before their loop did."""
        return "finished" if history.load(self._plan.run_dir).loop_ended else "left"

    def commit_step(self) -> int | None:
        """Step of the commit that the next start would resume from, or None."""
        newest = self._newest_commit()
        return layout.AttemptName.of(newest).step if newest is not None else None

    @property
    def how_to_continue(self) -> str:
        """What to type to go on, as the start of a sentence."""
        if self._plan.named:
            return "the same command goes on"
        return f"the same command with --run-dir {self._console.short(self._plan.run_dir.path)} goes on"

    def _beats(self) -> list[pulse.Beat]:
        paths = [self._plan.run_dir.worker(self._current.attempt, self._node, rank) for rank in self._ranks]
        return [beat for path in paths if (beat := pulse.read(path / "pulse")) is not None]

    def _steps_made(self) -> bool:
        return any(beat.made_a_step for beat in self._beats())

    def _furthest(self) -> int:
        return max((beat.step for beat in self._beats()), default=0)

    @property
    def _current(self) -> Round:
        if self._round is None:
            raise AssertionError("a round begins before anything happens in it")
        return self._round
