"""Whether worker processes and what they have started use the machine: two looks at ``/proc``, a moment apart."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.launch import family

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROC = Path("/proc")
_BETWEEN = 0.4
_BUSY_SHARE = 0.05
_BUSY_SWITCHES = 100.0
"""Times a second that a process gives the processor away to wait: threads that look after something wake up a few
times, one that moves data thousands."""


@dataclass(frozen=True)
class Work:
    """What one rank's processes do.

    Attributes:
        main: the worker itself computes, or moves data.
        children: something that it has started does.
        in_kernel: one of them is in uninterruptible sleep.
    """

    main: bool = False
    children: bool = False
    in_kernel: bool = False


@dataclass(frozen=True)
class _Use:
    seconds: float
    switches: int
    state: str


def measure(pids: Mapping[int, int]) -> dict[int, Work]:
    """See what ranks do, for less than half a second. Blocks on nothing.

    Args:
        pids: worker processes by rank, each the leader of a session.
    """
    before, started = _look(pids), time.monotonic()
    time.sleep(_BETWEEN)
    after, seconds = _look(pids), time.monotonic() - started
    return {rank: _compare(pids[rank], before[rank], after[rank], seconds) for rank in pids}


def _look(pids: Mapping[int, int]) -> dict[int, dict[int, _Use]]:
    table = family.table()
    found = {}
    for rank, leader in pids.items():
        uses = {pid: _use(pid) for pid in (leader, *family.below(table, [leader]))}
        found[rank] = {pid: use for pid, use in uses.items() if use is not None}
    return found


def _compare(leader: int, before: Mapping[int, _Use], after: Mapping[int, _Use], seconds: float) -> Work:
    # A process that wasn't there before has been started meanwhile, which is work.
    busy = {pid for pid, use in after.items() if pid not in before or _is_busy(before[pid], use, seconds)}
    stuck = any(use.state == "D" and before[pid].state == "D" for pid, use in after.items() if pid in before)
    return Work(leader in busy, bool(busy - {leader}), stuck)


def _is_busy(before: _Use, after: _Use, seconds: float) -> bool:
    computed = (after.seconds - before.seconds) / seconds >= _BUSY_SHARE
    return computed or (after.switches - before.switches) / seconds >= _BUSY_SWITCHES


def _use(pid: int) -> _Use | None:
    """Processor time and voluntary switches of a process so far, its threads included; None where it is gone."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        switches = sum(_switches(thread) for thread in (_PROC / str(pid) / "task").iterdir())
    except (OSError, ValueError, IndexError):
        return None
    return _Use(seconds, switches, fields[0])


def _switches(thread: Path) -> int:
    try:
        status = (thread / "status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary")), 0)
