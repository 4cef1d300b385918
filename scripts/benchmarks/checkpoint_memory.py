"""``checkpoint.memory``: what the job and its helpers take beyond what they had before the first step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from checkpoint_results import Case, figure
from figures import Target, median, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from checkpoint_jobs import Trained
    from figures import Figure

_MIB = 2**20


def memory(jobs: Sequence[Trained]) -> Figure:
    """Pairs of saves right after each other; the largest peak counts."""
    cases = [case(each) for each in jobs]
    beside: dict[str, float | str | None] = {"DCP": "1 for each save in flight", "ml-flashpoint": 4.0}
    return figure(
        "checkpoint.memory", cases, Target("<=", 2.1), beside, ["nobody else may use shared memory meanwhile"]
    )


def case(job: Trained) -> Case:
    """The largest of the peaks of all pairs, over the bytes that the ranks own together."""
    owned = job.results.sum("owned")
    saves = [at for at, word in job.phases if word == "saves"]
    before = median([each.all for each in job.samples if not saves or each.time < saves[0]][-20:])
    if job.results.problem or not saves or not owned or before is None:
        return Case(job.subject.name, None, notes=(job.results.problem or "nothing was saved",))
    extra = [(each - before) / owned for each in _peaks(job, [*saves, float("inf")])]
    control = ratio(max(extra[1::2], default=None), max(extra[::2], default=None))
    most = max(extra, default=0.0) * owned
    note = f"before {before / _MIB:,.0f} MiB, then up to {most / _MIB:,.0f} MiB more; owned {owned / _MIB:,.0f} MiB"
    return Case(job.subject.name, max(extra, default=None), control, 2 * len(extra), (note,))


def _peaks(job: Trained, edges: Sequence[float]) -> list[int]:
    """The highest sample within each span of time that has any."""
    spans = ([each.all for each in job.samples if start <= each.time < end] for start, end in pairwise(edges))
    return [max(each) for each in spans if each]
