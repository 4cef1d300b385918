"""How an attempt begins: what a launcher says of a root that keeps it waiting, and of another launcher there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ftrun.checkpoint.epochs import EpochRecord
from ftrun.checkpoint.layout import Root
from ftrun.launch.rounds import Rounds
from ftrun.launch.slow_root import told_if_slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_root_that_keeps_a_start_waiting_is_told_of(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root")
    told, heard, before = list[str](), threading.Event(), set(threading.enumerate())

    def say(text: str) -> None:
        told.append(text)
        heard.set()

    with told_if_slow(say, root, after=(0.01, 600.0)):
        assert heard.wait(20)
    assert len(told) == 1
    assert str(root.path) in told[0]
    timers = [each for each in set(threading.enumerate()) - before if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers), "none is left to say it later"
    with told_if_slow(say, root, after=(600.0,)):
        pass
    assert len(told) == 1


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a launcher that runs."""
    command = [sys.executable, "-c", "print(flush=True); input()", "ftrun", "train.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its command line is there
        yield process
        process.kill()


class Console:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_another_launcher_that_still_runs_is_told_of(tmp_path: Path, launcher: subprocess.Popen[bytes]) -> None:
    console: Any = Console()
    plan: Any = type("Plan", (), {"open_root": lambda self: Root.open(tmp_path), "run_id": "run"})()
    rounds = Rounds(plan, console)

    def look(host: str, pid: int) -> list[str]:
        console.warnings.clear()
        rounds._warn_of_another_launcher(EpochRecord(1, "run", 1, None, host, pid, ""))
        return list(console.warnings)

    here = socket.gethostname()
    assert str(launcher.pid) in "".join(look(here, launcher.pid))
    assert look("elsewhere", launcher.pid) == []
    assert look(here, os.getpid()) == []
    launcher.kill()
    launcher.wait(10)
    assert look(here, launcher.pid) == []
