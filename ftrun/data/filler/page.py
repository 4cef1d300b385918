"""The position page: a small mapped file in which a rank says how far the training is in its data.

Writing it is three stores. Each number is stored and read as a whole; the position is one number, so that a reader
never sees half of it.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from ftrun.data.position import Position

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = 0x31474150_4C494654  # TFILPAG1
_SIZE = 64
_BITS = 40
"""For the samples of an epoch: a million millions. What is left is for epochs."""
_POSITION, _LEFT, _BEATS, _MEAN = 1, 2, 3, 4
_PARTS = 1024
"""Of a sample, in which an average is held."""


class Told(NamedTuple):
    """What a page says.

    Attributes:
        position: the committed one.
        steps_left: that the run will still make; None where nobody knows.
        at: when it was written, in seconds since 1970.
        mean: samples of a shard, on the average, where lengths aren't known; 0 where that isn't, either.
    """

    position: Position
    steps_left: int | None
    at: float
    mean: float = 0.0


class Page:
    """A page, open for writing. One thread writes."""

    def __init__(self, path: Path, position: Position) -> None:
        """Make a page.

        Raises:
            OSError: the disk doesn't take it.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(_SIZE))  # written, not only sized: a full disk would kill us later
            self._numbers = memoryview(mmap.mmap(descriptor, _SIZE)).cast("q")
        finally:
            os.close(descriptor)
        self.write(position, None)
        self._numbers[0] = _MAGIC

    def write(self, position: Position, steps_left: int | None, mean: float = 0.0) -> None:
        """Say how far it is."""
        numbers = self._numbers
        numbers[_MEAN] = int(mean * _PARTS)
        numbers[_LEFT] = -1 if steps_left is None else steps_left
        numbers[_POSITION] = position.epoch << _BITS | position.samples
        numbers[_BEATS] = time.time_ns()


def read(path: Path) -> Told | None:
    """What a page says; None where there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE:
        return None
    numbers = memoryview(data).cast("q")
    if numbers[0] != _MAGIC:
        return None
    packed, left = numbers[_POSITION], numbers[_LEFT]
    position = Position(packed >> _BITS, packed & (1 << _BITS) - 1)
    return Told(position, left if left >= 0 else None, numbers[_BEATS] / 1e9, numbers[_MEAN] / _PARTS)
