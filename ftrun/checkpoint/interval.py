"""How often to take a checkpoint: from what one costs, and from how often the run fails. Pure, and without torch.

The time between checkpoints that loses least is Young's ``sqrt(2 C M)``, in Daly's higher order form (J. Daly, "A
higher order estimate of the optimum checkpoint interval", 2006, equation 37): C is what a checkpoint holds training up,
M the mean time between failures. A snapshot that drains in the background costs its stall only, so C is small, but an
interval shorter than the drain makes no sense.

M is estimated from a prior and from the run's own failures. The prior is the rate of the Llama 3 training (419
interruptions in 54 days on 16,384 GPUs, 4.7e-4 a day and GPU); it counts as one failure seen. A run whose own failures
say clearly that it fails more often (their rate's lower bound at 90 % is higher) is believed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_RATE = 419 / (54 * 86400 * 16384)
"""Failures a second and worker."""

SHORTEST, LONGEST = 1.0, 1800.0
"""Seconds. Half an hour lost is a lot even where failures are rare, and a short interval costs next to nothing."""

_QUANTILE = 1.2816  # of the standard normal distribution, at 90 %


@dataclass(frozen=True)
class Failures:
    """What a run has lived through.

    Attributes:
        count: failures that weren't the code's own.
        seconds: how long it ran altogether.
        workers: how many workers can fail.
    """

    count: int
    seconds: float
    workers: int


@dataclass(frozen=True)
class Chosen:
    """An interval, and why.

    Attributes:
        seconds: between two checkpoints.
        between_failures: mean seconds between failures, as estimated.
        stall: seconds that a checkpoint holds training up.
        bound: what kept it from being the optimum: ``""``, ``"drain"``, ``"shortest"`` or ``"longest"``.
    """

    seconds: float
    between_failures: float
    stall: float
    bound: str


def between_failures(seen: Failures) -> float:
    """Mean seconds between failures: a Gamma-Poisson estimate, or the run's own word where that is clear."""
    prior = PRIOR_RATE * max(1, seen.workers)
    expected = (1 + seen.count) / (1 / prior + seen.seconds)
    return 1 / max(expected, _lower_bound(seen))


def _lower_bound(seen: Failures) -> float:
    """Rate that the true one exceeds with 90 % certainty, by the run's own failures alone. One failure says nothing."""
    if seen.count < 2 or seen.seconds <= 0:
        return 0.0
    # Wilson and Hilferty's approximation of the Gamma distribution's quantile.
    cube = 1 - 1 / (9 * seen.count) - _QUANTILE / (3 * math.sqrt(seen.count))
    return seen.count * cube**3 / seen.seconds


def optimum(stall: float, mean: float) -> float:
    """Daly's interval in seconds, for a stall and a mean time between failures in seconds."""
    if stall >= 2 * mean:
        return mean
    ratio = stall / (2 * mean)
    return math.sqrt(2 * stall * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def choose(stall: float, drain: float, seen: Failures) -> Chosen:
    """The interval for a run.

    Args:
        stall: seconds that the last checkpoint held training up.
        drain: seconds from its snapshot to its commit.
        seen: the run's failures.
    """
    mean = between_failures(seen)
    wanted = optimum(max(stall, 1e-4), mean)
    # Snapshots that come faster than they drain would be skipped.
    floor = max(SHORTEST, 1.25 * drain)
    seconds = min(max(wanted, floor), max(LONGEST, floor))
    bound = ""
    if seconds > wanted:
        bound = "drain" if floor > SHORTEST else "shortest"
    elif seconds < wanted:
        bound = "longest"
    return Chosen(seconds, mean, stall, bound)
