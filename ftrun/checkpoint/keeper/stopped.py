"""Keepers that somebody has stopped (SIGSTOP), and whose launcher isn't there to see it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.beat import Beat

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.tier import Tier

_PR_SET_PDEATHSIG = 1
_EVERY = 0.5


def continue_when_orphaned() -> None:
    """Have the kernel continue this process, should it be stopped, when the thread that started it ends.

    A keeper that is stopped when its launcher is killed would stay so for ever, and hold the tier.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


class Rouser:
    """Continues the keeper that holds a tier where it is stopped, for one that waits for it to leave.

    Args:
        tier: the tier, with that keeper's sign of life.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._due = 0.0

    def look(self) -> None:
        """Look whether it is stopped, now and then: call it as often as you like."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY
        beat = Beat(self._tier).read()
        if beat is not None and _is_stopped(beat[0], self._tier):
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(beat[0], signal.SIGCONT)


def _is_stopped(pid: int, tier: Tier) -> bool:
    """Whether a process is this tier's keeper, and stopped."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return os.fsencode(tier.path) in command and state == "T"
