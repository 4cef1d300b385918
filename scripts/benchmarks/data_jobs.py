"""Running the data benchmarks' scripts to their end, and what they wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import data_peers
from checkpoint_jobs import why
from checkpoint_results import Results, read_results
from common import JOBS, say, started
from peers import Absent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common import Settings

DEADLINE = 240.0


def run_ours(
    settings: Settings, script: str, *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> Results:
    """Run a script of ``jobs/`` with the project's interpreter."""
    return run(settings, [data_peers.ours(), JOBS / script], *arguments, environment=environment)


def run_peers(settings: Settings, script: str, *arguments: str | Path) -> Results:
    """Run it with the peers' one; where that isn't to be had, the results say why."""
    python = data_peers.python()
    if isinstance(python, Absent):
        return Results(problem=python.why)
    return run(settings, [python, JOBS / script], *arguments)


def run(
    settings: Settings,
    command: Sequence[str | Path],
    *arguments: str | Path,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Results:
    """Run a command in a new directory, which it gets as ``--out``."""
    folder = settings.folder("data")
    began = time.monotonic()
    words = [str(each) for each in (*command, "--out", folder, *arguments)]
    with started(words, folder, ranks=ranks, environment=environment) as job:
        code = job.wait(DEADLINE)
        problem = "" if code == 0 else why(job.output, code)
        if code is None:
            job.process.terminate()  # asked first, so that it can tidy up
            job.wait(2.0)
    script = Path(words[words.index("--out") - 1]).name
    say(f"{script}: {problem or f'{time.monotonic() - began:.0f} s'}")
    return read_results(folder, ranks, problem)


def pairs(results: Results, above: str, below: str) -> list[float]:
    """The quotients of two series, cycle by cycle: what slowed the machine slowed both."""
    one, other = results.all(above), results.all(below)
    return [one[cycle][0] / other[cycle][0] for cycle in sorted(one.keys() & other.keys())]


def every(results: Results, name: str) -> list[float]:
    """All values of one name that the first rank wrote, cycle by cycle."""
    return [each for values in results.all(name).values() for each in values]
