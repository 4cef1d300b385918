"""What supervising costs: CPU time of the launcher and its helpers while eight ranks train and nothing happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
from common import JOBS, say, started
from figures import Figure, Target, median, ratio
from peers import ftrun, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Job, Settings
    from peers import Launcher

RANKS = 8
DEADLINE = 240.0
_PARKED = ("parked", "standby")
"""Words in the command lines of processes that wait to become workers."""
_SCHEDULER = 2  # the clock of another process, as clock_getcpuclockid(3) makes it


def agent_cpu(settings: Settings) -> Iterator[Figure]:
    """``recovery.agent_cpu``: a share of one core, over windows of two seconds."""
    windows = settings.count(10, 3)
    ours, parked = _share(settings, ftrun(), windows)
    again, _ = _share(settings, ftrun(), windows)
    stock, _ = _share(settings, torchrun(), windows)
    value = median(ours)
    yield Figure(
        "recovery.agent_cpu",
        value,
        Target("<=", 0.01),
        control=ratio(median(again), value),
        n=len(ours),
        reference={"torchrun": median(stock)},
        notes=[
            f"mean over all windows: ftrun {_mean(ours):.2%}, torchrun {_mean(stock):.2%} of a core",
            f"parked standbys, not counted: {_mean(parked):.2%} of a core",
            "the control is the second run's share over the first's",
        ],
    )


def _share(settings: Settings, launcher: Launcher, windows: int) -> tuple[list[float], list[float]]:
    """Share of a core, of the launcher with its helpers and of parked processes, in each window."""
    folder = settings.folder("idle")
    command = [*launcher.command, "--nproc-per-node", str(RANKS), str(JOBS / "idle.py"), str(folder)]
    shares, parked = [], []
    with started(command, folder, ranks=RANKS, environment=launcher.environment) as job:
        if job.wait_for(job.stamps.whole_step, DEADLINE) is None:
            say(f"{launcher.name}: eight ranks did not start: {job.output.strip()[-200:]}")
            return [], []
        _settle(job)
        for _ in range(windows):
            before, began = _used(job), time.perf_counter()
            time.sleep(2.0)
            after, taken = _used(job), time.perf_counter() - began
            shares.append((after[0] - before[0]) / taken)
            parked.append((after[1] - before[1]) / taken)
    say(f"{launcher.name}: {_mean(shares):.2%} of a core")
    return shares, parked


def _settle(job: Job) -> None:
    """Wait until what the launcher prepares in the background is ready: a minute at most."""
    time.sleep(3.0)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        before = sum(_used(job))
        time.sleep(2.0)
        if sum(_used(job)) - before < 0.2:
            return


def _used(job: Job) -> tuple[float, float]:
    """Seconds of CPU so far: of the launcher with its helpers, and of parked processes. Workers are left out."""
    workers = {pid for pid in job.stamps.pids() if pid is not None}
    helpers, parked = _cpu(job.process.pid), 0.0
    for each in job.family():
        try:
            if each.pid in workers or any(parent.pid in workers for parent in each.parents()):
                continue
            line = " ".join(each.cmdline())
        except psutil.Error:
            continue
        if any(word in line for word in _PARKED):
            parked += _cpu(each.pid)
        else:
            helpers += _cpu(each.pid)
    return helpers, parked


def _cpu(pid: int) -> float:
    """CPU seconds of a process and all its threads, to the nanosecond; 0.0 once it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULER)
    except OSError:
        return 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
