from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually
from evidence_kit import compiled

from ftrun.launch import gpu_memory

# What the package asks of the driver's library: two GPUs, the second one lost, the first one's processes in a file.
FAKE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Info;
int nvmlInitWithFlags(unsigned flags) { return getenv("FAKE_NO_DRIVER") ? 9 : 0; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1L); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Info *infos) {
    unsigned pid, found = 0, room = *count;
    if (device == (void *)2L) return 15;
    if (getenv("FAKE_HANGS")) for (;;) pause();
    FILE *file = fopen(getenv("FAKE_ASKED"), "a");
    if (file) { fputc('.', file); fclose(file); }
    file = fopen(getenv("FAKE_PIDS"), "r");
    while (file && fscanf(file, "%u", &pid) == 1) { if (found < room) infos[found].pid = pid; found++; }
    if (file) fclose(file);
    *count = found;
    return found > room ? 7 : 0;
}
"""

ASK = (
    "import json, sys, threading; from ftrun.launch import gpu_memory as g;"
    "started, ask = [], g._ask; g._ask = lambda *words: started.append(ask(*words)) or started[0];"
    "w = g.wait_until_free([int(n) for n in sys.argv[2:]], float(sys.argv[1]));"
    "print(json.dumps([w.seconds, w.still_there, w.reason, threading.active_count(), [p.pid for p in started]]))"
)
# A clock that stands still until the driver is asked for the second look, which takes two questions: the first is told
# by then. From then on every look at the clock moves it a little, so that there are many times at which that is read.
CLOCK = (
    "import os, types; from ftrun.launch import gpu_memory as g; now = [0.0];\n"
    "def clock():\n"
    "    now[0] += 0.1 if os.path.getsize(os.environ['FAKE_ASKED']) > 2 else 0.0\n"
    "    return now[0]\n"
    "g.time, g._SLICE_SECONDS = types.SimpleNamespace(monotonic=clock), 0.05\n"
)


class Node:
    """A node with a fake driver."""

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("pynvml") is None:
            pytest.skip("nvidia-ml-py isn't installed")
        compiled(FAKE, path / "libnvidia-ml.so.1", "-shared", "-fPIC")
        self.pids = path / "pids"
        self.pids.write_text("")
        asked = path / "asked"
        asked.write_text("")
        files = {"FAKE_PIDS": str(self.pids), "FAKE_ASKED": str(asked)}
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(path), **files}

    def ask(self, limit: float, *pids: int, clock: str = "", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", clock + ASK, str(limit), *map(str, pids)],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, limit: float, *pids: int, clock: str = "", **environment: str) -> Any:
        out, _ = self.ask(limit, *pids, clock=clock, **environment).communicate(timeout=60)
        return json.loads(out)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_nobody_waits_for_processes_that_hold_nothing(node: Node) -> None:
    node.pids.write_text("77 78\n")
    seconds, still_there, reason, threads, _ = node.answer(60, 11, 12)
    assert (still_there, reason, threads) == ([], "", 1)
    assert 0 < seconds < 60


def test_the_wait_ends_when_the_last_one_is_gone(node: Node) -> None:
    node.pids.write_text("77\n11\n12\n")
    waiting = node.ask(60, 11, 12)
    eventually(lambda: children_of(waiting.pid))
    assert waiting.poll() is None
    node.pids.write_text("77\n")
    out, _ = waiting.communicate(timeout=60)
    assert json.loads(out)[1:3] == [[], ""]


def test_the_wait_has_a_limit(node: Node) -> None:
    node.pids.write_text("77\n12\n11\n")
    seconds, still_there, reason, _, _ = node.answer(3.0, 11, 12, 13, clock=CLOCK)  # within it a process has to start
    assert (still_there, reason) == ([11, 12], "not within 3 s")
    assert seconds >= 3.0


@pytest.mark.slow
def test_a_driver_that_hangs_is_left_alone(node: Node) -> None:
    _, still_there, reason, _, (child,) = node.answer(3.0, 11, FAKE_HANGS="1")
    assert (still_there, reason) == ([], "not within 3 s: NVML doesn't answer")
    eventually(lambda: has_ended(child), 60, "the end of the process that asks")


def test_a_driver_that_does_not_start(node: Node) -> None:
    assert node.answer(60, 11, FAKE_NO_DRIVER="1")[1:3] == [[], "NVML can't be read"]


def test_without_a_driver_there_is_nothing_to_do() -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has a driver")
    waited = gpu_memory.wait_until_free([11])
    assert (waited.seconds, waited.still_there) == (0.0, ())
    assert "no NVIDIA driver" in waited.reason
    assert gpu_memory.wait_until_free([]) == gpu_memory.Waited(0.0)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def children_of(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
