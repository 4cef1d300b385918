"""Stacks by ``py-spy``, where it is installed: it reads a process from outside, and needs nothing of the process."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.launch.evidence import stacks
from ftrun.launch.evidence.tail import read_at

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "py-spy.txt"

_LARGEST = 2 << 20
_REAP_SECONDS = 0.5


def find() -> str | None:
    """The program: on PATH, or beside the interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.is_file() else None)


class Spies:
    """One ``py-spy dump`` for each of some processes, all at once.

    Args:
        program: the program.
        targets: pids, and the directory in which what is seen of each is kept.
    """

    def __init__(self, program: str, targets: Mapping[int, Path]) -> None:
        self._program = program
        self._targets = targets
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start them; one that can't be started is left out."""
        for pid, directory in self._targets.items():
            with contextlib.suppress(OSError), (directory / FILE).open("wb") as out:
                # It would stop its target otherwise, and a py-spy that hangs then leaves it stopped.
                self._running[pid] = subprocess.Popen(
                    [self._program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                )

    def finish(self, deadline: float) -> dict[int, tuple[str, ...]]:
        """Wait for all of them until a deadline on the monotonic clock, end the rest, and read what they saw."""
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._running.values():
            # One that can't even be killed is fetched by the interpreter whenever it is dead.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_SECONDS)
        return {pid: self._read(pid) for pid in self._running}

    def _read(self, pid: int) -> tuple[str, ...]:
        return stacks.spied(read_at(self._targets[pid] / FILE, 0, _LARGEST).decode(errors="replace"))
