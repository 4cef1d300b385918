"""Starting from cold: the first step, and the help."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from common import VENV, say, started
from figures import Figure, Target, median, ratio, spread
from peers import ftrun, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings
    from peers import Launcher

RANKS = 2
DEADLINE = 120.0


def cold_start(settings: Settings) -> Iterator[Figure]:
    """``recovery.cold_start``: the same plain script under both, in turns."""
    runners = {"ftrun": ftrun(), "torchrun": torchrun(), "torchrun again": torchrun()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(settings.count(10, 3)):
        for name, launcher in runners.items():
            taken = _to_first_step(settings, launcher)
            seconds[name] += [taken] if taken is not None else []
    medians = {name: median(values) for name, values in seconds.items()}
    yield Figure(
        "recovery.cold_start",
        ratio(medians["ftrun"], medians["torchrun"]),
        Target("<=", 0.85),
        control=ratio(medians["torchrun again"], medians["torchrun"]),
        n=len(seconds["ftrun"]),
        reference={f"{name} (s)": value for name, value in medians.items()},
        notes=[f"{name}: {spread(values)}" for name, values in seconds.items()],
    )


def _to_first_step(settings: Settings, launcher: Launcher) -> float | None:
    folder = settings.folder("cold")
    command = launcher.run(RANKS, "with_torch_save.py", "--out", str(folder))
    with started(command, folder, ranks=RANKS, environment=launcher.environment) as job:
        done = job.wait_for(job.stamps.whole_step, DEADLINE)
        if done is None:
            say(f"{launcher.name}: no step; its last word: {job.output.strip()[-200:]}")
        return None if done is None else done - job.began


def help_(settings: Settings) -> Iterator[Figure]:
    """``recovery.help``: the whole process of ``--help``."""
    commands = {"ftrun": "ftrun", "torchrun": "torchrun", "torchrun again": "torchrun"}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(settings.count(10, 3) + 1):
        for name, program in commands.items():
            began = time.perf_counter()
            subprocess.run([VENV / program, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
            if turn:  # the first one fills the disk cache
                seconds[name].append(time.perf_counter() - began)
    medians = {name: median(values) for name, values in seconds.items()}
    yield Figure(
        "recovery.help",
        ratio(medians["ftrun"], medians["torchrun"]),
        Target("<=", 0.25),
        control=ratio(medians["torchrun again"], medians["torchrun"]),
        n=len(seconds["ftrun"]),
        reference={f"{name} (s)": value for name, value in medians.items()},
        notes=[f"{name}: {spread(values)}" for name, values in seconds.items()],
    )
