"""Nodes join, leave, stand still and come back, and it is one training: the rows and losses of one that is left alone.

Each case prints for how many seconds the nodes stood still, from what happened to the start of their last new worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from namespaces import Net
from namespaces.diary import Diary, at_once
from namespaces.frozen import freeze, thaw
from namespaces.job import Job
from namespaces.skipping import NET
from namespaces.story import EXACT, Story, command, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, NET, pytest.mark.usefixtures("memory_forgotten")]


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
    with Net(3, slow=True) as net:
        # Packets that are lost must not pass for a node that is, nor may a launcher that this machine keeps waiting.
        train = command("1:3", EXACT, conf=",lost_timeout=30", sets=("watch.step=6s",))
        job = Job(net, train, tmp_path, environment(tmp_path))
        job.start(1, 2)
        story = Story(job, 1, 2)
        began = time.monotonic()
        job.start(3)
        story.comes_back("a third node joins", began, 1, 2, 3)
        net.weather(delay=0.02, loss=0.05)
        seen = len(story.world.steps("node3"))
        assert job.until(
            lambda: job.diary.worlds()[-1] is not story.world or len(story.world.steps("node3")) > seen + 10
        )
        assert job.diary.worlds()[-1] is story.world, "packets that take their time or are lost end no world"
        net.weather()
        first, second, third = story.members()
        began = time.monotonic()
        net.part([second], [third])  # the first reaches both
        story.goes_on("two nodes don't reach each other any more", began, first, second)
        assert f"node{third} can't reach node{second}" in job.launchers[first].text()
        began = time.monotonic()
        net.heal_all()
        story.comes_back("they do again", began, 1, 2, 3)
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
        commits = lambda: list(tmp_path.glob("runs/faults/checkpoints/ckpt/*/MANIFEST.json"))  # noqa: E731
        assert job.until(commits), "there is something to go on from"
        began = time.monotonic()
        frozen = freeze(net.node(1))
        story.goes_on("the host stands still, a spare takes its seat", began, 2, 3)
        before = attempts(tmp_path)
        thaw(job.launchers[1], frozen)
        thawed = time.monotonic()
        job.until(lambda: (time.monotonic() > thawed + 3.0 and attempts(tmp_path) - before) or None)
        # It may finish what all ranks had sealed; it begins nothing new, and what is new is newer than all it knows.
        new = attempts(tmp_path) - before
        assert new
        assert {each.partition("-")[0] for each in new} == {max(new).partition("-")[0]}
        assert min(new) > max(before)
        assert story.world is job.diary.worlds()[-1]
        job.finish()
        assert [job.launchers[number].wait() for number in (1, 2, 3)] == [0, 0, 0]
        alone.compare(job.diary)


def test_of_two_nodes_one_stands_still_for_twelve_seconds(tmp_path: Path, alone: Alone) -> None:
    every, wait = 10, 18
    with Net(2) as net:
        # The first world has both, however late one of them comes on a busy machine, and goes on as long as both do.
        train = command("1:2", EXACT, conf=",last_call_timeout=30,lost_timeout=5", sets=("checkpoint.peer_copies=1",))
        job = Job(net, train, tmp_path, environment(tmp_path, PACE="0.1", WAIT=str(wait)))
        job.start(1, 2)
        story = Story(job, 1, 2)
        first = story.world
        # Between two snapshots they wait, until the last one has reached the other node's memory.
        made = lambda: job.diary.worlds() and [each.step for each in first.steps()[-2:]]  # noqa: E731
        assert job.until(lambda: made() == [wait - 1] * 2), job.told()
        assert job.until(lambda: is_copied(net, every)), job.told()
        frozen = freeze(net.node(1))
        began = time.monotonic()
        (tmp_path / "go").touch()
        story.goes_on("the host of two stands still", began, 2)
        assert first.steps()[-1].step == wait - 1
        second = story.world
        assert second.steps()[0].step == every + 1, "no more is lost than was made since a snapshot"
        job.until(lambda: time.monotonic() > began + 12.0 or None)
        before = attempts(tmp_path)
        thawed = time.monotonic()
        thaw(job.launchers[1], frozen)
        story.comes_back("it goes on", thawed, 2, 1)
        job.finish()
        assert [job.launchers[number].wait() for number in (1, 2)] == [0, 0]
        worlds = job.diary.worlds()
        assert worlds == [first, second, story.world]
        assert at_once(worlds) == 1
        assert first.steps()[-1].at < second.steps()[0].at < thawed
        # The nodes meet at a step's end: none is made twice. What is begun from then on is of a later epoch.
        assert story.world.steps()[0].step == second.steps()[-1].step + 1
        assert min(attempts(tmp_path) - before) > "e00000002"
        alone.compare(job.diary)


def is_copied(net: Net, step: int) -> bool:
    """Whether node 2 has a copy of a step's snapshot."""
    memory = Path(f"/proc/{net.node(2).holder}/root/dev/shm")
    found = [each.read_text(errors="replace") for each in memory.glob("ftrun-*/*-copies/r*/*.seal")]
    return any(f"s{step:010d}" in each for each in found)


def attempts(folder: Path) -> set[str]:
    """Names of the attempts at checkpoints, which begin with the epoch."""
    return {path.name for path in folder.glob("runs/faults/checkpoints/ckpt/*")}
