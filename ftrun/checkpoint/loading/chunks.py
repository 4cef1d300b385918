"""Reading one chunk of a file: each byte once, straight to where it is wanted, with its checksum on the way.

Bytes are summed up while they are still in the processor's cache, so verifying costs little beside reading. All of
the chunk is read, whatever is wanted of it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from crc32c import crc32c

from ftrun.checkpoint.checksums import CHUNK
from ftrun.checkpoint.loading.pages import is_there, make_ready
from ftrun.checkpoint.storage.writing import behind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SLICE = 2**20
"""Bytes that are read, summed up and passed on at a time."""

_ALIGN = 64
_MAX_VIEWS = 256  # of one system call


@dataclass(frozen=True)
class Chunk:
    """A chunk of a file of a checkpoint.

    Attributes:
        file: name of the file within the checkpoint.
        size: what the file's size must be.
        number: of the chunk in the file.
        crc: what its CRC32C must be.
    """

    file: str
    size: int
    number: int
    crc: int

    @property
    def start(self) -> int:
        """Its first byte in the file."""
        return self.number * CHUNK

    @property
    def stop(self) -> int:
        """First byte behind it."""
        return min(self.start + CHUNK, self.size)

    def require(self, crc: int) -> None:
        """Refuse bytes that aren't those that were committed.

        Args:
            crc: their CRC32C.

        Raises:
            Damaged: it is another one.
        """
        if crc != self.crc:
            raise Damaged(f"chunk {self.number} (bytes {self.start} to {self.stop - 1}) fails its checksum")


class Use(Protocol):
    """What a range of a file's bytes is wanted for. Several threads give it different bytes."""

    @property
    def start(self) -> int:
        """Its first byte in the file."""

    @property
    def stop(self) -> int:
        """First byte behind it."""

    def memory(self, start: int, stop: int) -> memoryview | None:
        """Where these bytes of the file can be read straight to; None where they can't."""

    def take(self, start: int, data: memoryview) -> None:
        """Take bytes, from ``start`` of the file on."""


class Damaged(Exception):
    """A copy of a file is not what it must be; the text follows the file's name."""


class Into:
    """A use: bytes that lie in memory as they lie in the file."""

    def __init__(self, start: int, target: memoryview) -> None:
        self.start = start
        self.stop = start + len(target)
        self._target = target

    def memory(self, start: int, stop: int) -> memoryview | None:
        """The part of the target."""
        return self._target[start - self.start : stop - self.start]

    def take(self, start: int, data: memoryview) -> None:
        """Copy them."""
        self._target[start - self.start : start - self.start + len(data)] = data


_Span = tuple[int, int, "tuple[Use, ...]"]
"""First byte, first byte behind, and the uses of all between."""

_Step = tuple[memoryview, "_Span | None"]
"""Memory to read to, and the span whose uses take their bytes from there; None where that is their own memory."""


def read_chunk(descriptor: int, chunk: Chunk, uses: Sequence[Use], scratch: memoryview) -> None:
    """Read a chunk, and give each use its bytes.

    Args:
        descriptor: the file.
        chunk: which.
        uses: those that want something of it.
        scratch: :data:`SCRATCH` bytes for this thread alone.

    Raises:
        Damaged: it ends early, or fails its checksum. Uses have got bytes all the same.
        OSError: reading failed.
    """
    if len(uses) == 1 and uses[0].start <= chunk.start and uses[0].stop >= chunk.stop:
        whole = uses[0].memory(chunk.start, chunk.stop)
        if whole is not None:
            _read_whole(descriptor, chunk, whole)
            return
    crc = 0
    for start, steps in _batches(_spans(chunk, uses), scratch):
        for view, _ in steps:
            make_ready(view)
        _fill(descriptor, start, [view for view, _ in steps], chunk)
        for view, span in steps:
            crc = crc32c(view, crc)
            if span is not None:
                for use in span[2]:
                    use.take(span[0], view)
    chunk.require(crc)


def _read_whole(descriptor: int, chunk: Chunk, target: memoryview) -> None:
    """Read a chunk all of which is wanted in one place, as it is nearly always."""
    crc, fresh = 0, not is_there(target)
    for first in range(0, len(target), SLICE):
        view = target[first : first + SLICE]
        if fresh:
            make_ready(view)
        _fill(descriptor, chunk.start + first, [view], chunk)
        crc = crc32c(view, crc)
    chunk.require(crc)


SCRATCH = SLICE + _ALIGN * _MAX_VIEWS
"""Bytes of scratch memory that reading a chunk needs."""


def _spans(chunk: Chunk, uses: Iterable[Use]) -> Iterator[_Span]:
    """Cut a chunk at the bounds of the uses and into slices."""
    ordered = sorted(uses, key=lambda use: use.start)
    at = chunk.start
    for number, use in enumerate(ordered):
        start, stop = max(use.start, chunk.start), min(use.stop, chunk.stop)
        if start < at or (number + 1 < len(ordered) and ordered[number + 1].start < stop):
            yield from _overlapping(chunk, ordered[number:], at)
            return
        yield from _slices(at, start, ())
        yield from _slices(start, stop, (use,))
        at = stop
    yield from _slices(at, chunk.stop, ())


def _overlapping(chunk: Chunk, ordered: Sequence[Use], at: int) -> Iterator[_Span]:
    """As :func:`_spans`, from some byte on, for uses that may want the same bytes."""
    bounds = {min(max(bound, at), chunk.stop) for use in ordered for bound in (use.start, use.stop)}
    waiting, active = list(reversed(ordered)), list[Use]()
    for start, stop in itertools.pairwise(sorted({at, chunk.stop, *bounds})):
        while waiting and waiting[-1].start <= start:
            active.append(waiting.pop())
        active = [use for use in active if use.stop > start]
        yield from _slices(start, stop, tuple(active))


def _slices(start: int, stop: int, uses: tuple[Use, ...]) -> Iterator[_Span]:
    for first in range(start, stop, SLICE):
        yield first, min(first + SLICE, stop), uses


def _batches(spans: Iterable[_Span], scratch: memoryview) -> Iterator[tuple[int, list[_Step]]]:
    """Join spans that follow each other to reads of about a slice, each span with the memory that it is read to."""
    batch: list[_Step] = []
    begin = end = used = 0
    for span in spans:
        start, stop, uses = span
        if batch and (start != end or stop - begin > SLICE or len(batch) == _MAX_VIEWS):
            yield begin, batch
            batch = []
        if not batch:
            begin, used = start, 0
        view = uses[0].memory(start, stop) if len(uses) == 1 else None
        if view is not None:
            batch.append((view, None))
        else:
            used += (start - used) % _ALIGN  # as aligned as it is in the file
            batch.append((scratch[used : used + stop - start], span if uses else None))
            used += stop - start
        end = stop
    if batch:
        yield begin, batch


def _fill(descriptor: int, start: int, views: list[memoryview], chunk: Chunk) -> None:
    wanted = sum(map(len, views))
    done = os.preadv(descriptor, views, start)
    while done < wanted:
        rest = behind(views, done)
        count = os.preadv(descriptor, rest, start + done)
        if count == 0:
            raise Damaged(f"ends before its {chunk.size} bytes")
        done += count
