"""What ``/proc`` says of a process. Reads only files that never block, also while the process is stuck in the kernel.

(``cmdline``, ``environ`` and ``maps`` take a lock that a stuck process may hold.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_KERNEL_FRAME = re.compile(r"\[<[0-9a-f]+>\] (\w+)")
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True)
class ProcessState:
    """One look at a process.

    Attributes:
        state: the letter of ``/proc/PID/stat``, empty where there is no such process or no ``/proc``.
        waits_in: the kernel function that its main thread sleeps in; empty where unknown or it doesn't sleep.
        caught: numbers of the signals that it has a handler for.
    """

    state: str = ""
    waits_in: str = ""
    caught: frozenset[int] = frozenset()

    @property
    def lives(self) -> bool:
        """Whether there is a process that hasn't ended."""
        return self.state not in ("", "Z", "X")

    @property
    def answers(self) -> bool:
        """Whether a signal sent now would be handled soon: not stopped, not stuck in the kernel, not dead."""
        return self.state in ("R", "S", "I")


def look(pid: int) -> ProcessState:
    """Look at a process."""
    caught = _CAUGHT.search(_text(f"/proc/{pid}/status"))
    state = letter(pid)
    # Of one that runs the kernel says where it last came from, which means nothing.
    waits_in = "" if state == "R" else _waits_in(pid)
    return ProcessState(state, waits_in, _numbers(int(caught[1], 16)) if caught else frozenset())


def letter(pid: int) -> str:
    """Its state alone; empty where there is no such process."""
    # The name before it may hold spaces and brackets of its own.
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1]


def _waits_in(pid: int) -> str:
    name = _text(f"/proc/{pid}/wchan").strip()
    if name not in ("", "0"):
        return name
    # Where the kernel hides the name it may still show the stack, to root; the first entry says the same.
    frame = _KERNEL_FRAME.match(_text(f"/proc/{pid}/stack"))
    return frame[1] if frame else ""


def _numbers(mask: int) -> frozenset[int]:
    return frozenset(bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1)


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""
