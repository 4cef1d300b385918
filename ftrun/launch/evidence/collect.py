"""Collecting evidence, before the first signal that ends anything is sent: what every rank and the kernel have to say.

Two occasions. A rank has died: its peers are about to be killed and started anew, so all of this takes some tens of
milliseconds. A hang has been found: there are seconds, and ``py-spy`` looks too where it is installed. Nothing here
raises or waits beyond its time: a process that is stopped, stuck in the kernel, dead or gone is said to be, and left.
"""

from __future__ import annotations

import signal
import socket
import time as clock
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftrun import dump, error_file, pulse
from ftrun.launch.evidence import cgroup, dumping, process_state, pyspy, stacks
from ftrun.launch.evidence.kernel_log import KernelLog
from ftrun.launch.evidence.model import Evidence, RankEvidence
from ftrun.launch.evidence.tail import last_lines, read_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ftrun.launch.evidence.model import Seat
    from ftrun.launch.evidence.process_state import ProcessState
    from ftrun.launch.watching.watch import Verdict

LAST_LINES = 30

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
_CRASH_BYTES = 2 << 20


@dataclass(frozen=True)
class LiveRank:
    """A rank as the agent knows it.

    Attributes:
        rank: global rank.
        local_rank: rank on this node.
        pid: process id; a child of the agent. One that has been waited for has an exit code here.
        exit_code: as Python gives it, negative for a signal; None while it runs.
        exited_at: when the agent saw it end, seconds since 1970; 0.0 while it runs.
        directory: the worker's directory in the run directory.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    exited_at: float
    directory: Path


@dataclass(frozen=True)
class Sources:
    """Where evidence about the node comes from.

    Attributes:
        node: number of this node.
        host: its name.
        kernel: the kernel log.
        memory: the control group that the workers live in, or None.
        py_spy: the program, or None where it isn't installed.
        seat: says where this node sits among others.
    """

    node: int = 0
    host: str = field(default_factory=socket.gethostname)
    kernel: KernelLog = field(default_factory=KernelLog)
    memory: cgroup.MemoryGroup | None = field(default_factory=cgroup.find)
    py_spy: str | None = field(default_factory=pyspy.find)
    seat: Callable[[], Seat | None] = lambda: None

    @classmethod
    def of_this_host(cls, environment: Mapping[str, str], node: int = 0) -> Sources:
        """All that this host has. ``FTRUN_KMSG`` says where the kernel log is read from."""
        return cls(node=node, kernel=KernelLog.from_environment(environment))


@dataclass(frozen=True)
class _Budget:
    """Seconds: for dumps to come, without growth until a dump counts as whole, for py-spy, for the kernel log."""

    dumps: float
    settle: float
    spies: float
    kernel: float


_A_RANK_DIED = _Budget(dumps=0.03, settle=0.01, spies=0.0, kernel=0.015)
_HANG = _Budget(dumps=1.5, settle=0.1, spies=3.0, kernel=0.2)


class Collector:
    """Collects evidence of one worker group after another. Used by the agent's main thread, or while it waits."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._before = cgroup.MemoryUse()

    def baseline(self) -> None:
        """Note where the kernel's log and counters are. Called as an attempt starts, before its workers do."""
        self._sources.kernel.mark()
        self._before = self._memory()

    def collect(
        self,
        ranks: Sequence[LiveRank],
        time: float,
        hang: Verdict | None = None,
        *,
        thorough: bool,
        over: Callable[[], bool] = lambda: False,
    ) -> Evidence:
        """See what all ranks of this node and the kernel have to say, while the ranks are as they were found.

        Args:
            ranks: all of them, dead and alive.
            time: seconds since 1970 of the moment that something was noticed.
            hang: the verdict of the watch, where that is why.
            thorough: whether there are seconds for it, or a restart waits.
            over: whoever asked waits no more: no process gets a signal from then on.
        """
        budget = _HANG if thorough else _A_RANK_DIED
        looks = {each.rank: process_state.look(each.pid) for each in ranks if each.exit_code is None}
        living = {each: looks[each.rank] for each in ranks if each.rank in looks and looks[each.rank].lives}
        dumped = self._stacks(living, budget, over)
        memory = self._memory()
        return Evidence(
            ranks=tuple(left_by(each, looks.get(each.rank), dumped.get(each.rank, ())) for each in ranks),
            node=self._sources.node,
            host=self._sources.host,
            time=time,
            oom_kills=_more(memory.oom_kills, self._before.oom_kills),
            memory=_in_words(memory, self._before),
            kernel=self._sources.kernel.lines(budget.kernel),
            hang=hang,
            seat=self._sources.seat(),
        )

    def afterwards(self, ranks: Sequence[LiveRank], time: float) -> Evidence:
        """What there is to see of ranks that had to be ended before anybody looked: what they left in their files.

        Args:
            ranks: all of them, as they were before that.
            time: seconds since 1970 of that moment.
        """
        found = tuple(left_by(each, None, ()) for each in ranks)
        source = self._sources
        return Evidence(found, node=source.node, host=source.host, time=time, seat=source.seat())

    def close(self) -> None:
        """Close what is open."""
        self._sources.kernel.close()

    def _stacks(
        self, living: Mapping[LiveRank, ProcessState], budget: _Budget, over: Callable[[], bool]
    ) -> dict[int, tuple[str, ...]]:
        """Stacks by rank: its own answer, or else what py-spy sees, where there is time for it."""
        start = clock.monotonic()
        program = self._sources.py_spy if budget.spies else None
        spies = pyspy.Spies(program, {each.pid: each.directory for each in living}) if program else None
        if spies is not None:
            spies.start()
        asked = {each.rank: dumping.ask(each.pid, each.directory, look, over) for each, look in living.items()}
        dumping.wait(filter(None, asked.values()), start + budget.dumps, budget.settle)
        seen = spies.finish(start + budget.spies) if spies is not None else {}
        own = {rank: each.main_thread() for rank, each in asked.items() if each is not None}
        return {each.rank: own.get(each.rank) or seen.get(each.pid, ()) for each in living}

    def _memory(self) -> cgroup.MemoryUse:
        return self._sources.memory.read() if self._sources.memory is not None else cgroup.MemoryUse()


def _more(now: int | None, before: int | None) -> int:
    return max(0, now - before) if now is not None and before is not None else 0


def _in_words(use: cgroup.MemoryUse, before: cgroup.MemoryUse) -> str:
    """How full the control group is, and how often it hit its limit since ``before``."""
    if use.used is None:
        return ""
    limit = "no limit" if use.limit is None else f"a limit of {use.limit / 1e9:.2f} GB"
    hits = _more(use.at_limit, before.at_limit)
    times = f", hit {hits} times in this attempt" if hits and use.limit is not None else ""
    return f"the control group uses {use.used / 1e9:.2f} GB of memory, with {limit}{times}"


def left_by(rank: LiveRank, look: ProcessState | None, stack: tuple[str, ...]) -> RankEvidence:
    """What one rank left in its directory, put together with what was seen of its process.

    Args:
        rank: as it is known.
        look: at its process; None where it has ended, or ran elsewhere.
        stack: of its main thread, innermost frame first; empty where it wasn't seen.
    """
    return RankEvidence(
        rank=rank.rank,
        local_rank=rank.local_rank,
        pid=rank.pid,
        exit_code=rank.exit_code,
        exited_at=rank.exited_at,
        error=error_file.read(rank.directory / "error.json"),
        beat=pulse.read(rank.directory / "pulse"),
        state=look.state if look else "",
        waits_in=look.waits_in if look else "",
        stack=stack or _crash(rank),
        last_lines=last_lines(rank.directory / "stderr.log", LAST_LINES),
    )


def _crash(rank: LiveRank) -> tuple[str, ...]:
    """What a fatal signal left, if one ended this rank: the file may also tell of the crash of a child."""
    if rank.exit_code is None or -rank.exit_code not in _CRASHES:
        return ()
    return stacks.crashed_thread(
        read_at(rank.directory / dump.FILE, -_CRASH_BYTES, _CRASH_BYTES).decode(errors="replace")
    )
