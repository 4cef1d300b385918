"""The keeper takes little of the cores while training needs them, and all that it can get while nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from ftrun.checkpoint.keeper.courtesy import SHARE, Courtesy, Look, look, pause, to_give

if TYPE_CHECKING:
    from collections.abc import Iterator

BEFORE = Look(now=100.0, own=7.0, idle=40.0)


@pytest.mark.parametrize(
    ("own", "idle", "cores", "expected"),
    [
        (0.012, 0.0, 2, 0.15),  # of 0.2 s, in which 6 % of one core may be taken, 0.05 s are over
        (0.012, 0.02, 2, 0.15),
        (0.05, 0.0, 2, 0.25),  # never for longer
        (0.012, 0.05, 2, 0.0),  # others use less than half of the rest
        (0.09, 0.0, 2, 0.0),  # hardly anybody but itself
        (0.002, 0.0, 2, 0.0),  # less than the share
        (0.05, 0.0, 96, 0.0),  # there are enough cores
        (0.0, 0.0, 2, 0.0),
    ],
)
def test_the_pause_makes_up_for_what_was_taken(own: float, idle: float, cores: int, expected: float) -> None:
    after = Look(BEFORE.now + 0.05, BEFORE.own + own, BEFORE.idle + idle)
    assert pause(BEFORE, after, cores) == pytest.approx(expected)


def test_on_the_whole_no_more_than_the_share_is_taken() -> None:
    now, own, cores, paused = 0.0, 0.0, 2, 0.0
    before = Look(now, own, 0.0)
    for _ in range(200):  # works for 50 ms, a fifth of it on a core, and stays away as long as it is told
        now, own = now + 0.05, own + 0.009
        after = Look(now, own, 0.0)
        paused = pause(before, after, cores, paused)
        now += paused
        before = after
    assert own / (cores * now) == pytest.approx(SHARE, rel=0.1)


@pytest.mark.parametrize(
    ("elapsed", "given", "left"),
    [
        (0.0, 0.0, 3.0),  # some seconds, however little there is to do
        (3.5, 3.0, 0.0),
        (10.0, 0.0, 20.0),
        (10.0, 6.0, 2.0),
        (30.0, 20.0, 0.0),  # three times the ten seconds that it took
        (1.0, 1.2, 1.8),  # the last pause isn't over
    ],
)
def test_what_it_costs_is_bounded(elapsed: float, given: float, left: float) -> None:
    assert to_give(elapsed, given) == pytest.approx(left)


def test_work_takes_three_times_its_time_at_most() -> None:
    now, given, work = 0.0, 0.0, 0.0
    while work < 10.0:  # beside others that never leave it more than its share
        now, work = now + 0.05, work + 0.05
        seconds = min(0.25, to_give(now, given))
        now, given = now + seconds, given + seconds
    assert 29.0 < now < 30.5


def test_the_times_are_those_of_the_machine_and_this_process() -> None:
    began = time.monotonic()
    first = look()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    then = look()
    took = time.monotonic() - began  # and not between their own times: this process may stand still within a look
    assert 0.1 <= then.own - first.own < 1.0
    assert 0.0 <= then.idle - first.idle <= (os.cpu_count() or 1) * took + 0.1


@pytest.fixture
def _busy() -> Iterator[None]:
    """More processes than cores that compute, also where some of them stand still; they end by themselves."""
    code = "import time\nprint(flush=True)\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2 * (os.cpu_count() or 1) + 2)]
    for each in started:
        assert each.stdout is not None
        each.stdout.readline()
    yield
    for each in started:
        each.kill()
        each.communicate()


@pytest.mark.slow
@pytest.mark.usefixtures("_busy")
def test_work_beside_others_is_spread_over_time() -> None:
    courtesy, began, end = Courtesy(), time.monotonic(), time.process_time() + 0.1 * (os.cpu_count() or 1) / 2
    while time.process_time() < end:
        courtesy.pause()
    # Without pauses they leave it two sevenths of one of two cores: a third of a second.
    assert time.monotonic() - began > 0.6


@pytest.mark.slow
@pytest.mark.usefixtures("_busy")
def test_a_last_save_gives_way_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    courtesy, end = Courtesy(lambda: True), time.process_time() + 0.1
    while time.process_time() < end:
        courtesy.pause()
    assert not slept
