"""Which bytes of which files fill a wanted block of a tensor. Pure, and without torch.

A piece is a run of elements, counted row by row in the block that its rank holds. Such a run is cut into blocks that
lie row by row in the file (at most two for each dimension and one more), and what a wanted block has in common with
them is what has to be read.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.plan.pieces import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ftrun.checkpoint.plan.pieces import Piece


@dataclass(frozen=True)
class Part:
    """A stored block that a wanted block needs something of.

    Attributes:
        file: name of the file within the checkpoint.
        offset: byte of the file at which the stored block begins.
        block: the stored block, in coordinates of the whole tensor; it lies in the file row by row.
        common: what is wanted of it.
        itemsize: bytes of an element.
    """

    file: str
    offset: int
    block: Box
    common: Box
    itemsize: int

    @property
    def start(self) -> int:
        """Byte of the file at which the first wanted element begins."""
        return self.offset + position(self.common.offset, self.block) * self.itemsize

    @property
    def stop(self) -> int:
        """First byte of the file behind the last wanted element."""
        last = [first + extent - 1 for first, extent in zip(*_fields(self.common), strict=True)]
        return self.offset + (position(last, self.block) + 1) * self.itemsize


def blocks(box: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut a run of a block's elements into blocks, each with its first element's place in the run's numbering.

    The blocks come in the order of their elements and hold each element of the run once.
    """
    if start >= stop:
        return
    if not box.shape:
        yield start, box
        return
    row = math.prod(box.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _within(box, last, start, stop)
        return
    yield from _within(box, first - 1, start, first * row)
    if first < last:
        yield first * row, Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:]))
    yield from _within(box, last, last * row, stop)


def _within(box: Box, index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """As :func:`blocks`, for a run that lies within one row."""
    before = index * math.prod(box.shape[1:])
    for first, block in blocks(Box(box.offset[1:], box.shape[1:]), start - before, stop - before):
        yield first + before, Box((box.offset[0] + index, *block.offset), (1, *block.shape))


def parts(pieces: Iterable[Piece], itemsize: int, wanted: Box) -> list[Part]:
    """What of the pieces of one tensor fills a wanted block."""
    found = []
    for piece in pieces:
        if piece.box.common(wanted) is None:
            continue
        for first, block in blocks(piece.box, piece.start, piece.stop):
            common = block.common(wanted)
            if common is not None:
                offset = piece.offset + (first - piece.start) * itemsize
                found.append(Part(piece.file, offset, block, common, itemsize))
    return found


def is_filled(found: Iterable[Part], wanted: Box) -> bool:
    """Whether parts, which never overlap in a sound checkpoint, are all of a wanted block."""
    return sum(part.common.numel for part in found) == wanted.numel


def position(offset: Sequence[int], box: Box) -> int:
    """Number of an element of a block, counted row by row; the element by its coordinates in the whole tensor."""
    number = 0
    for here, first, extent in zip(offset, *_fields(box), strict=True):
        number = number * extent + here - first
    return number


def is_run(inner: Box, outer: Box) -> bool:
    """Whether a block's elements follow each other without a gap in a block that holds it."""
    widths = list(zip(inner.shape, outer.shape, strict=True))
    # Below the first dimension with more than one row, rows must be whole.
    below = itertools.dropwhile(lambda each: each[0] == 1, widths)
    return all(mine == whole for mine, whole in list(below)[1:])


def _fields(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offset, box.shape
