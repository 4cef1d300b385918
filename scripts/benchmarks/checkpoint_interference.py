"""``checkpoint.interference``: how fast steps are while a checkpoint is drained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoint_results import Case, figure, paired
from figures import Target, median, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from checkpoint_jobs import Trained
    from figures import Figure


def interference(jobs: Sequence[Trained]) -> Figure:
    """Speed while draining over speed while nothing happens: all cores compute, in lock step."""
    beside = {"published by a peer": 315 / 372}
    return figure("checkpoint.interference", [case(each) for each in jobs], Target(">=", 0.9), beside, largest=False)


def case(job: Trained) -> Case:
    """Median over the saves, each with the idle steps right before it."""
    results = job.results
    idle, again, draining = (results.all(name) for name in ("idle", "idle again", "draining"))
    speeds, control = paired(idle, draining), paired(idle, again)
    note = f"idle steps {spread(_all(idle))}, while draining {spread(_all(draining))}"
    value = None if results.problem else median(speeds)
    return Case(job.subject.name, value, median(control), len(speeds), (results.problem or note,))


def _all(steps: dict[int, list[float]]) -> list[float]:
    return [each for cycle in steps.values() for each in cycle]
