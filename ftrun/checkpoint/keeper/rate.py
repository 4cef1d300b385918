"""How fast bytes go, and how many have gone."""

from __future__ import annotations

import threading
import time

_BURST = 0.25  # seconds


class Limiter:
    """Spreads bytes over time: all threads of a keeper together stay below a rate.

    Args:
        rate: bytes a second; None for no limit.
    """

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._next = 0.0  # time.monotonic() at which all that was let through is paid for

    @property
    def slice(self) -> int:
        """How many bytes to ask for at a time: few enough to stay in the processor's cache, and for an even flow."""
        return 2**20 if self._rate is None else max(2**16, min(2**20, self._rate // 8 // 2**16 * 2**16))

    def take(self, count: int) -> None:
        """Wait until so many bytes may go."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - _BURST) + count / self._rate
            pause = self._next - now
        if pause > 0:
            time.sleep(pause)


class Meter:
    """Counts the bytes that one step of a save has copied. Any thread adds.

    Args:
        total: how many there will be.

    Attributes:
        began: ``time.monotonic()`` of the start.
        latest: the same of the latest bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.began = self.latest = time.monotonic()
        self._lock = threading.Lock()
        self._done = 0

    @property
    def done(self) -> int:
        """Bytes so far. They don't shrink when a file is copied again."""
        return min(self._done, self.total)

    def add(self, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done += count
            self.latest = time.monotonic()
