"""The agent is killed with SIGKILL, again and again, while the machine is busy: nothing stays, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import SCRIPTS, eventually

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Runner

MANY = os.environ.get("FTRUN_TEST_KILLS")
KILLS = int(MANY or "3")
SMALL = SCRIPTS / "small.py"

# Starts what hides best: a child in a session of its own, and a daemon.
_WITH_CHILDREN = """
import os, runpy, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeper)
subprocess.Popen(sleeper, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, sleeper)
    os._exit(0)
os.wait()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def busy() -> Iterator[None]:
    # Among all the other tests it is busy without that.
    count = os.cpu_count() or 1 if MANY else 0
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for each in spinners:
        each.kill()
        each.wait(60)


def _of_this_test(place: Path) -> list[int]:
    """Processes whose environment names the run directory: workers, standbys and all that they started."""
    mark = str(place).encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.status() != "zombie":
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(30 * KILLS + 240)
@pytest.mark.usefixtures("busy")
def test_an_agent_killed_again_and_again_leaves_nothing_and_the_run_goes_on(runner: Runner) -> None:
    script = runner.cwd / "with_children.py"
    script.write_text(_WITH_CHILDREN)
    command = ("--nproc", "2", "--name", "hunted", script, SMALL, "--total", "4000", "--pace", "0.02", "--workers", "1")
    chance = random.Random(7)
    for kill in range(1, KILLS + 1):
        started = runner.start(*command, standbys=kill % 2 == 1)
        eventually(lambda kill=kill: _launches(runner) == kill and _stepped(runner), 60, f"steps before kill {kill}")
        if kill == 1:
            eventually(lambda: _committed(runner), 60, "something to go on from")
        time.sleep(chance.uniform(0.0, 1.0))  # a random moment is the point
        pid = started.process.pid
        family = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        started.process.wait(60)
        eventually(lambda family=family: not any(_lives(each) for each in family), 60, "the end of its children")
        eventually(lambda: not _of_this_test(runner.cwd / "runs" / "hunted"), 60, "the end of all of them")
        assert runner.json("status", "hunted", "--json")["state"] == "dead"
    starts = [
        each.event.resume_step for each in runner.events("hunted") if isinstance(each.event, events.AttemptStarted)
    ]
    assert starts == sorted(starts)
    assert starts[-1] > 0


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _launches(runner: Runner) -> int:
    return sum(isinstance(each.event, events.RunStarted) for each in runner.events("hunted"))


def _committed(runner: Runner) -> bool:
    return any(isinstance(each.event, events.Committed) for each in runner.events("hunted"))


def _stepped(runner: Runner) -> bool:
    last = None
    for each in runner.events("hunted"):
        if isinstance(each.event, events.RunStarted):
            last = None
        elif isinstance(each.event, events.Step):
            last = each
    return last is not None
