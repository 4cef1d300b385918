"""The checkpoint interval that ``every: auto`` chooses."""

from __future__ import annotations

import math

import pytest

from ftrun.checkpoint import interval
from ftrun.checkpoint.interval import Failures

DAY = 86400.0


@pytest.mark.parametrize(
    ("workers", "stall", "hours", "minutes"),
    # The table of the published rate: mean time between failures, and Young's interval.
    [(8, 5, 6335, 252), (64, 30, 792, 218), (1024, 120, 49.5, 108), (16384, 5, 3.09, 5.5)],
)
def test_the_prior_is_the_published_rate(workers: int, stall: float, hours: float, minutes: float) -> None:
    mean = interval.between_failures(Failures(0, 0.0, workers))
    assert mean / 3600 == pytest.approx(hours, rel=0.01)
    assert interval.optimum(stall, mean) / 60 == pytest.approx(minutes, rel=0.04)


def waste(every: float, stall: float, mean: float) -> float:
    """Wall-clock per second of training, failures exponential: what the optimum is the minimum of."""
    return mean * (math.exp((every + stall) / mean) - 1) / every


@pytest.mark.parametrize(("stall", "mean"), [(0.1, 60.0), (1.0, 60.0), (20.0, 100.0), (0.01, DAY)])
def test_the_optimum_is_one(stall: float, mean: float) -> None:
    best = interval.optimum(stall, mean)
    here = waste(best, stall, mean)
    assert here <= 1.0001 * min(waste(best * factor, stall, mean) for factor in (0.5, 0.8, 1.25, 2.0))


def test_a_stall_longer_than_life_is_no_reason_to_divide_by_zero() -> None:
    assert interval.optimum(10.0, 4.0) == 4.0


def test_a_run_that_fails_often_is_believed() -> None:
    calm = interval.between_failures(Failures(1, 20.0, 2))
    assert calm > 100 * DAY, "one failure is bad luck"
    often = interval.between_failures(Failures(5, 100.0, 2))
    assert 20 <= often < 60, "five in a hundred seconds are a habit"
    assert interval.choose(0.05, 0.5, Failures(5, 100.0, 2)).seconds < 5


def test_a_long_quiet_life_is_believed_too() -> None:
    fresh, old = (interval.between_failures(Failures(0, seconds, 1024)) for seconds in (0.0, 30 * DAY))
    assert old > 10 * fresh


@pytest.mark.parametrize(
    ("stall", "drain", "seen", "seconds", "bound"),
    [
        (0.1, 1.0, Failures(0, 0.0, 2), interval.LONGEST, "longest"),
        (0.0, 100.0, Failures(50, 500.0, 2), 125.0, "drain"),
        (1e-6, 0.01, Failures(5000, 500.0, 2), interval.SHORTEST, "shortest"),
        (0.1, 4000.0, Failures(0, 0.0, 2), 5000.0, "drain"),
    ],
)
def test_bounds(stall: float, drain: float, seen: Failures, seconds: float, bound: str) -> None:
    chosen = interval.choose(stall, drain, seen)
    assert (chosen.seconds, chosen.bound) == (seconds, bound)
