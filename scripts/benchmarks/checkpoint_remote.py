"""``checkpoint.slow_remote``: a remote behind a slow link, with ftrun's saves and with ``torch.save``."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from checkpoint_jobs import Plan, subjects, train
from checkpoint_results import Case, figure
from common import JOBS
from figures import Target, median, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from checkpoint_jobs import Trained
    from common import Settings
    from figures import Figure

RATE = 200e6
"""Bytes a second."""


def slow_remote(settings: Settings) -> Iterator[Figure]:
    """``torch.save``'s time over ftrun's stall; both go to the same place, in turns."""
    cases = []
    for subject in subjects(settings, "large"):
        environment = _driver().install(settings.folder("remote")) | {"SLOWFS_RATE": str(RATE)}
        root = ("--set", "checkpoint.root=slow://bench/run")
        plan = Plan(("slow",), settings.count(10, 3), root, environment)
        cases.append(case(train(settings, plan, subject)))
    beside = {"seeds, FSDP": 58.0, "seeds, DDP": 1.8}
    notes = [f"{RATE / 1e6:g} MB/s for all ranks together; forward and backward take four times the copy"]
    yield figure("checkpoint.slow_remote", cases, Target(">=", 100.0), beside, notes, largest=False)


def case(job: Trained) -> Case:
    """What one job gave. A commit that was faster than the link shows that the link was not used."""
    results = job.results
    stock, held = results.worst("torch.save"), results.worst("slow.held")
    seconds = results.spans("slow.released", "slow.committed")
    least = results.sum("owned") / RATE
    problem = results.problem
    if not problem and seconds and min(seconds) < 0.5 * least:
        problem = f"the root was not the slow remote: committed after {min(seconds):.2f} s, not {least:.2f} s"
    note = f"torch.save {spread(stock)}, held {spread(held)}, committed after {spread(seconds)}"
    control = ratio(median(stock[1::2]), median(stock[::2]))
    value = None if problem else ratio(median(stock), median(held))
    return Case(job.subject.name, value, control, len(held), (problem or note,))


def _driver() -> ModuleType:
    """The module of the driver, which lives with the jobs."""
    spec = importlib.util.spec_from_file_location("slowfs", JOBS / "slowfs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
