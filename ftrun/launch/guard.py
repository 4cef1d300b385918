"""The guard: a tiny process that outlives an agent killed with SIGKILL, and kills what the workers had started.

The workers themselves ask the kernel to die with their agent. Their children can't be made to ask: programs that a
script runs would live on, and hold its GPU memory and ports. The guard holds the other end of a pipe; when the agent
is gone, however it went, the pipe ends. It finds the workers' children by their session, and those that left the
session by what their environment holds.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PROGRAM = Path(__file__).with_name("guard_process.py")
_CLOSE_SECONDS = 5.0


class Guard:
    """Starts the guard for the length of a ``with`` block. Linux; elsewhere it does nothing.

    Args:
        marks: texts that the environment of every worker holds, all of them, and no other process's.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = list(marks)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the process, in a session of its own, so that no signal meant for the agent reaches it."""
        if Path("/proc/self/stat").exists():
            # -I and -S: nothing of the user's environment is imported, and it starts in a few milliseconds.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            self._say(json.dumps(self._marks))
        return self

    def pids(self) -> tuple[int, ...]:
        """The guard's own process."""
        return (self._process.pid,) if self._process is not None else ()

    def watch(self, leaders: Iterable[int]) -> None:
        """Name the session leaders of the attempt that is running; none once they are cleared away."""
        self._say(" ".join(map(str, leaders)))

    def _say(self, line: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # a guard that is gone can't guard; the run goes on without
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def __exit__(self, *_error: object) -> None:
        """End the guard: everything has been cleared away by the agent itself."""
        if self._process is None:
            return
        self.watch(())
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
