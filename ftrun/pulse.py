"""The pulse page: one small mapped file per rank in which a worker says how far it is.

Writing it is a few stores into shared memory: no lock, no system call, nothing to wait for. The page outlives the
worker, so the agent can still read how far a dead rank had come.

Layout, 8 bytes each in the machine's own order, so that each is stored and read as a whole: magic, steps completed,
first step of this attempt, total steps (-1 if unknown), phase, whether a Session owns the page, time of the last beat,
of the first step's end and of the phase's beginning (seconds since 1970, float64; 0 if there was none), then the
marks, then what was read of a checkpoint from each tier, then the histogram. A reader may come between two stores. The
phase's beginning is therefore stored before the phase: what such a reader sees is at worst a wait that looks too short.

The histogram counts how long the worker went without a beat while it was in ``Phase.STEP``: one stretch for each step,
two where a save or an evaluation interrupts it, and none for those themselves. Bucket ``i`` counts what took less than
:func:`upper_bound` of ``i`` and not less than that of ``i - 1``. There are four buckets to a doubling, from 15
microseconds to 9 hours, so that a quantile is at most a quarter too high.
"""

from __future__ import annotations

import contextlib
import enum
import math
import mmap
import struct
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    Mark = Literal["booted", "script", "group", "grouped", "restored"]

_MAGIC = b"FTPULSE2"
_FORMER_MAGIC = b"FTPULSE1"  # the same without phase's beginning, marks and histogram, which are zero there
_SIZE = 4096

# Places in the page, counted in 8 bytes.
_STEP, _BASE, _TOTAL, _PHASE, _OWNED, _TIME, _FIRST, _SINCE, _MARKS = 1, 2, 3, 4, 5, 6, 7, 8, 9
_READ = 16
_HISTOGRAM = 32

_NUM_BUCKETS = 128
_LOWEST_EXPONENT = -16
"""As in :func:`math.frexp`: the first four buckets end at 2 ** -16 seconds."""


class Phase(enum.IntEnum):
    """What a worker is doing."""

    START = 0
    STEP = 1
    SAVE = 2
    RESTORE = 3
    END = 4
    FIRST_STEP = 5
    EVAL = 6


@dataclass(frozen=True)
class Marks:
    """When a worker came to a point of its start, in seconds since 1970; 0.0 for what has not happened or isn't known.

    Attributes:
        booted: its process was taken up for this attempt: the bootstrap began, or a standby was promoted.
        script: the script began to execute.
        group: imports are over: making the process group, or opening the Session, began.
        grouped: the process group is there.
        restored: what was tracked has its state.
    """

    booted: float = 0.0
    script: float = 0.0
    group: float = 0.0
    grouped: float = 0.0
    restored: float = 0.0


_MARK_PLACES = {field.name: _MARKS + index for index, field in enumerate(fields(Marks))}
TIERS = ("memory", "peer", "local", "root")
"""Where a worker has read its checkpoint from, in the page's order."""


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
        phase_since: when the phase, or the step under way, began; seconds since 1970, 0.0 before the first beat.
        marks: when it came to the points of its start.
        steps: histogram of stretches in ``Phase.STEP``, see the module; ends with its last bucket that isn't empty.
        read: bytes of a checkpoint that it has read, as :data:`TIERS` has them.
    """

    step: int
    base: int
    total: int | None
    phase: Phase
    owned: bool
    time: float
    first_step: float
    phase_since: float = 0.0
    marks: Marks = Marks()
    steps: tuple[int, ...] = ()
    read: tuple[int, ...] = (0,) * len(TIERS)

    @property
    def made_a_step(self) -> bool:
        """Whether this attempt has completed a step."""
        return self.step > self.base


class Pulse:
    """A pulse page that is written. Every method may be called from any thread.

    A process may have several of one page; then one at a time calls :meth:`phase` and :meth:`step`.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            page = memoryview(mmap.mmap(file.fileno(), _SIZE))
        # Casts, and not struct.pack_into: they store 8 bytes at once.
        self._integers = page.cast("q")
        self._floats = page.cast("d")
        self._in_step = False
        self._stretch = 0.0
        self._stepped = False

    @property
    def owned(self) -> bool:
        """Whether a Session has taken the page over."""
        return bool(self._integers[_OWNED])

    def own(self, *, base: int, total: int | None = None) -> None:
        """Take the page over for a Session that starts at step ``base``."""
        self._integers[_BASE] = base
        self._integers[_STEP] = base
        self.expect(total)
        self._integers[_OWNED] = 1
        self._floats[_TIME] = time.time()

    def expect(self, total: int | None) -> None:
        """Say how many steps the run wants in all."""
        self._integers[_TOTAL] = -1 if total is None else total

    def mark(self, name: Mark, at: float | None = None) -> None:
        """Note when the worker came to a point of its start; only the first time counts.

        Args:
            name: which point.
            at: seconds since 1970; now by default.
        """
        place = _MARK_PLACES[name]
        if not self._floats[place]:
            self._floats[place] = time.time() if at is None else at

    def restored(self, read: Mapping[str, int]) -> None:
        """Say how many bytes of a checkpoint were read, by the tier that they came from."""
        for index, tier in enumerate(TIERS):
            self._integers[_READ + index] = read.get(tier, 0)

    def phase(self, phase: Phase) -> None:
        """Enter a phase, or the same one anew."""
        self._count_stretch()
        self._in_step = phase is Phase.STEP
        now = time.time()
        self._floats[_SINCE] = now
        self._integers[_PHASE] = phase
        self._floats[_TIME] = now

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase for the length of a block, and then in the one before."""
        before = self._integers[_PHASE]
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(Phase(before))

    def step(self, step: int) -> None:
        """Say that ``step`` steps are complete; the next one begins, in ``Phase.STEP``."""
        self._count_stretch()
        self._in_step = True
        now = time.time()
        self._floats[_SINCE] = now
        self._integers[_STEP] = step
        self._integers[_PHASE] = Phase.STEP
        self._floats[_TIME] = now
        if not self._stepped:
            self._stepped = True
            self._floats[_FIRST] = now

    def _count_stretch(self) -> None:
        """A stretch without a beat ends here. Not by the wall clock: that one may be set."""
        now = time.monotonic()
        if self._in_step:
            self._integers[_HISTOGRAM + bucket(now - self._stretch)] += 1
        self._stretch = now


def bucket(seconds: float) -> int:
    """The bucket of the histogram that counts a duration."""
    if seconds <= 0.0:
        return 0
    mantissa, exponent = math.frexp(seconds)
    index = (exponent - _LOWEST_EXPONENT) * 4 + int(mantissa * 8.0) - 4
    return min(max(index, 0), _NUM_BUCKETS - 1)


def upper_bound(index: int) -> float:
    """Seconds that end a bucket."""
    exponent, quarter = divmod(index, 4)
    return math.ldexp(0.5 + (quarter + 1) / 8, exponent + _LOWEST_EXPONENT)


def quantile(steps: Sequence[int], share: float) -> float:
    """Seconds within which a share of the stretches of a histogram stayed; 0.0 if there are none.

    Args:
        steps: a histogram, as in :class:`Beat`.
        share: from 0 to 1; 1 asks for the longest.
    """
    wanted = share * sum(steps)
    seen = 0
    for index, count in enumerate(steps):
        seen += count
        if count and seen >= wanted:
            return upper_bound(index)
    return 0.0


def create(path: Path) -> None:
    """Create an empty page. Its bytes are written out, so a full disk is an error here and not a signal later."""
    empty = bytearray(_SIZE)
    empty[:8] = _MAGIC
    struct.pack_into("=q", empty, 8 * _TOTAL, -1)
    path.write_bytes(empty)


def read(path: Path) -> Beat | None:
    """Read a page; None where there is none, or it is something else, torn, or makes no sense."""
    try:
        with path.open("rb", buffering=0) as file:
            page = file.read(_SIZE)
    except OSError:
        return None
    if page is None or len(page) < _SIZE or page[:8] not in (_MAGIC, _FORMER_MAGIC):
        return None
    step, base, total, phase, owned = struct.unpack_from("=5q", page, 8 * _STEP)
    times = struct.unpack_from(f"={3 + len(_MARK_PLACES)}d", page, 8 * _TIME)
    counts = struct.unpack_from(f"={_NUM_BUCKETS}q", page, 8 * _HISTOGRAM)
    restored = struct.unpack_from(f"={len(TIERS)}q", page, 8 * _READ)
    if min(step, base, *counts, *restored) < 0 or not all(math.isfinite(each) and each >= 0.0 for each in times):
        return None
    known = Phase(phase) if phase in Phase.__members__.values() else Phase.START
    beat, first_step, since, *marks = times
    return Beat(
        step=step,
        base=base,
        total=None if total < 0 else total,
        phase=known,
        owned=bool(owned),
        time=beat,
        first_step=first_step,
        phase_since=since,
        marks=Marks(*marks),
        steps=_trimmed(counts),
        read=restored,
    )


def _trimmed(counts: tuple[int, ...]) -> tuple[int, ...]:
    last = max((index for index, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]
