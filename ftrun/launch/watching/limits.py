"""How long a worker may stay in one phase: as the job says, or as its own steps have shown.

Everything but a step has the limit that the job gives it (half an hour by default). The limit of a step is learnt::

    max(2 x p99.9 of the steps measured, 1.25 x the longest of them) + 3.5 s, between floor and ceiling

The 3.5 s are for what a machine does now and then; with them and the time that it takes to look, a hang is seen within
three usual steps and 5 s. The longest one counts on its own because a stall that comes rarely (an epoch begins, a
model is compiled anew) may be too rare for the quantile, and must not end the run the second time it comes. Before
enough steps have been measured the ceiling applies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftrun import pulse
from ftrun.config.units import format_duration
from ftrun.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_SHARE = 0.999
_FACTOR = 2.0
_FACTOR_OF_LONGEST = 1.25
_SLACK = 3.5
_ENOUGH_STEPS = 20

_CAUTION = 4.0
"""A learnt limit grows by this with each hang that it has found in the hour before: if that was a slow step instead,
the next attempt gets over it, and has learnt it then."""

_HALF_AN_HOUR = 1800.0

NAMES = {
    Phase.START: "start",
    Phase.RESTORE: "restore",
    Phase.FIRST_STEP: "first_step",
    Phase.STEP: "step",
    Phase.SAVE: "save",
    Phase.EVAL: "eval",
    Phase.END: "end",
}
"""What the job file calls the phases."""


@dataclass(frozen=True)
class WatchLimits:
    """Limits by phase, in seconds; None is left to the watch, infinity is no limit.

    Attributes:
        enabled: whether there is a verdict other than progress and slow.
        step: for a step.
        start: until the script restores or begins its first step.
        first_step: for the first step of an attempt, and the first batch of an epoch.
        restore: for reading a checkpoint.
        save: while a checkpoint holds the training up.
        eval: for an evaluation that the script says is one.
        end: from the last step to the end of the process, and from the first rank's end to the last one's.
        floor: the shortest that the watch chooses.
        ceiling: the longest that it chooses, and what applies where it has learnt nothing.
        given: phases whose limit was asked for: such a limit holds for scripts without a Session too.
    """

    enabled: bool = True
    step: float | None = None
    start: float | None = _HALF_AN_HOUR
    first_step: float | None = _HALF_AN_HOUR
    restore: float | None = _HALF_AN_HOUR
    save: float | None = _HALF_AN_HOUR
    eval: float | None = _HALF_AN_HOUR
    end: float | None = _HALF_AN_HOUR
    floor: float = 4.0
    ceiling: float = _HALF_AN_HOUR
    given: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, watch: Any) -> WatchLimits:
        """From the ``watch`` section of a job file (:class:`ftrun.config.supervisor.Watch`)."""
        limits = {name: _seconds(getattr(watch, name)) for name in NAMES.values()}
        return cls(
            enabled=watch.enabled,
            floor=watch.floor.total_seconds(),
            ceiling=watch.ceiling.total_seconds(),
            given=frozenset(watch.model_fields_set) & set(limits),
            **limits,
        )

    def of_a_part(self) -> WatchLimits:
        """For a node of several, which doesn't see what ranks elsewhere are at: no limit of its own is learnt."""
        return replace(self, step=self.ceiling) if self.step is None else self


def _seconds(patience: Any) -> float | None:
    if patience == "auto":
        return None
    return math.inf if patience == "off" else float(patience.total_seconds())


@dataclass(frozen=True)
class Limit:
    """How long one phase may take.

    Attributes:
        seconds: infinity for no limit.
        why: where the number comes from, as the end of a sentence.
        usual: seconds after which it is slow.
        learnt: it was learnt from steps, and may be wrong about what was never seen.
    """

    seconds: float
    why: str
    usual: float
    learnt: bool = False


@dataclass(frozen=True)
class Learnt:
    """What was seen of this run so far.

    Attributes:
        steps: histogram of all steps that were measured, of all ranks.
        num_ranks: how many ranks these came from.
        caution: how many hangs a learnt limit has found of late.
    """

    steps: tuple[int, ...] = ()
    num_ranks: int = 1
    caution: int = 0


def merged(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Several ranks' histograms as one."""
    counts: list[int] = []
    for each in histograms:
        counts += [0] * (len(each) - len(counts))
        for index, count in enumerate(each):
            counts[index] += count
    return tuple(counts)


def limit_of(phase: Phase, limits: WatchLimits, learnt: Learnt) -> Limit:
    """The limit of a phase: what the job says, else what was learnt."""
    name = NAMES[phase]
    given: float | None = getattr(limits, name)
    if given is not None:
        return Limit(given, f"the limit is {format_duration(given)} (watch.{name})", min(60.0, given / 2))
    if phase is Phase.STEP:
        return _learnt(limits, learnt)
    ceiling = limits.ceiling
    return Limit(ceiling, f"the limit is {format_duration(ceiling)} (watch.ceiling)", min(60.0, ceiling / 2))


def _learnt(limits: WatchLimits, learnt: Learnt) -> Limit:
    count = sum(learnt.steps) // max(1, learnt.num_ranks)
    if count < _ENOUGH_STEPS:
        why = f"the limit is {format_duration(limits.ceiling)} until {_ENOUGH_STEPS} steps are measured"
        return Limit(limits.ceiling, why, min(60.0, limits.ceiling / 2))
    usual, longest = pulse.quantile(learnt.steps, MOST_SHARE), pulse.quantile(learnt.steps, 1.0)
    wanted = (max(_FACTOR * usual, _FACTOR_OF_LONGEST * longest) + _SLACK) * _CAUTION**learnt.caution
    seconds = min(max(wanted, limits.floor), limits.ceiling)
    why = (
        f"steps took {format_duration(usual)} at most (p99.9 of {count:,}; the longest {format_duration(longest)}), "
        f"the limit is {format_duration(seconds)}"
    )
    if learnt.caution:
        why += f" after {learnt.caution} hang{'s' if learnt.caution > 1 else ''} within an hour"
    return Limit(seconds, why, max(1.0, usual), learnt=True)
