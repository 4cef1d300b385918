"""``nodes.many``: 128 agents, forked from one process, of which one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from common import PROJECT, say
from figures import Figure, Target, median, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings

AGENTS = 128
_SECONDS = 300.0
_PROGRAM = PROJECT / "tests" / "namespaces" / "many.py"


def many(settings: Settings) -> Iterator[Figure]:
    """``nodes.many``: from the kill of a member to the return of the last survivor from the rendezvous."""
    ours, problem = _run(settings.count(5, 2))
    again, _ = _run(settings.count(3, 1))
    host, host_problem = _run(settings.count(3, 1), "--host")
    members, control, hosts = _seconds(ours), _seconds(again), _seconds(host)
    up = next((each["up"] for each in ours if "up" in each), None)
    cores = next((each["steady cores"] for each in ours if "steady cores" in each), None)
    notes = [f"{AGENTS} agents, a member killed: {spread(members)}{problem}"]
    notes += [f"the host killed: {spread(hosts)}{host_problem}"]
    notes += [f"all together {up:.1f} s after the first fork, {cores:.2f} cores while steady"] if up and cores else []
    notes += ["torchrun is not measured: on two cores 64 of its agents don't come together"]
    say(notes[0])
    yield Figure(
        "nodes.many",
        median(members),
        Target("<=", 4.0),
        control=ratio(median(control), median(members)),
        n=len(members),
        reference={"host killed (s)": median(hosts)},
        notes=notes,
    )


def _run(rounds: int, *more: str) -> tuple[list[dict[str, Any]], str]:
    """What the program prints, and what went wrong."""
    command = [sys.executable, str(_PROGRAM), str(AGENTS), "--rounds", str(rounds), *more]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"; no end within {_SECONDS:g} s"
    lines = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    last = (done.stderr.strip().splitlines() or ["nothing"])[-1][:200]
    return lines, f"; exit code {done.returncode}: {last}" if done.returncode else ""


def _seconds(lines: list[dict[str, Any]]) -> list[float]:
    return [float(each["last"]) for each in lines if each.get("last") is not None]
