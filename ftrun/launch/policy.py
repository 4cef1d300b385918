"""From a failure to a decision: restart or stop, and why. Pure, so that every rule is a line in a table of tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.contract import ExitCode
from ftrun.launch.failure import Kind, shell_code

if TYPE_CHECKING:
    from ftrun.launch.failure import Failure


@dataclass(frozen=True)
class Limits:
    """What the job allows.

    Attributes:
        no_progress: restarts in a row without a new commit.
        max_restarts: restarts in all, or None.
        exactly: ``--max-restarts`` was given: that many restarts and no other rule, as under torchrun.
        backoff_first: seconds before the second restart in a row without a new commit; doubles from there.
        backoff_max: its cap.
    """

    no_progress: int = 3
    max_restarts: int | None = None
    exactly: bool = False
    backoff_first: float = 1.0
    backoff_max: float = 300.0


@dataclass(frozen=True)
class Situation:
    """What is known when the worker group has fallen.

    Attributes:
        failure: what went wrong.
        restarts: restarts so far, by this launcher.
        streak: restarts in a row without a new commit; 0 when there is a commit that the last restart didn't have.
        made_a_step: some attempt of this launcher completed a step.
        has_commit: there is a commit to resume from.
    """

    failure: Failure
    restarts: int
    streak: int
    made_a_step: bool
    has_commit: bool = True


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        restart: start the worker group again.
        delay: seconds to wait before that.
        exit_code: what ftrun exits with when it doesn't restart.
        outcome: for the run's last event: ``stopped``, ``failed`` or ``gave_up``.
        reason: for people.
    """

    restart: bool
    reason: str
    delay: float = 0.0
    exit_code: int = 0
    outcome: str = ""


def decide(situation: Situation, limits: Limits) -> Decision:
    """Restart or stop."""
    failure = situation.failure
    if failure.kind is Kind.STOPPED:
        reason = "stopped on request, with a commit" if situation.has_commit else "left with code 75, without a commit"
        return Decision(False, reason, exit_code=ExitCode.TRY_AGAIN, outcome="stopped")
    if failure.kind is Kind.USAGE:
        return _stop(failure, "the same start would end the same way")
    if limits.exactly:
        return _by_count(situation, limits)
    if failure.kind is Kind.CORRUPT_CHECKPOINT:
        return Decision(True, "the checkpoint is marked bad, the next older one is used")
    if not situation.made_a_step:
        return _stop(failure, "it failed before the first step, so a restart would most likely fail again")
    if limits.max_restarts is not None and situation.restarts >= limits.max_restarts:
        return _stop(failure, f"all {limits.max_restarts} restarts are used (restart.max_restarts)")
    if situation.streak >= limits.no_progress:
        return Decision(
            False,
            f"{_count(situation.streak, 'restart')} in a row without a new commit (restart.no_progress)"
            + ("" if situation.has_commit else "; no commit was ever made, so set checkpoint.every lower"),
            exit_code=ExitCode.GAVE_UP,
            outcome="gave_up",
        )
    reason = f"{situation.streak + 1} of {limits.no_progress} allowed before the next commit"
    return Decision(True, reason, delay=backoff(situation.streak, limits))


def backoff(streak: int, limits: Limits) -> float:
    """Seconds to wait: none before the first restart in a row, then doubling up to the cap."""
    if streak == 0:
        return 0.0
    # 2**40 seconds is beyond any cap; a larger power would only overflow.
    return min(limits.backoff_max, limits.backoff_first * 2.0 ** min(streak - 1, 40))


def _by_count(situation: Situation, limits: Limits) -> Decision:
    allowed = limits.max_restarts or 0
    if situation.restarts < allowed:
        return Decision(True, f"restart {situation.restarts + 1} of {allowed} (--max-restarts)")
    used = f"all {_count(allowed, 'restart')} used" if allowed else "no restarts allowed"
    return _stop(situation.failure, f"{used} (--max-restarts)")


def _stop(failure: Failure, reason: str) -> Decision:
    return Decision(False, reason, exit_code=shell_code(failure), outcome="failed")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
