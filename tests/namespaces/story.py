"""A job of ftrun on the nodes of a net, to which one thing after the other happens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from namespaces.diary import overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namespaces.diary import World
    from namespaces.job import Job

_TESTS = Path(__file__).parents[1]
_JOBS = _TESTS.parent / "scripts" / "benchmarks" / "jobs"
SILENT = _JOBS / "nodes_worker.py"
EXACT = _TESTS / "scripts" / "whole_numbers.py"
_FTRUN = Path(sys.executable).with_name("ftrun")
SLACK = 5.0
"""Seconds by which a side that is cut off may stop too late on a busy machine, with workers that nobody can hear."""


def command(
    nodes: str, script: Path, *arguments: str | Path, run_id: str = "faults", conf: str = "", sets: Sequence[str] = ()
) -> list[str | Path]:
    """The launcher's command line, the same on all nodes.

    Args:
        nodes: how many, as ``--nnodes`` takes it.
        script: what it trains.
        arguments: the script's.
        run_id: of the rendezvous.
        conf: more for ``--rdzv-conf``, each with a comma before it.
        sets: more for ``--set``.
    """
    sets = ("standby.enabled=false", "checkpoint.every=10 steps", "health.nodes.exclude=false", *sets)
    options = ("--name", "faults", *(word for each in sets for word in ("--set", each)))
    meet = ("--nnodes", nodes, "--nproc", "1", "--rdzv-endpoint", "node1:29400", "--rdzv-id", run_id)
    return [_FTRUN, *options, *meet, "--rdzv-conf", f"last_call_timeout=2{conf}", script, *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What the scripts' workers want to know."""
    return {"PYTHONPATH": f"{_JOBS}{os.pathsep}{_TESTS / 'no_compiler'}", "OUT": str(folder), **more}


class Story:
    """A job to which one thing after the other happens.

    Args:
        job: its launchers have been started.
        nodes: who is in its first world.

    Attributes:
        job: the job.
        world: its latest world.
    """

    def __init__(self, job: Job, *nodes: int) -> None:
        self.job = job
        self.world = self.met(job.whole(*nodes))

    def met(self, world: World | None) -> World:
        """This is a whole world, and it trains."""
        if world is None or self.job.trains(world) is None:
            print(self.job.told())
            pytest.fail("no such world came about in time")
        self.world = world
        return world

    def members(self) -> list[int]:
        """The nodes of the latest world."""
        return self.world.numbers

    def goes_on(self, what: str, since: float, *nodes: int) -> None:
        """The nodes are in a new world after a fault; the old one trains no more."""
        self.met(self.job.whole(*nodes, after=since))
        print(f"{what}: stood still for {self.world.started - since:.2f} s")
        self.alone(since)

    def alone(self, since: float, until: float = float("inf")) -> None:
        """At most one world trains at a time."""
        worlds = self.job.diary.worlds()
        assert overlap(worlds, since=since, until=until) < SLACK, self.job.told()

    def comes_back(self, what: str, since: float, *nodes: int) -> None:
        """The nodes are in a larger world."""
        self.met(self.job.whole(*nodes, after=since))
        print(f"{what}: in a world of {len(nodes)} after {self.world.started - since:.2f} s")
