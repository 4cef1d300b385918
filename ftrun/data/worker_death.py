"""What can be said of loader workers that died or don't answer: which, by what, their memory, shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.process import BaseProcess

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where torch's workers put batches

_LOOK_EVERY = 1.0  # seconds
_STATES = {
    "T": "is stopped (by SIGSTOP or a debugger)",
    "t": "is held by a debugger",
    "D": "waits for a disk or a network file system",
    "R": "is computing",
    "S": "is waiting",
    "Z": "has ended",
}


class Death(NamedTuple):
    """A worker that has ended as it should not.

    Attributes:
        number: of the worker.
        pid: its process id.
        code: exit code; negative, the number of the signal that killed it.
    """

    number: int
    pid: int
    code: int

    @property
    def how(self) -> str:
        """For people: how it ended."""
        if self.code == 0:
            return f"worker {self.number} (pid {self.pid}) left as on SIGTERM"
        if self.code > 0:
            return f"worker {self.number} (pid {self.pid}) ended with exit code {self.code}"
        return f"worker {self.number} (pid {self.pid}) was killed by {_signal_name(-self.code)}"


class Watch:
    """What is looked at while workers live, as nothing can be asked of them afterwards."""

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._looked = 0.0
        self._oom_kills = oom_kills()

    def look(self, workers: Sequence[BaseProcess]) -> None:
        """Note the workers' memory, once a second at most."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        for worker in workers:
            peak = _peak_memory(worker.pid)
            if peak is not None and worker.pid is not None:
                self._peaks[worker.pid] = peak

    def story(self, deaths: Sequence[Death]) -> str:
        """Everything that helps to find out why workers died, in one line."""
        said = [self._of(death) for death in deaths]
        before, now = self._oom_kills, oom_kills()
        if before is not None and now is not None and now > before:
            said.append(f"the kernel has killed {now - before} process(es) here for lack of memory meanwhile")
        said.append(shared_memory_use())
        return "; ".join(each for each in said if each)

    def _of(self, death: Death) -> str:
        peak = self._peaks.get(death.pid)
        return death.how + (f", with at most {amount(peak)} of memory until shortly before" if peak else "")


def deaths(workers: Sequence[BaseProcess], within: float = 0.0) -> list[Death]:
    """Workers that have died. One that is waited for has no reason to end, so code 0 is no good end either.

    Args:
        workers: of one loader, by number.
        within: seconds to wait for the news, after a broken connection.
    """
    deadline = time.monotonic() + within
    while True:
        found = [
            Death(number, worker.pid, worker.exitcode)
            for number, worker in enumerate(workers)
            if worker.pid is not None and worker.exitcode is not None
        ]
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(0.01)


def what_they_do(workers: Sequence[BaseProcess]) -> str:
    """What each worker is doing, as the kernel sees it."""
    said = []
    for number, worker in enumerate(workers):
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2][0]
            said.append(f"worker {number} (pid {worker.pid}) {_STATES.get(state, f'is in state {state}')}")
    return "; ".join(said)


def shared_memory_use() -> str:
    """How full shared memory is, for people; nothing where there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ""
    total = found.f_blocks * found.f_frsize
    return f"{SHARED_MEMORY} has {amount(total - found.f_bfree * found.f_frsize)} of {amount(total)} in use"


def oom_kills() -> int | None:
    """Processes that the kernel has killed for memory in this process's control group; None where it doesn't say."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        group = next(line[3:] for line in groups if line.startswith("0::"))
        for path in (Path(f"/sys/fs/cgroup{group}/memory.events"), Path("/sys/fs/cgroup/memory.events")):
            if path.exists():
                lines = path.read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        pass
    return None


def amount(number: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def _peak_memory(pid: int | None) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
