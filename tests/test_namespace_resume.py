"""Real launchers on two nodes, whose snapshots lie half in one memory and half in the other.

The first node's keeper stands still, so that the newest snapshot lies in memory only when a rank is killed, and the
second node can't bring its part of a later one to the root at all: only its copy, on the first node, is left of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import NO_COMPILER, SCRIPTS
from namespaces import Net
from namespaces.frozen import processes
from namespaces.job import Job
from namespaces.skipping import NET

from ftrun import events
from ftrun.checkpoint.keeper.faults import VARIABLE
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namespaces import Node

pytestmark = [pytest.mark.slow, NET]

FTRUN = Path(sys.executable).with_name("ftrun")
TOTAL = 42


class Story:
    """What happens to one run."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def events(self) -> Iterator[events.Event]:
        for path in sorted((RunDir(self.job.folder / "runs" / "split").events().parent).glob("*.jsonl")):
            for record in events.read(path):
                yield record.event

    def steps(self, kind: type[events.Saved | events.Committed]) -> set[int]:
        return {each.step for each in self.events() if isinstance(each, kind)}

    def until(self, kind: type[events.Saved | events.Committed], step: int) -> None:
        assert self.job.until(lambda: step in self.steps(kind), 60), f"no {kind.__name__} {step}\n{self.job.told()}"

    def attempts(self) -> list[events.AttemptStarted]:
        found = {each.epoch: each for each in self.events() if isinstance(each, events.AttemptStarted)}
        return [found[epoch] for epoch in sorted(found)]

    def restored(self, step: int) -> list[events.Restored]:
        return [each for each in self.events() if isinstance(each, events.Restored) and each.step == step]

    def go(self, step: int) -> None:
        (self.job.folder / f"go-{step}").touch()


def test_what_lies_in_two_memories_survives_a_rank_and_its_copy_a_node(tmp_path: Path) -> None:
    sets = (
        "standby.enabled=false",
        "checkpoint.every=10 steps",
        "checkpoint.peer_copies=1",
        "health.nodes.exclude=false",
        "faults=[{at_step: 22, rank: 1, do: kill}]",
    )
    options = ("--name", "split", *(word for each in sets for word in ("--set", each)))
    # No launcher passes for lost because this machine keeps it waiting for some seconds.
    patient = ("--rdzv-conf", "last_call_timeout=30,lost_timeout=5")
    meet = ("--nnodes", "1:2", "--nproc", "1", "--rdzv-endpoint", "node1:29400", *patient)
    command = [FTRUN, *options, *meet, "--rdzv-id", "split", SCRIPTS / "two_memories.py"]
    environment = {
        "PYTHONPATH": str(NO_COMPILER),
        "GLOO_SOCKET_IFNAME": "eth0",
        "WAITS": "15,22,31,41",
        "TOTAL": str(TOTAL),
    }
    with Net(2) as net:
        story = Story(Job(net, command, tmp_path, environment))
        story.job.start(1)
        environment[VARIABLE] = "root.file@7:hang"  # of the fourth save
        Job(net, command, tmp_path, environment).start(2)
        story.until(events.Committed, 10)
        (keeper,) = keepers(net.node(1))
        os.kill(keeper, signal.SIGSTOP)
        story.go(15)
        story.until(events.Saved, 20)
        story.go(22)  # where a rank is killed
        failed = lambda: any(isinstance(each, events.Failed) for each in story.events())  # noqa: E731
        assert story.job.until(failed), story.job.told()
        assert 20 not in story.steps(events.Committed)
        os.kill(keeper, signal.SIGCONT)  # the next attempt waits for it
        story.until(events.Saved, 30)
        assert [(each.resume_step, each.world_size) for each in story.attempts()] == [(0, 2), (20, 2)]
        # Each node reads its own part from its memory; whether the copies were there in time is nobody's promise.
        assert ["memory" in each.read for each in story.restored(20)] == [True] * 2
        story.until(events.Committed, 30)
        story.go(31)
        story.until(events.Saved, 40)
        assert story.job.until(lambda: "s0000000040" in copies_on(net, 1), 60), story.job.told()
        assert 40 not in story.steps(events.Committed)
        began = time.monotonic()
        net.node(2).power_off()
        assert story.job.until(lambda: len(story.attempts()) == 3, 60), story.job.told()
        print(f"a node is lost, and resumed from its copy: stood still for {time.monotonic() - began:.2f} s")
        last = story.attempts()[-1]
        assert (last.resume_step, last.world_size) == (40, 1), story.job.told()
        assert story.job.until(lambda: story.restored(40), 60), story.job.told()
        assert [set(each.read) for each in story.restored(40)] == [{"memory", "peer"}]
        story.go(41)
        assert story.job.launchers[1].wait(60) == 0, story.job.told()
        told = story.job.launchers[1].text()
    assert "is passed over" not in told
    assert "is not committed yet" not in told
    assert {10, 20, 30, 40, TOTAL} <= story.steps(events.Committed)
    assert_exact(tmp_path / "steps.jsonl")


def keepers(node: Node) -> list[int]:
    """Those that run on a node."""
    found = []
    for pid in processes(node):
        with contextlib.suppress(OSError):  # it has just ended
            if b"ftrun.checkpoint.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def copies_on(net: Net, number: int) -> str:
    """The seals of what a node has a copy of."""
    return net.node(number).run("sh", "-c", "cat /dev/shm/ftrun-*/*-copies/r*/*.seal 2>/dev/null; true")


def assert_exact(path: Path) -> None:
    """Every step was computed from the one before, whatever happened in between."""
    values = {0: 0.0}
    for step in range(1, TOTAL + 1):
        values[step] = values[step - 1] - 0.5 * (1.0 + (step - 1) % 7)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line for line in lines if line["value"] != [values[line["step"]]] * 2] == []
    assert lines[-1]["step"] == TOTAL
