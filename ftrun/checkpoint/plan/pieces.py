"""Parts of tensors: which elements of which tensor lie where in which file. Pure, and without torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, order=True)
class Box:
    """A block of a tensor.

    Attributes:
        offset: its first element, in each dimension.
        shape: its extent, in each dimension; as long as ``offset``, both empty for a tensor without dimensions.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """The block that both have, None where that has no element."""
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(min(a + b, c + d) for a, b, c, d in zip(*self._ends(), *other._ends(), strict=True))
        shape = tuple(end - start for start, end in zip(first, last, strict=True))
        return Box(first, shape) if all(extent > 0 for extent in shape) else None

    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offset, self.shape


@dataclass(frozen=True)
class Piece:
    """A run of a tensor's elements in a file.

    Attributes:
        tensor: name of the tensor, unique within its rank's record.
        box: the block of the whole tensor that the rank holds.
        start: first element of the run, counted row by row within the box.
        stop: first element behind it.
        file: name of the file within the checkpoint.
        offset: byte of the file at which the run begins.
    """

    tensor: str
    box: Box
    start: int
    stop: int
    file: str
    offset: int

    def to_json(self) -> list[Any]:
        """As JSON."""
        box = self.box
        return [self.tensor, list(box.offset), list(box.shape), self.start, self.stop, self.file, self.offset]


def share(numel: int, member: int, members: int, granule: int = 1) -> tuple[int, int]:
    """The run of elements, ``(start, stop)``, that one of several holders of the same content stores.

    Runs are equal up to ``granule`` elements, follow each other in the order of the members, and cover everything.
    """
    granules = -(-numel // granule)
    bounds = [min(numel, granule * (granules * each // members)) for each in (member, member + 1)]
    return bounds[0], bounds[1]


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ascending ranks as text: ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@lru_cache(maxsize=1024)  # a record says the same of each of its thousands of tensors
def ranks_of(text: str) -> tuple[int, ...]:
    """Read ranks back.

    Raises:
        ValueError: the text names no ranks, or not in ascending order.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"{text!r:.80} names no ranks")
        ranks.extend(range(int(first), int(last or first) + 1))
    if not ranks or any(after <= before for before, after in itertools.pairwise(ranks)):
        raise ValueError(f"{text!r:.80} names no ranks in order")
    return tuple(ranks)
