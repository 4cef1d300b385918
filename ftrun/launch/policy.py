"""From a failure to a decision: restart or stop, and why. Pure, so that every rule is a line in a table of tests.

Reasons name the key of the job file that decides, for whoever wants it otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from ftrun.config.units import duration_text, window_text
from ftrun.contract import ExitCode
from ftrun.launch.failures.failure import shell_code
from ftrun.launch.failures.kinds import NATURES, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.config.units import Window
    from ftrun.launch.failures.failure import Failure

_ENOUGH = 3
"""The same failure at the same step so many times will not go away."""


@dataclass(frozen=True)
class Limits:
    """What the job allows.

    Attributes:
        no_progress: restarts in a row without a new commit.
        max_restarts: restarts in all, or None.
        exactly: ``--max-restarts`` was given: that many restarts and no other rule, as under torchrun.
        window: more failures than these in this time are too many; None for no such limit.
        budgets: restarts in a row without a new commit by kind, by :attr:`Kind.key`; None and missing for no limit.
        backoff_first: seconds before the second restart in a row without a new commit; doubles from there.
        backoff_max: its cap.
        jitter: part of a wait that is left to chance, from 0 to 1.
        refill_after: seconds of training that count as progress where there is no Session to commit any; None for none.
    """

    no_progress: int = 3
    max_restarts: int | None = None
    exactly: bool = False
    window: Window | None = None
    budgets: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    backoff_first: float = 1.0
    backoff_max: float = 300.0
    jitter: float = 0.0
    refill_after: float | None = 3600.0


@dataclass(frozen=True)
class Situation:
    """What is known when the worker group has fallen.

    Attributes:
        failure: what went wrong.
        restarts: restarts so far, by this launcher.
        streak: restarts in a row without progress, as :func:`is_progress` sees it.
        made_a_step: some attempt of this launcher completed a step.
        has_commit: there is a commit to resume from.
        has_older_commit: there is one before that, too.
        step: steps that were completed when it failed; None where the attempt made none or they aren't known.
        streak_by_kind: of the restarts in ``streak``, how many followed each kind.
        failed_at: times of this launcher's earlier failures, seconds since 1970.
        earlier: fingerprint and step of this launcher's earlier failures, commits in between or not.
        now: seconds since 1970.
        chance: a random number from 0 to 1, for the jitter.
        session: the script has a Session, so that commits are to be expected.
        left_out: why the node at fault is left out from now on; empty where none is.
    """

    failure: Failure
    restarts: int
    streak: int
    made_a_step: bool
    has_commit: bool = True
    has_older_commit: bool = False
    step: int | None = None
    streak_by_kind: Mapping[Kind, int] = field(default_factory=lambda: MappingProxyType({}))
    failed_at: tuple[float, ...] = ()
    earlier: tuple[tuple[str, int], ...] = ()
    now: float = 0.0
    chance: float = 0.0
    session: bool = True
    left_out: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        restart: start the worker group again.
        reason: for people.
        delay: seconds to wait before that.
        exit_code: what ftrun exits with when it doesn't restart.
        outcome: for the run's last event: ``stopped``, ``failed`` or ``gave_up``.
        further_back: how many of the newest commits the restart passes over.
        left_out: why the node at fault takes no part in it; empty where none is left out. The budgets are full again.
    """

    restart: bool
    reason: str
    delay: float = 0.0
    exit_code: int = 0
    outcome: str = ""
    further_back: int = 0
    left_out: str = ""


def is_progress(resumed: str | None, newest: str | None, trained: float | None, limits: Limits) -> bool:
    """Whether a fallen attempt has made progress, which refills the budgets.

    A Session shows it by a new commit. Where a script without one resumes is its own business: there, time spent
    training has to do.

    Args:
        resumed: the commit that the attempt began with, if any.
        newest: the newest commit there is now, if any.
        trained: seconds since the attempt's first step; None with a Session.
        limits: what the job allows.
    """
    if newest not in (None, resumed):
        return True
    return trained is not None and limits.refill_after is not None and trained >= limits.refill_after


def decide(situation: Situation, limits: Limits) -> Decision:
    """Restart or stop. The first rule that applies decides."""
    return (
        _as_asked(situation)
        or _by_count(situation, limits)
        or _by_nature(situation)
        or _in_all(situation, limits)
        or _in_time(situation, limits)
        or _elsewhere(situation)
        or _again_and_again(situation)
        or _by_budget(situation, limits)
        or _without_progress(situation, limits)
        or _restart(situation, limits)
    )


def _as_asked(situation: Situation) -> Decision | None:
    """Stopped on request, or asked for what can't be."""
    failure = situation.failure
    if failure.kind is Kind.STOPPED:
        reason = "stopped on request, with a commit" if situation.has_commit else "left with code 75, without a commit"
        return Decision(False, reason, exit_code=ExitCode.TRY_AGAIN, outcome="stopped")
    if failure.kind is Kind.USAGE:
        return _stop(failure, "the same start would end the same way")
    return None


def _by_count(situation: Situation, limits: Limits) -> Decision | None:
    """``--max-restarts`` was given."""
    if not limits.exactly:
        return None
    allowed = limits.max_restarts or 0
    if situation.restarts < allowed:
        return Decision(True, f"restart {situation.restarts + 1} of {allowed} (--max-restarts)")
    used = f"all {_count(allowed, 'restart')} used" if allowed else "no restarts allowed"
    return _stop(situation.failure, f"{used} (--max-restarts)")


def _by_nature(situation: Situation) -> Decision | None:
    """What the failure is decides before anything is counted."""
    failure = situation.failure
    if failure.kind is Kind.CORRUPT_CHECKPOINT:
        return Decision(True, "the checkpoint is marked bad, the next older one is used")
    if failure.kind is Kind.LOST_SNAPSHOT:
        return Decision(True, "the snapshot in memory is passed over, the newest commit is used")
    if not situation.made_a_step and not NATURES[failure.kind].from_outside:
        return _stop(failure, "it failed before the first step, so a restart would most likely fail again")
    if not failure.retryable:
        return _stop(failure, "the same start would end the same way")
    return None


def _in_all(situation: Situation, limits: Limits) -> Decision | None:
    if limits.max_restarts is None or situation.restarts < limits.max_restarts:
        return None
    return _stop(situation.failure, f"all {limits.max_restarts} restarts are used (restart.max_restarts)")


def _in_time(situation: Situation, limits: Limits) -> Decision | None:
    if limits.window is None:
        return None
    begin = situation.now - limits.window.time.total_seconds()
    failures = 1 + sum(time > begin for time in situation.failed_at)
    if failures <= limits.window.count:
        return None
    return _give_up(f"{failures} failures, and {window_text(limits.window)} are allowed (restart.window)")


def _elsewhere(situation: Situation) -> Decision | None:
    """What a node has done counts for nothing where it takes no part; only so many nodes are ever left out."""
    if not situation.left_out:
        return None
    return Decision(True, situation.left_out, left_out=situation.left_out)


def _again_and_again(situation: Situation) -> Decision | None:
    times = _times_here(situation)
    if times < _ENOUGH:
        return None
    hint = "; look at the samples of that step" if situation.failure.blame == "data" else ""
    return _give_up(
        f"the same failure ({situation.failure.fingerprint}) after step {situation.step:,} for the {_nth(times)} time, "
        f"so it doesn't go away with restarts{hint}"
    )


def _times_here(situation: Situation) -> int:
    """How often this failure has come at this step. What comes from outside may well come twice at the same step."""
    failure, step = situation.failure, situation.step
    if not failure.fingerprint or step is None or NATURES[failure.kind].from_outside:
        return 0
    return 1 + situation.earlier.count((failure.fingerprint, step))


def _by_budget(situation: Situation, limits: Limits) -> Decision | None:
    kind = situation.failure.kind
    budget, used = limits.budgets.get(kind.key), situation.streak_by_kind.get(kind, 0)
    if budget is None or used < budget:
        return None
    key = f"restart.budgets.{kind.key}"
    if budget == 0:
        return _stop(situation.failure, f"no restart after this kind of failure, {kind.value} ({key})")
    lacking = _progress(situation, limits, "a new commit", key)
    return _give_up(f"{_count(used, 'restart')} after this kind of failure, {kind.value}, without {lacking}")


def _without_progress(situation: Situation, limits: Limits) -> Decision | None:
    if situation.streak < limits.no_progress:
        return None
    never = situation.session and not situation.has_commit
    hint = "; no commit was ever made, so set checkpoint.every lower" if never else ""
    lacking = _progress(situation, limits, "a new commit", "restart.no_progress")
    return _give_up(f"{_count(situation.streak, 'restart')} in a row without {lacking}{hint}")


def _restart(situation: Situation, limits: Limits) -> Decision:
    delay = backoff(situation.streak, limits, situation.chance)
    if _unreadable_again(situation) and situation.has_older_commit:
        again = "the storage failed before the first step as it did before"
        return Decision(True, f"{again}, so it goes one commit further back", delay, further_back=1)
    if _times_here(situation) < _ENOUGH - 1:
        return Decision(True, _allowed(situation, limits), delay)
    again = f"the same failure ({situation.failure.fingerprint}) after step {situation.step:,} as before"
    if situation.has_older_commit:
        return Decision(True, f"{again}, so it goes one commit further back", delay, further_back=1)
    older = "there is no older commit to go back to" if situation.has_commit else "there is no commit to go back to"
    return Decision(True, f"{again}, and {older}; {_allowed(situation, limits)}", delay)


def _unreadable_again(situation: Situation) -> bool:
    """The same checkpoint could not be read twice: that may pass, but an older one may well be readable now."""
    was_before = situation.streak_by_kind.get(Kind.STORAGE, 0) > 0
    return situation.failure.kind is Kind.STORAGE and situation.step is None and was_before


def _allowed(situation: Situation, limits: Limits) -> str:
    """Which restart this is, by the limit that is nearest."""
    kind = situation.failure.kind
    budget, used = limits.budgets.get(kind.key), situation.streak_by_kind.get(kind, 0)
    at, of, key = situation.streak, limits.no_progress, "restart.no_progress"
    if budget is not None and budget - used < of - at:
        at, of, key = used, budget, f"restart.budgets.{kind.key}"
    return f"{at + 1} of {of} allowed before {_progress(situation, limits, 'the next commit', key)}"


def _progress(situation: Situation, limits: Limits, commit: str, key: str) -> str:
    """What would refill the budgets, and the keys that say so."""
    if situation.session:
        return f"{commit} ({key})"
    if limits.refill_after is None:
        return f"{commit}, which takes a Session ({key})"
    return f"{duration_text(timedelta(seconds=limits.refill_after))} of training ({key}, restart.refill_after)"


def backoff(streak: int, limits: Limits, chance: float = 0.0) -> float:
    """Seconds to wait: none before the first restart in a row, then doubling up to the cap, less what chance takes."""
    if streak == 0:
        return 0.0
    # 2**40 seconds is beyond any cap; a larger power would only overflow.
    longest = min(limits.backoff_max, limits.backoff_first * 2.0 ** min(streak - 1, 40))
    return longest * (1.0 - limits.jitter * chance)


def _stop(failure: Failure, reason: str) -> Decision:
    return Decision(False, reason, exit_code=shell_code(failure), outcome="failed")


def _give_up(reason: str) -> Decision:
    return Decision(False, reason, exit_code=ExitCode.GAVE_UP, outcome="gave_up")


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
