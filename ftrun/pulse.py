"""The pulse page: one small mapped file per rank in which a worker says how far it is.

Writing it is a store into shared memory: no lock, no system call, nothing to wait for. The page outlives the
worker, so the agent can still read how far a dead rank had come.

Layout, little endian, 8 bytes each: magic, steps completed, first step of this attempt, total steps (-1 if
unknown), phase, whether a Session owns the page, time of the last beat and of the first step's end (seconds since
1970, float64; 0 if there was none).
"""

from __future__ import annotations

import enum
import mmap
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"FTPULSE1"
_SIZE = 4096
_STEP, _BASE, _TOTAL, _PHASE, _OWNED, _TIME, _FIRST = 8, 16, 24, 32, 40, 48, 56


class Phase(enum.IntEnum):
    """What a worker is doing."""

    START = 0
    STEP = 1
    SAVE = 2
    RESTORE = 3
    END = 4


@dataclass(frozen=True)
class Beat:
    """One reading of a pulse page.

    Attributes:
        step: steps completed, counted over the whole run.
        base: steps that were already completed when this attempt began.
        total: steps that the script wants, or None.
        phase: what the worker was doing.
        owned: a Session writes the page (otherwise the steps are optimizer steps that the bootstrap saw).
        time: seconds since 1970 of the last beat; 0.0 if there was none.
        first_step: when this attempt completed its first step; 0.0 if it has not.
    """

    step: int
    base: int
    total: int | None
    phase: Phase
    owned: bool
    time: float
    first_step: float

    @property
    def made_a_step(self) -> bool:
        """Whether this attempt has completed a step."""
        return self.step > self.base


class Pulse:
    """A pulse page that is written. One per worker; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self._stepped = False

    @property
    def owned(self) -> bool:
        """Whether a Session has taken the page over."""
        return bool(struct.unpack_from("<q", self._page, _OWNED)[0])

    def own(self, *, base: int, total: int | None = None) -> None:
        """Take the page over for a Session that starts at step ``base``."""
        self._put(_BASE, base)
        self._put(_STEP, base)
        self.expect(total)
        self._put(_OWNED, 1)
        self._beat()

    def expect(self, total: int | None) -> None:
        """Say how many steps the run wants in all."""
        self._put(_TOTAL, -1 if total is None else total)

    def phase(self, phase: Phase) -> None:
        """Enter a phase."""
        self._put(_PHASE, int(phase))
        self._beat()

    def step(self, step: int) -> None:
        """Say that ``step`` steps are complete."""
        self._put(_STEP, step)
        self._put(_PHASE, int(Phase.STEP))
        self._beat()
        if not self._stepped:
            self._stepped = True
            struct.pack_into("<d", self._page, _FIRST, time.time())

    def _put(self, offset: int, value: int) -> None:
        struct.pack_into("<q", self._page, offset, value)

    def _beat(self) -> None:
        struct.pack_into("<d", self._page, _TIME, time.time())


def create(path: Path) -> None:
    """Create an empty page. Its bytes are written out, so a full disk is an error here and not a signal later."""
    empty = bytearray(_SIZE)
    empty[:8] = _MAGIC
    struct.pack_into("<q", empty, _TOTAL, -1)
    path.write_bytes(empty)


def read(path: Path) -> Beat | None:
    """Read a page; None where there is none or it is something else."""
    try:
        page = path.read_bytes()[:_SIZE]
    except OSError:
        return None
    if len(page) < _SIZE or page[:8] != _MAGIC:
        return None
    step, base, total, phase, owned = struct.unpack_from("<5q", page, _STEP)
    beat, first_step = struct.unpack_from("<2d", page, _TIME)
    known = phase if phase in Phase.__members__.values() else Phase.START
    return Beat(step, base, None if total < 0 else total, Phase(known), bool(owned), beat, first_step)
