"""Gives way to training that computes on all cores: the keeper takes its time then, and next to nothing of theirs.

A low priority alone doesn't do that. Ranks that wait for each other leave a core for a moment; whoever takes it then
has it for some milliseconds, and for as long all ranks wait for the one that wants it back.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

SHARE = 0.03
"""Of all processor time, what the keeper takes while others use more than half of what it leaves. On two cores it
drains a GiB in some four seconds then."""

_BUSY = 0.5
_SOME = 0.25  # of all time; what less is used by others is no training
_WINDOW = 0.05  # seconds that are looked at together
_LONGEST = 0.25  # seconds


class Look(NamedTuple):
    """Times since some moment, in seconds.

    Attributes:
        now: of the clock.
        own: processor time of this process.
        idle: of all cores together, what nobody has used.
    """

    now: float
    own: float
    idle: float


class Courtesy:
    """Any thread uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cores = os.cpu_count() or 1
        self._last = look()
        self._paused = 0.0  # since then

    def pause(self) -> None:
        """Stay away for a moment, if that is called for. Called often, between pieces of work."""
        with self._lock:
            if time.monotonic() - self._last.now < _WINDOW:
                return
            before, self._last = self._last, look()
            self._paused = seconds = pause(before, self._last, self._cores, self._paused)
        if seconds > 0:
            time.sleep(seconds)


def pause(before: Look, after: Look, cores: int, paused: float = 0.0) -> float:
    """How long to stay away, so that on the whole no more than the share is taken. Pure.

    Args:
        before: an earlier look.
        after: a later one.
        cores: of the machine.
        paused: seconds between the looks that were spent on making up for what was taken before.
    """
    elapsed, own = after.now - before.now, after.own - before.own
    every = cores * elapsed
    others = every - (after.idle - before.idle) - own
    if others <= max(_BUSY * (every - own), _SOME * every):
        return 0.0
    return min(_LONGEST, max(0.0, own / (SHARE * cores) - max(0.0, elapsed - paused)))


def look() -> Look:
    """Times as they are now. Where the system doesn't say how idle it is, it counts as idle."""
    now, own = time.monotonic(), time.process_time()
    try:
        fields = Path("/proc/stat").read_bytes().split(b"\n", 1)[0].split()
        idle = (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        idle = now * (os.cpu_count() or 1)
    return Look(now, own, idle)
