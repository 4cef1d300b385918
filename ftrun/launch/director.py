"""The director: what the agent asks at each turn. It reads evidence, lets the policy decide, and has it recorded."""

from __future__ import annotations

import contextlib
import os
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from torch.distributed.elastic.multiprocessing import SignalException

from ftrun import error_file, pulse
from ftrun.checkpoint import layout
from ftrun.config.units import format_duration
from ftrun.errors import FtrunError
from ftrun.goodput import history
from ftrun.launch import nodes_patience, policy, timeline
from ftrun.launch.evidence.collect import Collector, LiveRank, Sources
from ftrun.launch.failures import failure, symptoms
from ftrun.launch.failures.kinds import Kind
from ftrun.launch.filling import Filling
from ftrun.launch.past import Past
from ftrun.launch.record import Record
from ftrun.launch.rounds import Rounds
from ftrun.launch.timeline import Clock
from ftrun.launch.watching import work
from ftrun.launch.watching.watch import Value, Verdict, Watch, WatchLimits

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence

    from torch.distributed import Store

    from ftrun import events
    from ftrun.contract import WorkerContract
    from ftrun.error_file import ErrorRecord
    from ftrun.launch.console import Console
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.gpu_memory import Waited
    from ftrun.launch.keeping import Keeping
    from ftrun.launch.nodes_others import Others
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.policy import Decision
    from ftrun.launch.rounds import Round


class Director:
    """Decides for one launcher. Called on the agent's main thread only.

    Args:
        plan: of the run.
        log: of the launcher.
        console: for people.
        others: the other nodes, where they meet through ftrun's own rendezvous.

    Attributes:
        clock: notes where the seconds of a restart go.
        decision: the last one.
        cause: what went wrong last, in one line; empty while nothing has.
        rank_at_fault: global rank of the last failure's cause, -1 if there was none.
    """

    def __init__(self, plan: LaunchPlan, log: events.EventLog, console: Console, others: Others | None = None) -> None:
        self._plan = plan
        self._others = others
        self._console = console
        self._rounds = Rounds(plan, console)
        self._filling = Filling(plan)
        self._record = Record(plan, log, console)
        self._sources = Sources.of_this_host(os.environ)
        if others is not None:
            self._sources = replace(self._sources, seat=lambda: others.story.seat)
        self._collector = Collector(self._sources)
        limits = WatchLimits.from_config(plan.job.config.watch)
        self._watch = Watch(limits.of_a_part() if plan.shared_by_nodes else limits)
        self._past = Past()
        self._ranks: list[int] = []
        self._lost = 0
        self._made_a_step = False
        self._had_session = True
        self._closed = False
        self._drained = True
        self.cause = ""
        self.clock = Clock()
        self.decision: Decision | None = None
        self.rank_at_fault = -1

    @property
    def grace(self) -> float:
        """Seconds that workers get to leave in order."""
        return self._plan.grace

    @property
    def longest_pause(self) -> float:
        """Seconds that a restart may be put off."""
        return self._plan.limits.backoff_max

    # The beginning of an attempt

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """While this node waits for its next round: as a spare it has its data cache filled."""
        others = self._others
        if others is None:
            return contextlib.nullcontext()
        return self._filling.waiting(lambda: others.spare, lambda text: self._console.say(f"[dim]{escape(text)}[/]"))

    def begin_round(self, store: Store, node: int, nodes: int) -> tuple[WorkerContract, int]:
        """Settle epoch, attempt and commit for the attempt that is about to start; see :class:`Rounds`.

        Returns:
            What its workers are told, and how many times workers were started before.
        """
        before = self._rounds.current
        if self._others is None:
            current = self._rounds.begin(store, node, nodes)
            self._record.begin(current.attempt, node)
        else:
            self._share(self._others, store, node, nodes)
            current = self._rounds.begin(store, node, nodes, self._others.generation)
            self._record.begin(current.attempt, node)
            fallen = before.attempt if before is not None else None
            resumed = current.resume_step if self._had_session else None
            self._lost = self._others.begun(node, current.attempt, fallen, resumed)
        self._watch.begin()
        if node != self._sources.node:
            self._sources = replace(self._sources, node=node)
            self._collector = Collector(self._sources)
        self._collector.baseline()
        self.clock.mark("checkpoint")
        return self._rounds.contract(), current.starts

    def _share(self, others: Others, store: Store, node: int, nodes: int) -> None:
        """What one node knows of failures, all have to know: the next one may be another's to decide about."""
        passed_over = self._rounds.passed_over
        told = others.share(store, node, nodes, self._past, made_a_step=self._made_a_step, passed_over=passed_over)
        self._made_a_step = told.made_a_step
        for name in told.passed_over:
            self._rounds.pass_over(name)

    def workers_started(self, pids: dict[int, Any], world_size: int) -> None:
        """Record the start of an attempt."""
        self._ranks = sorted(pids)
        self._record.started(self._current, pids, world_size, session=self._had_session)
        tier = self._rounds.keeping.tier if self._rounds.keeping is not None else None
        self._filling.begin(self._current, self._rounds.node, tier, self._ranks, world_size)
        if self._others is not None:
            report = self._others.story.started()
            if report is not None and not self._others.grew:
                self._console.say(f"  [dim]what happened: {escape(self._console.short(report))}[/]")

    # While it runs

    def sessions_lead(self) -> bool:
        """Whether the workers of the current attempt run a Session, which knows how to leave in order."""
        return self._rounds.current is not None and any(beat.owned for beat in self._beats().values())

    def keep(self) -> None:
        """See that the node's keeper and filler run where there is a use for them. At every turn of the monitor."""
        self._filling.look()
        if self._rounds.keeping is not None:
            self._rounds.keeping.look(wanted=self.sessions_lead())

    def keeper_pids(self) -> list[int]:
        """Processes of keeper and filler, which no worker has started."""
        kept = self._rounds.keeping.pids() if self._rounds.keeping is not None else []
        return [*kept, *self.filler_pids()]

    def filler_pids(self) -> list[int]:
        """Processes of the filler."""
        return self._filling.pids()

    def all_stepped(self) -> bool:
        """Whether every rank of this node has completed a step of this attempt."""
        beats = self._beats()
        return len(beats) == len(self._ranks) and all(beat.first_step for beat in beats.values())

    def watch(self, ended: Mapping[int, float]) -> Verdict | None:
        """Look at the pulses. Called at every turn of the monitor.

        Args:
            ended: ranks that have ended with code 0, and when.

        Returns:
            A verdict where the group seems to hang, else None.
        """
        beats = self._beats()
        self._look_for_first_step(beats)
        living: dict[int, pulse.Beat | None] = {rank: beats.get(rank) for rank in self._ranks if rank not in ended}
        verdict = self._watch.observe(living, time.monotonic(), ended)
        return verdict if verdict.value is Value.HUNG else None

    def confirm(self, verdict: Verdict, ranks: Sequence[LiveRank]) -> Evidence | None:
        """Look at the processes themselves; the evidence if it is a hang, None if they are only slow."""
        evidence = self._collector.collect(ranks, time.time(), verdict, thorough=True)
        works = work.measure({each.rank: each.pid for each in ranks if each.exit_code is None})
        confirmed = self._watch.confirm(verdict, evidence.ranks, works)
        return evidence if confirmed.value is Value.HUNG else None

    def uninterruptible(self, seconds: float) -> Verdict:
        """The verdict on a worker that has been in uninterruptible sleep for too long."""
        why = f"a worker has been in uninterruptible sleep for {format_duration(seconds)}"
        why += " (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)"
        return Verdict(Value.HUNG, "step", seconds, seconds, self._furthest(), why)

    def _look_for_first_step(self, beats: Mapping[int, pulse.Beat]) -> None:
        first = [beat for beat in beats.values() if beat.first_step] if self.clock.running else []
        if first:
            seconds = self.clock.end(first)
            step = first[0].base + 1 if first[0].owned else None
            others = self._others
            since = others.since if others is not None else timeline.SINCE_FAILURE
            failure = others is None or not others.grew
            read = timeline.read(beats.values())
            self._record.recovered(seconds, self._lost, step, read, since=since, failure=failure)

    # Its end

    def fell(self, at: float) -> None:
        """Something ended the attempt, ``at`` seconds since 1970: from here on the restart's seconds are counted."""
        self._look_for_first_step(self._beats())
        self.clock.begin(at)

    def only_victims(self, ranks: Sequence[LiveRank]) -> bool:
        """Whether all that has ended so far has only lost a peer."""
        errors = [error_file.read(each.directory / "error.json") for each in ranks if each.exit_code]
        return bool(errors) and all(each is not None and _lost_a_peer(each) for each in errors)

    def patience(self, ranks: Sequence[LiveRank], hang: Evidence | None, *, leaving: bool) -> float:
        """For how long other nodes may still say that they are the reason for this node's fall, in seconds.

        Args:
            ranks: of this node.
            hang: evidence of a hang; None where ranks have ended.
            leaving: another node has said that its workers leave.
        """
        if hang is not None:
            return nodes_patience.of_a_hang([each.stack for each in hang.ranks if each.exit_code is None])
        errors = [error_file.read(each.directory / "error.json") for each in ranks if each.exit_code]
        codes = {each.exit_code for each in ranks if each.exit_code}
        return nodes_patience.seconds(
            codes, explained=all(errors), victims=self.only_victims(ranks), leaving=leaving, grace=self.grace
        )

    def broken(self, reason: str) -> None:
        """A round was over before its workers were started."""
        words = self._others.in_words(reason) if self._others is not None else reason
        self._console.say(f"[yellow]↻[/] {escape(words)}: the nodes meet again")

    def about_to_end(self, ranks: Sequence[LiveRank], word: str) -> None:
        """This node's workers are about to be ended for what happened elsewhere: see how they stand.

        Args:
            ranks: of this node.
            word: why, in words.
        """
        if self._others is not None:
            self._others.story.look(self._collector, ranks, word)

    def broke(self, words: str) -> None:
        """This launcher can't go on; its workers have been ended.

        Args:
            words: why, as the other nodes are told it.
        """
        if self._others is not None and self._rounds.current is not None:
            attempt, node = self._current.attempt, self._rounds.node
            places = [self._plan.run_dir.worker(attempt, node, rank) for rank in self._ranks]
            ranks = [LiveRank(rank, local, 0, None, 0.0, places[local]) for local, rank in enumerate(self._ranks)]
            self._others.story.broke(self._collector, ranks, words)

    def disturbed(self, reason: str, *, over: bool, grows: bool) -> None:
        """This node's workers are ended for what happened elsewhere.

        Args:
            reason: in words.
            over: the run has ended; otherwise the nodes meet again.
            grows: other nodes join, and the workers have saved before they left.
        """
        if self._others is not None and not grows:
            self._others.story.gave_way(self._collector, reason)
        if over or self._others is None:
            return
        if not self.clock.running:
            self.fell(time.time())
        self._made_a_step = self._made_a_step or self._steps_made()
        self._had_session = self.sessions_lead() or not self._steps_made()
        phases = {beat.phase for beat in self._beats().values()}
        self._others.disturbed(reason, self._furthest() if self._steps_made() else 0, phases, grows=grows)

    def collect(self, ranks: Sequence[LiveRank]) -> Evidence:
        """See what a fallen group has to say, while it is as it was found."""
        return self._collector.collect(ranks, time.time(), thorough=False)

    def decide(self, evidence: Evidence, stuck: set[int]) -> Decision:
        """Explain a fallen worker group, decide what to do, and say and record both.

        Args:
            evidence: taken before anybody was killed.
            stuck: processes that could not be killed.
        """
        self._made_a_step = self._made_a_step or self._steps_made()
        self._had_session = self.sessions_lead() or not self._steps_made()
        what = self._explain(evidence)
        self.rank_at_fault = what.rank
        self.cause = what.message.partition("\n")[0]
        if what.kind is Kind.CORRUPT_CHECKPOINT:
            with contextlib.suppress(OSError):  # remembered here anyway, for as long as this launcher lives
                self._rounds.mark_bad(what.attempt, what.message)
        if what.kind is Kind.LOST_SNAPSHOT and self._current.resume is not None:
            self._rounds.pass_over(self._current.resume)
        left_out = ""
        if self._others is not None and what.kind is not Kind.STOPPED and not _is_elsewhere(evidence, what):
            left_out = self._others.left_out(what, evidence)
        self.decision = policy.decide(self._situation(what, left_out), self._plan.limits)
        self._tell(what, self.decision, evidence)
        if stuck:
            self.cannot_be_killed(stuck)
        step = self._furthest() if self._steps_made() else None
        self._past.add(what, step, time.time(), restart=self.decision.restart)
        if self.decision.left_out:
            self._past.refill()
        if self.decision.further_back:
            self._go_back()
        return self.decision

    def _explain(self, evidence: Evidence) -> failure.Failure:
        try:
            return failure.explain(evidence)
        except Exception as error:  # evidence can hold anything, and a restart must not be lost over words for it
            self._console.warn(f"the evidence could not be read ({type(error).__name__}: {error}); please report it")
            fallen = [each for each in evidence.ranks if each.fell] or list(evidence.ranks)
            first = min(fallen, key=lambda each: each.exited_at or float("inf"))
            code = first.exit_code or 1
            return failure.Failure(Kind.UNKNOWN, first.rank, code, f"rank {first.rank} ended", node=evidence.node)

    def _situation(self, what: failure.Failure, left_out: str) -> policy.Situation:
        newest = self._newest_commit()
        if policy.is_progress(self._current.resume, newest, self._trained(), self._plan.limits):
            self._past.refill()
        return policy.Situation(
            failure=what,
            restarts=self._past.restarts,
            streak=self._past.streak,
            made_a_step=self._made_a_step,
            session=self._had_session,
            has_commit=newest is not None,
            has_older_commit=newest is not None and self._past.knows(what) and self._has_older(),
            step=self._furthest() if self._steps_made() else None,
            streak_by_kind=dict(self._past.streak_by_kind),
            failed_at=tuple(self._past.failed_at),
            earlier=tuple(self._past.earlier),
            now=time.time(),
            chance=random.random(),
            left_out=left_out,
        )

    def _trained(self) -> float | None:
        """Seconds since the attempt's first step; None with a Session, which shows its progress by commits."""
        beats = self._beats().values()
        if any(beat.owned for beat in beats):
            return None
        first = min((beat.first_step for beat in beats if beat.first_step), default=0.0)
        return time.time() - first if first else 0.0

    def _has_older(self) -> bool:
        with contextlib.suppress(FtrunError, OSError):
            return self._rounds.latest(further_back=True) is not None
        return False

    def _go_back(self) -> None:
        newest = self._newest_commit()
        if newest is not None:
            self._rounds.pass_over(newest)

    def _tell(self, what: failure.Failure, decision: Decision, evidence: Evidence) -> None:
        step = self._furthest()
        if what.kind is Kind.STOPPED and not decision.restart:
            self._record.stopped(what, decision, self._where(step))
            return
        newest = self._newest_commit()
        back_to = layout.AttemptName.of(newest).step if newest else 0
        # A script without a Session resumes by its own means, if at all: what it repeats isn't known here.
        self._lost = max(0, step - back_to) if self.sessions_lead() else 0
        event = self._record.failed(what, decision, evidence, step=step, lost=self._lost, where=self._where(step))
        if self._others is not None:
            self._others.decided(event)

    def _where(self, step: int) -> str:
        if self._steps_made():
            return f"after step {step:,}"
        current = self._current
        resumed = f", while it resumed from step {current.resume_step:,}" if current.resume else ""
        return f"before its first step{resumed}"

    def _newest_commit(self) -> str | None:
        try:
            commit = self._rounds.latest()
        except (FtrunError, OSError):
            # Said again, and in full, when the next round looks for a commit to resume from.
            return None
        return str(commit.name) if commit else None

    # What the agent tells

    def leaving(self, why: str, *, asked: bool = True) -> None:
        """Workers are about to leave in order; say what comes of it at once.

        Args:
            why: a signal's name, or another reason.
            asked: by a signal; one more of it ends them at once.
        """
        most = f"(at most {format_duration(self.grace)})"
        then = "; once more ends it at once" if asked else ", then this node leaves"
        self._console.say(f"[yellow]■[/] {escape(why)}: saving at the next step boundary {most}{then}")

    def heard(self, number: signal.Signals, told: int) -> None:
        """SIGUSR1 or SIGUSR2 has arrived and was passed on to so many ranks."""
        if not told:
            self._console.warn(f"{number.name} is ignored: no worker has a use for it yet, a Session would")
        elif self.sessions_lead():
            what = "saving at the next step boundary" + (", then leaving" if number.name == "SIGUSR2" else "")
            self._console.say(f"[yellow]■[/] {number.name}: {what}")

    def daemon(self, pid: int, command: str) -> None:
        """A worker has ended well and left a process running that is no longer its own."""
        self._console.warn(f"a worker left process {pid} running, in a session of its own: {command or 'unknown'}")

    def gpu_memory(self, waited: Waited) -> None:
        """The wait for the GPUs' memory is over."""
        if waited.still_there:
            pids = ", ".join(map(str, waited.still_there))
            self._console.warn(f"a GPU still holds memory of dead processes ({pids}); {waited.reason}; going on")

    def cannot_be_killed(self, pids: set[int]) -> None:
        """Processes are in uninterruptible sleep."""
        those = ", ".join(map(str, sorted(pids)))
        self._console.warn(
            f"processes that can't be killed: {those}. They wait in the kernel for storage or a device; if that "
            "doesn't come back, this host has to be restarted"
        )

    # What is known

    def outcome_of_success(self) -> str:
        """``finished``, or ``left`` when a Session's workers ended well before their loop did."""
        return "finished" if history.load(self._plan.run_dir).loop_ended else "left"

    @property
    def drained(self) -> bool:
        """After :meth:`close`: nothing that was saved lies in this node's memory alone."""
        return self._drained

    def note_finished(self) -> None:
        """The run is finished, and all that was saved is committed."""
        self._rounds.note_finished()

    def commit_step(self) -> int | None:
        """Step of the commit that the next start would resume from, or None.

        A root that is away is not waited for, and not taken for an empty one: then the last commit that was heard of
        counts.
        """
        try:
            newest = self._rounds.latest_soon()
        except (FtrunError, OSError):
            newest = None  # said by the next start, and in full
        if newest is not None:
            return newest.name.step
        commits = history.load(self._plan.run_dir).commits
        return commits[-1].step if commits else None

    @property
    def how_to_continue(self) -> str:
        """What to type to go on, as the start of a sentence."""
        if self._plan.named:
            return "the same command goes on"
        return f"the same command with --run-dir {self._console.short(self._plan.run_dir.path)} goes on"

    def close(self) -> None:
        """Let go of what is open, and have what lies in memory committed. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._others is not None:
            self._others.close()
        self._collector.close()
        self._filling.finish()
        keeping = self._rounds.keeping
        self._drained = keeping is None or self._is_drained(keeping)
        if keeping is not None and not self._drained:
            self._console.warn(
                f"a snapshot is not committed yet: it stays in {keeping.tier.path}, where the next start of this run "
                f"takes it up ({self.how_to_continue}); remove the directory if there won't be one"
            )

    def _is_drained(self, keeping: Keeping) -> bool:
        try:
            return keeping.finish(self.grace)
        except SignalException:  # whoever asks for the end once more doesn't want to wait for a storage
            return False

    def _beats(self) -> dict[int, pulse.Beat]:
        attempt, node = self._current.attempt, self._rounds.node
        pages = {rank: self._plan.run_dir.worker(attempt, node, rank) / "pulse" for rank in self._ranks}
        return {rank: beat for rank, page in pages.items() if (beat := pulse.read(page)) is not None}

    def _steps_made(self) -> bool:
        return any(beat.made_a_step for beat in self._beats().values())

    def _furthest(self) -> int:
        return max((beat.step for beat in self._beats().values()), default=0)

    @property
    def _current(self) -> Round:
        if self._rounds.current is None:
            raise AssertionError("a round begins before anything happens in it")
        return self._rounds.current


def _lost_a_peer(error: ErrorRecord) -> bool:
    symptom = symptoms.of_exception(error.traceback or error.message, stepped=True)
    return symptom is not None and symptom.standing is symptoms.Standing.LOST_A_PEER


def _is_elsewhere(evidence: Evidence, what: failure.Failure) -> bool:
    """Whether even the first rank at fault has only lost a peer: then the cause is on none of this node's."""
    error = next((each.error for each in evidence.ranks if each.rank == what.rank), None)
    return error is not None and _lost_a_peer(error)
