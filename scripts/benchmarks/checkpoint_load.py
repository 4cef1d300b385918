"""``checkpoint.load``: from opening a Session until everything tracked has its state back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from checkpoint_jobs import RANKS, load
from checkpoint_peers import reference
from checkpoint_results import Case, figure, over, read_results
from common import say
from figures import Target, median, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from checkpoint_jobs import Trained
    from checkpoint_peers import Peer
    from common import Settings
    from figures import Figure

_FRESH = 3
"""Fresh runs in which a Session is opened that has nothing to load."""


def loads(settings: Settings, jobs: Sequence[Trained], fresh: Sequence[Trained], peers: Sequence[Peer]) -> Figure:
    """Processes start anew for each measurement, as they do after a fault.

    Args:
        settings: how to measure.
        jobs: what they wrote is read into a state that is there, as the peers read it. This decides.
        fresh: what they wrote is read into a model whose optimizer has none yet.
        peers: what they did.
    """
    cases = [case(_loaded(settings, each, "--stepped")) for each in jobs]
    new = [_loaded(settings, each) for each in fresh]
    beside = {f"{each.subject.name}, a new optimizer": case(each).value for each in new}
    beside |= {f"{each.subject.name}, a new optimizer, ÷ half-fresh read": over_half_fresh(each) for each in new}
    beside |= reference(peers, lambda each: each.load, only=("torch.save", "dcp.save"))
    notes = [
        *(f"{each.subject.name}, a new optimizer: {note}" for each in new for note in case(each).notes),
        "what opening a Session costs in a fresh run is taken off",
        "the optimizers have made a step before, as the peers' have; a new one has no memory for its state yet",
        "plain read: readinto a warm buffer of all bytes that the rank needs, all ranks at once, page cache warm",
        "half-fresh read: the same into memory half of which is new to the process, as a new optimizer's state is",
    ]
    return figure("checkpoint.load", cases, Target("<=", 1.5), beside, notes)


def _loaded(settings: Settings, job: Trained, *options: str) -> Trained:
    """The job with what is written when others open its run."""
    problem = job.results.problem
    for cycle in range(settings.count(10, 2)):
        for name in ("bench", f"fresh{cycle}") if cycle < _FRESH else ("bench",):
            problem = problem or load(job, cycle, name, *options)
    say(f"{job.subject.name}: loading {' '.join(options)}: {problem or 'done'}")
    return replace(job, results=read_results(job.folder, RANKS, problem))


def case(job: Trained) -> Case:
    """What several starts gave."""
    results = job.results
    loaded, fresh, read = (results.worst(name) for name in ("loaded", "fresh", "read"))
    opening = median(fresh)
    if results.problem or opening is None:
        return Case(job.subject.name, None, notes=(results.problem or "nothing was loaded",))
    seconds = [max(0.0, each - opening) for each in loaded]
    note = f"to ready {spread(loaded)}, in a fresh run {spread(fresh)}, plain read {spread(read)}"
    notes = [note]
    if half_fresh := results.worst("fresh read"):
        notes.append(f"half-fresh read {spread(half_fresh)}, again {spread(results.worst('fresh read again'))}")
    control = over(results, "read again", "read")
    return Case(job.subject.name, ratio(median(seconds), median(read)), control, len(seconds), tuple(notes))


def over_half_fresh(job: Trained) -> float | None:
    """What :func:`case` gives, over a read into memory of which half is fresh."""
    made, results = case(job), job.results
    base = ratio(median(results.worst("fresh read")), median(results.worst("read")))
    return ratio(made.value, base)
