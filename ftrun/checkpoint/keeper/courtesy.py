"""Gives way to training that computes on all cores: the keeper takes its time then, and next to nothing of theirs.

A low priority alone doesn't do that. Ranks that wait for each other leave a core for a moment; whoever takes it then
has it for some milliseconds, and for as long all ranks wait for the one that wants it back.

What that costs a save is bounded, since sooner or later somebody waits for its commit; and a last save, after which
nobody trains here, is in a hurry from the start.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

SHARE = 0.03
"""Of all processor time, what the keeper takes while others use more than half of what it leaves. On two cores it
drains a GiB in some four seconds then."""

_BUSY = 0.5
_SOME = 0.25  # of all time; what less is used by others is no training
_WINDOW = 0.05  # seconds that are looked at together
_LONGEST = 0.25  # seconds
_LEAST = 3.0  # seconds that may be given to others in all, however short the work is
_TIMES = 2.0  # as long as the work takes: three times its time in all


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
    """That of one piece of work, a file or several. Any thread uses it.

    Args:
        hurries: whether there is no time for it any more.
    """

    def __init__(self, hurries: Callable[[], bool] = lambda: False) -> None:
        self._hurries = hurries
        self._lock = threading.Lock()
        self._cores = os.cpu_count() or 1
        self._last = look()
        self._paused = 0.0  # since then
        self._began = self._away_until = self._last.now
        self._given = 0.0  # seconds in which some thread stayed away

    def pause(self) -> None:
        """Stay away for a moment, if that is called for. Called often, between pieces of work."""
        with self._lock:
            if time.monotonic() - self._last.now < _WINDOW:
                return
            before, self._last = self._last, look()
            now = self._last.now
            left = 0.0 if self._hurries() else to_give(now - self._began, self._given)
            self._paused = seconds = min(left, pause(before, self._last, self._cores, self._paused))
            until = max(self._away_until, now + seconds)
            self._given += until - max(self._away_until, now)
            self._away_until = until
        if seconds > 0:
            time.sleep(seconds)


def to_give(elapsed: float, given: float) -> float:
    """How many seconds there are left to stay away, so that the work takes three times its time at most. Pure.

    Args:
        elapsed: seconds since it began.
        given: those of them, or to come, in which some thread stayed away.
    """
    return max(0.0, max(_LEAST, _TIMES * (elapsed - given)) - given)


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
