"""The watch: does the group make progress, is a phase slow, or does it hang?

It looks at pulse pages and nothing else. That a process lives, or keeps a core or a GPU busy, is no progress.
:meth:`Watch.observe` says ``HUNG`` when a rank is over its phase's limit and waits for nobody who may still be at work:
no rank that is as far or less far, and within its own limit. What follows from that takes a look at the processes
themselves, which only then is worth its time: the agent collects evidence, asks :meth:`Watch.confirm`, and acts if it
is still ``HUNG``.

Scripts without a Session are judged with more care, for what lies between two optimizer steps may be anything. Before
an optimizer step has been made, nothing is judged unless the job gives a limit for it. Afterwards the learnt limit
applies, and a verdict needs ranks that do nothing at all, one of them in a collective; see
:mod:`ftrun.launch.watching.excuses`.

Time is what passed between calls, so a clock that is set does no harm, and neither does a machine that was suspended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftrun.config.units import format_duration
from ftrun.launch.watching.culprit import name_culprit
from ftrun.launch.watching.excuses import excuse_of
from ftrun.launch.watching.limits import NAMES, Learnt, Limit, WatchLimits, limit_of, merged
from ftrun.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftrun.launch.evidence.model import RankEvidence
    from ftrun.launch.watching.work import Work
    from ftrun.pulse import Beat

__all__ = ["Value", "Verdict", "Watch", "WatchLimits", "judge", "name_culprit"]

_LONGEST_TURN = 1.0
"""Seconds that one call counts at most, whatever the clock says."""

_NOT_LOOKING = 10.0
_CAUTIOUS_SECONDS = 3600.0
_ASK_AGAIN = 60.0


class Value(enum.Enum):
    """What the watch says of a group."""

    PROGRESS = "progress"
    SLOW = "slow"
    HUNG = "hung"


@dataclass(frozen=True)
class Verdict:
    """The watch's answer.

    Attributes:
        value: progress, slow (longer than usual, within its limit), or hung.
        phase: as the job file calls it; ``end`` when a rank has left and others stand still.
        waited: seconds without progress of the rank that it is about.
        limit: seconds that it may take.
        step: steps which that rank has completed.
        why: a sentence with the numbers.
        rank: which rank it is about: not always the one at fault, which :func:`name_culprit` finds.
        firm: a limit of the job has passed, so time alone decides; otherwise the limit was learnt, or the script has no
            Session, and what the processes do counts too.
        session: the rank has a Session.
    """

    value: Value
    phase: str
    waited: float
    limit: float
    step: int
    why: str
    rank: int | None = None
    firm: bool = True
    session: bool = True


@dataclass(frozen=True)
class Standing:
    """One living rank, and how long it has been where it is."""

    rank: int
    beat: Beat
    waited: float


@dataclass(frozen=True)
class Leaver:
    """The first rank that ended, with exit code 0, while others go on."""

    rank: int
    since: float


@dataclass(frozen=True)
class _Case:
    """A rank against its limit."""

    standing: Standing
    limit: Limit
    waited: float
    firm: bool

    @property
    def over(self) -> bool:
        return self.waited > self.limit.seconds

    @property
    def step(self) -> int:
        return self.standing.beat.step


class Watch:
    """Watches one worker group after another. Called by the agent, several times a second.

    Args:
        limits: what the job allows.
    """

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._past: tuple[int, ...] = ()
        self._alarms = 0
        self._since_alarm = 0.0
        self._begin_group()

    def begin(self) -> None:
        """A new attempt starts. What was learnt of its steps stays."""
        self._past = self._all_steps()
        self._begin_group()

    def _all_steps(self) -> tuple[int, ...]:
        return merged([self._past, *(each.steps for each in self._beats.values())])

    def _begin_group(self) -> None:
        self._last: float | None = None
        self._beats: dict[int, Beat] = {}
        self._waited: dict[int, float] = {}
        self._leaver: Leaver | None = None
        self._patience: dict[tuple[int, int, float], float] = {}

    def observe(
        self, beats: Mapping[int, Beat | None], now: float, ended: Mapping[int, float] | None = None
    ) -> Verdict:
        """Look at the group.

        Args:
            beats: pages of the ranks that live, by rank; None for a page that can't be read.
            now: time on any clock, the monotonic one for choice.
            ended: ranks that have ended with exit code 0, and when.
        """
        self._pass(now)
        for rank, beat in beats.items():
            if beat is not None:
                self._take(rank, beat)
        standings = [Standing(rank, self._beats[rank], self._waited[rank]) for rank in beats if rank in self._beats]
        if ended and self._leaver is None:
            self._leaver = Leaver(min(ended, key=lambda rank: ended[rank]), 0.0)
        learnt = Learnt(self._all_steps(), len(self._beats), self._alarms)
        verdict = judge(standings, self._limits, learnt, self._leaver)
        return self._within_patience(verdict)

    def _pass(self, now: float) -> None:
        turn = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        if turn > _NOT_LOOKING:  # the agent was stopped, or the machine: whatever stood still gets a new period
            self._waited = dict.fromkeys(self._waited, 0.0)
            turn = 0.0
        turn = min(turn, _LONGEST_TURN)
        for rank in self._waited:
            self._waited[rank] += turn
        if self._leaver is not None:
            self._leaver = replace(self._leaver, since=self._leaver.since + turn)
        self._since_alarm += turn
        if self._since_alarm > _CAUTIOUS_SECONDS:
            self._alarms = 0

    def _take(self, rank: int, beat: Beat) -> None:
        before = self._beats.get(rank)
        self._beats[rank] = beat
        if before is None or _place(rank, before) != _place(rank, beat):
            self._waited[rank] = 0.0

    def _within_patience(self, verdict: Verdict) -> Verdict:
        if verdict.value is not Value.HUNG or verdict.rank is None or verdict.rank not in self._beats:
            return verdict
        if verdict.waited > self._patience.get(_place(verdict.rank, self._beats[verdict.rank]), 0.0):
            return verdict
        return replace(verdict, value=Value.SLOW)

    def confirm(
        self, verdict: Verdict, ranks: Sequence[RankEvidence], works: Mapping[int, Work] | None = None
    ) -> Verdict:
        """Whether a hang is one, now that the processes were looked at. To be asked before anything is done about it.

        Where it isn't, the watch waits as long again, a minute at most, before it says so once more.

        Args:
            verdict: from :meth:`observe`.
            ranks: evidence of all ranks, with stacks.
            works: what their processes do, from :func:`ftrun.launch.watching.work.measure`; without it they are idle.
        """
        if verdict.value is not Value.HUNG:
            return verdict
        excuse = excuse_of(verdict, ranks, works or {})
        if excuse is None or verdict.waited > excuse.longest:
            if not verdict.firm:
                self._alarms, self._since_alarm = self._alarms + 1, 0.0
            return verdict
        for rank, beat in self._beats.items():
            self._patience[_place(rank, beat)] = min(verdict.waited + min(verdict.waited, _ASK_AGAIN), excuse.longest)
        return replace(verdict, value=Value.SLOW, why=f"{verdict.why}; but {excuse.why}")


def _place(rank: int, beat: Beat) -> tuple[int, int, float]:
    """What changes with every step and every phase."""
    return rank, beat.step, beat.phase_since


def judge(standings: Sequence[Standing], limits: WatchLimits, learnt: Learnt, leaver: Leaver | None = None) -> Verdict:
    """The verdict on a group. Pure.

    Args:
        standings: all ranks that live.
        limits: what the job allows.
        learnt: what was seen of the run so far.
        leaver: the rank that left first, if one did.
    """
    cases = [_case(each, limits, learnt, leaver) for each in standings]
    known = [each for each in cases if each is not None]
    if not known:
        return Verdict(Value.PROGRESS, "start", 0.0, 0.0, 0, "nothing to judge yet")
    over = [each for each in known if each.over and not _waits(each, known)]
    if over and limits.enabled:
        worst = min(over, key=lambda each: (each.step, -each.waited))
        return _verdict(Value.HUNG, worst, leaver)
    worst = max(known, key=lambda each: each.waited / max(each.limit.usual, 1e-9))
    value = Value.SLOW if worst.waited > worst.limit.usual else Value.PROGRESS
    return _verdict(value, worst, None)


def _case(standing: Standing, limits: WatchLimits, learnt: Learnt, leaver: Leaver | None) -> _Case | None:
    """A rank's limit; None where it isn't judged."""
    beat, waited = standing.beat, standing.waited
    limit = limit_of(beat.phase, limits, learnt)
    given = NAMES[beat.phase] in limits.given
    judged = beat.owned or given or (beat.phase is Phase.STEP and beat.made_a_step)
    if leaver is not None and not limit.learnt:
        # Others may take as long over their end as the job allows, whatever they do.
        end = limit_of(Phase.END, limits, learnt)
        if not judged or end.seconds < limit.seconds:
            limit, waited = end, min(waited, leaver.since)
            judged, given = True, "end" in limits.given
    if not judged:
        return None
    return _Case(standing, limit, waited, firm=not limit.learnt and (beat.owned or given))


def _waits(case: _Case, cases: Sequence[_Case]) -> bool:
    """Whether another rank may still be at work on what this one waits for."""
    return any(not other.over and other.step <= case.step for other in cases if other is not case)


def _verdict(value: Value, case: _Case, leaver: Leaver | None) -> Verdict:
    standing, beat = case.standing, case.standing.beat
    why = f"rank {standing.rank} has been {_doing(beat)} for {format_duration(case.waited)}; {case.limit.why}"
    if leaver is not None:
        why = f"rank {leaver.rank} left with exit code 0 {format_duration(leaver.since)} ago, and {why}"
    return Verdict(
        value=value,
        phase="end" if leaver is not None else NAMES[beat.phase],
        waited=case.waited,
        limit=case.limit.seconds,
        step=beat.step,
        why=why,
        rank=standing.rank,
        firm=case.firm,
        session=beat.owned,
    )


def _doing(beat: Beat) -> str:
    match beat.phase:
        case Phase.START:
            return "starting"
        case Phase.RESTORE:
            return "restoring a checkpoint"
        case Phase.FIRST_STEP if not beat.made_a_step:
            return "in its first step"
        case Phase.SAVE:
            return f"taking a checkpoint after step {beat.step:,}"
        case Phase.EVAL:
            return f"evaluating after step {beat.step:,}"
        case Phase.END:
            return f"ending after step {beat.step:,}"
        case _:
            return f"in step {beat.step + 1:,}"
