"""Process trees: who descends from a worker, and ending all of them.

Each worker leads a session of its own. Most of what it starts stays in that session; what leaves it (a daemon, a
tool with a session of its own) is still found by its parents, or, once those are dead, because orphans of workers
come to the agent, which has asked the kernel for them (:func:`adopt_orphans`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_GONE = ("Z", "X", "x")


@dataclass(frozen=True)
class Entry:
    """One line of the process table.

    Attributes:
        pid: process id.
        parent: of its parent.
        session: id of its session, which is the pid of the session's first process.
        state: the letter of ``/proc/PID/stat``.
    """

    pid: int
    parent: int
    session: int
    state: str

    @property
    def lives(self) -> bool:
        """Whether it is more than an exit status that waits to be fetched."""
        return self.state not in _GONE


def adopt_orphans() -> None:
    """Become the new parent of processes whose parent, below this process, has died. Linux; elsewhere nothing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def table() -> dict[int, Entry]:
    """All processes, by pid. One pass, without a lock: a process that comes or goes meanwhile may be missed."""
    if _PROC.joinpath("self/stat").exists():
        entries = (_entry(name) for name in os.listdir(_PROC) if name.isdecimal())
    else:
        entries = (_entry_elsewhere(pid) for pid in psutil.pids())
    return {entry.pid: entry for entry in entries if entry is not None}


def _entry(name: str) -> Entry | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            # The program's name is in parentheses and may hold anything, parentheses included.
            fields = file.read().rpartition(b")")[2].split()
        return Entry(int(name), int(fields[1]), int(fields[3]), fields[0].decode())
    except (OSError, ValueError, IndexError):
        return None


def _entry_elsewhere(pid: int) -> Entry | None:
    try:
        process = psutil.Process(pid)
        state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "S"
        return Entry(pid, process.ppid(), os.getsid(pid), state)
    except (psutil.Error, OSError):
        return None


def below(processes: Mapping[int, Entry], leaders: Collection[int], also: Collection[int] = ()) -> set[int]:
    """Everything alive that is in a leader's session or descends from a leader, the leaders left out.

    Args:
        processes: the table.
        leaders: pids that lead sessions; they may be gone.
        also: pids of further ancestors.
    """
    roots = set(leaders) | set(also)
    children: dict[int, list[int]] = {}
    for entry in processes.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    ahead = [*roots, *(pid for pid, entry in processes.items() if entry.session in leaders)]
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, ())
    return {pid for pid in found - roots if pid in processes and processes[pid].lives}


def orphans(processes: Mapping[int, Entry], mine: Collection[int]) -> set[int]:
    """Children of this process that it didn't start: what workers left behind, adopted.

    Args:
        processes: the table.
        mine: pids that this process started with sessions of their own.
    """
    me, session = os.getpid(), os.getsid(0)
    return {
        entry.pid
        for entry in processes.values()
        # What this process starts for its own use stays in its session.
        if entry.parent == me and entry.session != session and entry.pid not in mine
    }


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def reap(pids: Iterable[int]) -> None:
    """Fetch the exit status of adopted processes, as far as they have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def tidies_up(pid: int) -> bool:
    """Whether a process removes its workers' shared memory when they are dead, and ends by itself then.

    Python's resource trackers and torch's shared memory manager: killed beside their workers, they would leave named
    semaphores and segments in ``/dev/shm`` for good.
    """
    try:
        line = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"resource_tracker import main" in line or line.partition(b"\0")[0].endswith(b"torch_shm_manager")


def clear(leaders: Collection[int], mine: Collection[int], *, deadline: float) -> set[int]:
    """Kill everything that workers started, until nothing is left or the time is over.

    What tidies up after the workers is given that time to end by itself.

    Args:
        leaders: pids of the workers, dead or alive; they themselves aren't touched.
        mine: pids of all other processes that this one started with sessions of their own.
        deadline: on the monotonic clock.

    Returns:
        What could not be killed in time: processes in uninterruptible sleep.
    """
    while True:
        processes = table()
        adopted = orphans(processes, {*leaders, *mine})
        found = below(processes, leaders, adopted) | {pid for pid in adopted if processes[pid].lives}
        over = time.monotonic() >= deadline
        last = {pid for pid in found if tidies_up(pid)}
        kill(found if over else found - last)
        reap(adopted)
        if not found or over:
            return found - last
        time.sleep(0.005)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal; False where that can't be known."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def command_line(pid: int) -> str:
    """A process's command as one line, for messages; empty where it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""
