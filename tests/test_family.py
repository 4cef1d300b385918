"""Process trees: everything that a worker started is found and ended, wherever it hides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import eventually

from ftrun.launch import family
from ftrun.launch.family import Entry

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def _table(*rows: tuple[int, int, int, str]) -> dict[int, Entry]:
    return {row[0]: Entry(*row) for row in rows}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        pytest.param([(10, 1, 10, "S"), (11, 10, 10, "S"), (12, 11, 10, "R")], {11, 12}, id="children"),
        pytest.param([(10, 1, 10, "S"), (11, 1, 10, "S")], {11}, id="an orphan in the session"),
        pytest.param([(11, 1, 10, "S"), (12, 11, 12, "S")], {11, 12}, id="the leader is gone"),
        pytest.param([(10, 1, 10, "S"), (11, 10, 11, "S"), (12, 11, 11, "S")], {11, 12}, id="a session of its own"),
        pytest.param([(10, 1, 10, "S"), (11, 10, 10, "Z")], set(), id="zombies are not alive"),
        pytest.param([(10, 1, 10, "S"), (20, 1, 20, "S"), (21, 20, 20, "S")], set(), id="strangers"),
        pytest.param([(10, 1, 10, "S"), (11, 12, 9, "S"), (12, 11, 9, "S")], set(), id="a torn table with a cycle"),
    ],
)
def test_what_is_below_a_leader(rows: list[tuple[int, int, int, str]], found: set[int]) -> None:
    assert family.below(_table(*rows), {10}) == found


# What it makes is shared memory of a name of its own, which its resource tracker removes when all users are gone.
_SHARES = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
where = sys.argv[1]
segment = SharedMemory(create=True, size=1)
if os.fork() == 0:
    time.sleep(600)
open(f"{where}/name", "w").write(segment.name)
time.sleep(600)
"""
_TREE = """
import os, subprocess, sys, time
where = sys.argv[1]
sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleeper, f"{where}/child"])
subprocess.Popen([sys.executable, "-c", sleeper, f"{where}/session"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(f"{where}/daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    open(f"{where}/stopped", "w").write(str(os.getpid()))
    os.kill(os.getpid(), 19)
    time.sleep(600)
os.wait()
time.sleep(600)
"""
# Adopting orphans is for a whole process: an agent's stand-in does it, and this test stays as it was.
_AGENT = """
import subprocess, sys, time
from ftrun.launch import family
family.adopt_orphans()
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], start_new_session=True)
sys.stdin.readline()
worker.kill(); worker.wait()
print(sorted(family.clear({worker.pid}, set(), deadline=time.monotonic() + 40)), flush=True)
"""


def _pid(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text(), what=f"{path.name} has started"))


def _lives(pid: int) -> bool:
    entry = family.table().get(pid)
    return entry is not None and entry.lives


def test_everything_that_a_dead_worker_started_is_ended(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(tmp_path), _TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [_pid(tmp_path / name) for name in ("child", "session", "daemon", "stopped")]
    try:
        assert all(_lives(pid) for pid in pids)
        out, _ = agent.communicate("\n", timeout=60)
        assert out == "[]\n"
        assert not [pid for pid in pids if _lives(pid)]
    finally:
        family.kill([*pids, agent.pid])
        agent.wait(60)


def test_shared_memory_of_a_killed_worker_is_removed(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(tmp_path), _SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        name = eventually(lambda: (tmp_path / "name").exists() and (tmp_path / "name").read_text(), what="the segment")
        segment = Path("/dev/shm", name)
        assert segment.exists()
        out, _ = agent.communicate("\n", timeout=60)
        assert (out, segment.exists()) == ("[]\n", False)
    finally:
        agent.kill()
        agent.wait(60)


def test_clearing_spares_what_the_agent_started_for_itself(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    worker = subprocess.Popen(sleeper, start_new_session=True)
    mine = subprocess.Popen(sleeper, start_new_session=True)
    tool = subprocess.Popen(sleeper)
    try:
        worker.kill()
        worker.wait(60)
        family.clear({worker.pid}, {mine.pid}, deadline=time.monotonic() + 5)
        assert mine.poll() is None
        assert tool.poll() is None
    finally:
        for each in (worker, mine, tool):
            each.kill()
            each.wait(60)


def test_who_catches_a_signal() -> None:
    code = "import signal, sys; signal.signal(signal.SIGUSR1, print); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        assert family.catches(process.pid, signal.SIGUSR1)
        assert not family.catches(process.pid, signal.SIGUSR2)
        assert not family.catches(2**22 + 1, signal.SIGUSR1)
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_command_line_for_messages() -> None:
    assert "python" in family.command_line(os.getpid())
    assert family.command_line(2**22 + 1) == ""
