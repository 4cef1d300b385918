"""What happens to nodes, and what their launchers make of it: training goes on, once, where it was.

The workers are silent: nothing but their launchers ends them. Each case prints for how many seconds the others stood
still, from the fault to the start of their last new worker.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from namespaces import Net
from namespaces.frozen import freeze, thaw
from namespaces.job import Job
from namespaces.skipping import NET
from namespaces.story import SILENT, Story, command, environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, NET, pytest.mark.usefixtures("memory_forgotten")]


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
        net.cut_one_way(1, 4)
        story.goes_on("what the host sends to a node is lost", began, 1, 2)
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


def test_two_and_two_are_cut_apart_and_are_four_again(tmp_path: Path) -> None:
    with Net(4) as net:
        job = Job(net, command("2:4", SILENT, "--out", tmp_path), tmp_path, environment(tmp_path))
        job.start(1, 2, 3, 4)
        story = Story(job, 1, 2, 3, 4)
        before = {number: len(each.text()) for number, each in job.launchers.items()}
        began = time.monotonic()
        net.part([1, 2], [3, 4])
        # The half that claims the round first: the host's, unless this machine is busy.
        halves = ((1, 2), (3, 4))
        job.until(lambda: any(job.diary.whole(after=began, nodes=half) for half in halves) or None)
        half = next((half for half in halves if job.diary.whole(after=began, nodes=half)), halves[0])
        story.goes_on("two and two are cut apart", began, *half)
        # The other side has stopped, and nothing is what should happen there from then on.
        others = {1, 2, 3, 4} - set(half)
        stopped = lambda number: "the workers here are ended" in job.launchers[number].text()[before[number] :]  # noqa: E731
        assert job.until(lambda: all(map(stopped, others))), job.told()
        quiet = time.monotonic()

        def trained() -> set[str]:
            return {line.node for world in job.diary.worlds() for line in world.steps() if line.at > quiet}

        job.until(lambda: time.monotonic() > quiet + 3.0 or None)
        at_work = {f"node{number}" for number in half}
        assert job.until(lambda: at_work <= trained()), job.told()
        assert trained() == at_work
        began = time.monotonic()
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
