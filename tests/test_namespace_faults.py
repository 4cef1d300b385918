"""What happens to nodes, and what their launchers make of it: training goes on, once, where it was.

The workers of most cases are silent: nothing but their launchers ends them. Each case prints for how many seconds the
others stood still, from the fault to the start of their last new worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import NO_COMPILER, SCRIPTS, forget_memory
from namespaces import Net, why_not
from namespaces.diary import Diary, overlap
from namespaces.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namespaces import Node, Process
    from namespaces.diary import World

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

JOBS = Path(__file__).parents[1] / "scripts" / "benchmarks" / "jobs"
SILENT = JOBS / "nodes_worker.py"
EXACT = SCRIPTS / "whole_numbers.py"
FTRUN = Path(sys.executable).with_name("ftrun")
SLACK = 5.0
"""Seconds by which a side that is cut off may stop too late on a busy machine, with workers that nobody can hear."""


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path) -> Iterator[None]:
    yield
    forget_memory(tmp_path)


def command(
    nodes: str, script: Path, *arguments: str | Path, run_id: str = "faults", conf: str = ""
) -> list[str | Path]:
    sets = ("standby.enabled=false", "checkpoint.every=10 steps", "health.nodes.exclude=false")
    options = ("--name", "faults", *(word for each in sets for word in ("--set", each)))
    meet = ("--nnodes", nodes, "--nproc", "1", "--rdzv-endpoint", "node1:29400", "--rdzv-id", run_id)
    return [FTRUN, *options, *meet, "--rdzv-conf", f"last_call_timeout=2{conf}", script, *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{JOBS}{os.pathsep}{NO_COMPILER}", "OUT": str(folder), **more}


class Story:
    """A job to which one thing after the other happens."""

    def __init__(self, job: Job, *nodes: int) -> None:
        self.job = job
        self.world = self.met(job.whole(*nodes))

    def met(self, world: World | None) -> World:
        if world is None or self.job.trains(world) is None:
            print(self.job.told())
            pytest.fail("no such world came about in time")
        self.world = world
        return world

    def members(self) -> list[int]:
        return self.world.numbers

    def goes_on(self, what: str, since: float, *nodes: int) -> None:
        """The nodes are in a new world after a fault; the old one trains no more."""
        self.met(self.job.whole(*nodes, after=since))
        print(f"{what}: stood still for {self.world.started - since:.2f} s")
        self.alone(since)

    def alone(self, since: float, until: float = float("inf")) -> None:
        worlds = self.job.diary.worlds()
        assert overlap(worlds, since=since, until=until) < SLACK, self.job.told()

    def comes_back(self, what: str, since: float, *nodes: int) -> None:
        """The nodes are in a larger world."""
        self.met(self.job.whole(*nodes, after=since))
        print(f"{what}: in a world of {len(nodes)} after {self.world.started - since:.2f} s")


def test_a_member_is_lost_in_every_way(tmp_path: Path) -> None:
    with Net(5) as net:
        job = Job(net, command("2:4", SILENT, "--out", tmp_path), tmp_path, environment(tmp_path))
        job.start(1, 2, 3, 4)
        story = Story(job, 1, 2, 3, 4)

        # Another job at the same endpoint is sent away by name.
        other = Job(net, command("2:4", SILENT, "--out", tmp_path, run_id="other"), tmp_path, environment(tmp_path))
        other.start(5, more=["--run-dir", str(tmp_path / "other")])

        began = time.monotonic()
        job.launchers[4].kill()
        story.goes_on("a launcher is killed", began, 1, 2, 3)
        began = time.monotonic()
        job.start(4)
        story.comes_back("a launcher is started again", began, 1, 2, 3, 4)

        began = time.monotonic()
        net.node(3).power_off()
        story.goes_on("a node loses its power", began, 1, 2, 4)
        assert other.launchers[5].wait() == 2
        assert "faults" in other.launchers[5].text()
        assert "other" in other.launchers[5].text()

        began = time.monotonic()
        net.cut(4)
        story.goes_on("a node is cut off", began, 1, 2)
        began = time.monotonic()
        net.heal(4)
        story.comes_back("the cut heals", began, 1, 2, 4)

        began = time.monotonic()
        net.cut_one_way(4, 1)
        story.goes_on("what a node sends to the host is lost", began, 1, 2)
        began = time.monotonic()
        net.heal_all()
        story.comes_back("it arrives again", began, 1, 2, 4)

        began = time.monotonic()
        frozen = freeze(net.node(2))
        story.goes_on("a whole node stands still", began, 1, 4)
        began = time.monotonic()
        thaw(job.launchers[2], frozen)
        story.comes_back("it goes on", began, 1, 2, 4)

        job.finish()
        assert [job.launchers[number].wait() for number in (1, 2, 4)] == [0, 0, 0]


def processes(node: Node) -> list[int]:
    """All that runs on a node, without its first process."""
    space = os.readlink(f"/proc/{node.holder}/ns/pid")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / "pid") == space and int(entry.name) != node.holder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def freeze(node: Node) -> list[int]:
    """Have everything there stand still. Returns what does."""
    frozen: list[int] = []
    while new := [pid for pid in processes(node) if pid not in frozen]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGSTOP)
        frozen += new
    return frozen


def thaw(launcher: Process, frozen: list[int]) -> None:
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):  # one that ended as it was stopped
            os.kill(pid, signal.SIGCONT)
    launcher.resume()  # what stands between it and this process has stopped, too


def test_two_and_two_are_cut_apart_and_are_four_again(tmp_path: Path) -> None:
    with Net(4) as net:
        job = Job(net, command("2:4", SILENT, "--out", tmp_path), tmp_path, environment(tmp_path))
        job.start(1, 2, 3, 4)
        story = Story(job, 1, 2, 3, 4)
        began = time.monotonic()
        net.part([1, 2], [3, 4])
        story.goes_on("two and two are cut apart", began, 1, 2)
        time.sleep(3.0)  # nothing is what should happen on the other side
        began = time.monotonic()
        late = {line.node for world in job.diary.worlds() for line in world.steps() if line.at > began - 1.0}
        assert late == {"node1", "node2"}
        net.heal_all()
        story.comes_back("the cut heals", began, 1, 2, 3, 4)
        job.finish()
        assert [job.launchers[number].wait() for number in (1, 2, 3, 4)] == [0, 0, 0, 0]


def test_the_store_goes_from_host_to_host(tmp_path: Path) -> None:
    with Net(5) as net:
        job = Job(net, command("1:5", SILENT, "--out", tmp_path), tmp_path, environment(tmp_path))
        job.start(1, 2, 3, 4, 5)
        story = Story(job, 1, 2, 3, 4, 5)
        a, b, c, d, e = story.members()
        assert a == 1  # the endpoint's
        began = time.monotonic()
        net.node(a).power_off()
        story.goes_on("the store's host is lost", began, b, c, d, e)
        began = time.monotonic()
        net.node(b).power_off()
        story.goes_on("the next host is lost, too", began, c, d, e)
        began = time.monotonic()
        for number in (a, b):
            net.node(number).power_on()
        job.start(a, b)
        story.comes_back("both come back, and know the first endpoint only", began, a, b, c, d, e)
        first, second, *others = story.members()
        began = time.monotonic()
        net.node(first).power_off()
        net.node(second).power_off()
        story.goes_on("the host and the next one are lost at once", began, *others)
        job.finish()
        assert [job.launchers[number].wait() for number in others] == [0, 0, 0]


class Alone:
    """The same training that nothing happens to."""

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir()
        self._diary = Diary(folder / "diary.jsonl")
        env = {**os.environ, **environment(folder, TOTAL=str(steps), PACE="0")}
        self._process = subprocess.Popen([sys.executable, EXACT], cwd=folder, env=env, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def compare(self, diary: Diary) -> None:
        """Each step of each world: the same rows, shared by its ranks, and the same loss."""
        assert self._process.wait(60) == 0
        (alone,) = self._diary.worlds()
        expected = {line.step: line.more for line in alone.steps()}
        for world in diary.worlds():
            rows: dict[int, list[int]] = {}
            for line in world.steps():
                assert line.more["loss"] == expected[line.step]["loss"], (world.name, line)
                rows.setdefault(line.step, []).extend(line.more["rows"])
            for step, found in rows.items():
                if step < max(rows):  # the last one may have been made by some ranks only
                    assert sorted(found) == sorted(expected[step]["rows"]), (world.name, step)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path / "alone", 3000)
    yield made
    made.close()


def test_two_three_one_two_nodes_are_one_training(tmp_path: Path, alone: Alone) -> None:
    with Net(3) as net:
        job = Job(net, command("1:3", EXACT), tmp_path, environment(tmp_path))
        job.start(1, 2)
        story = Story(job, 1, 2)
        began = time.monotonic()
        job.start(3)
        story.comes_back("a third node joins", began, 1, 2, 3)
        began = time.monotonic()
        for number in (2, 3):
            job.launchers[number].kill(signal.SIGTERM)
        story.goes_on("two nodes leave", began, 1)
        assert {job.launchers[number].wait() for number in (2, 3)} <= {0, 75, 128 + signal.SIGTERM}
        began = time.monotonic()
        job.start(2)
        story.comes_back("one comes back", began, 1, 2)
        job.finish()
        assert [job.launchers[number].wait() for number in (1, 2)] == [0, 0]
        alone.compare(job.diary)
        firsts = [world.steps()[0].step for world in job.diary.worlds() if world.steps()]
        assert firsts[0] == 1 < min(firsts[1:])


def test_a_node_that_comes_back_from_the_dead_disturbs_nobody(tmp_path: Path, alone: Alone) -> None:
    # The one that hosts the store and leads the commits; so of two nodes the other has to go on without a majority.
    with Net(3) as net:
        job = Job(net, command("2:2", EXACT, conf=",quorum=0"), tmp_path, environment(tmp_path))
        job.start(1, 2)
        story = Story(job, 1, 2)
        job.start(3)
        job.until(lambda: "is a spare" in job.launchers[3].text())
        assert list(tmp_path.glob("runs/faults/checkpoints/ckpt/*/MANIFEST.json"))
        began = time.monotonic()
        frozen = freeze(net.node(1))
        story.goes_on("the host stands still, a spare takes its seat", began, 2, 3)
        before = attempts(tmp_path)
        thaw(job.launchers[1], frozen)
        thawed = time.monotonic()
        job.until(lambda: time.monotonic() > thawed + 3.0 or None)
        # It may finish what all ranks had sealed; it begins nothing new, and what is new is newer than all it knows.
        new = attempts(tmp_path) - before
        assert new
        assert {each.partition("-")[0] for each in new} == {max(new).partition("-")[0]}
        assert min(new) > max(before)
        assert story.world is job.diary.worlds()[-1]
        job.finish()
        assert [job.launchers[number].wait() for number in (1, 2, 3)] == [0, 0, 0]
        alone.compare(job.diary)


def attempts(folder: Path) -> set[str]:
    """Names of the attempts at checkpoints, which begin with the epoch."""
    return {path.name for path in folder.glob("runs/faults/checkpoints/ckpt/*")}
