"""Which parts of tensors are moved at once and which later, and of what is moved later, which are probes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftrun.checkpoint.staging.moves import LARGE, PROBES, SLICE

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Parts:
    """What to do at one save.

    Attributes:
        now: what is moved at once.
        probes: what is moved at once, and looked at again in the end.
        later: all else.
        small: those of ``later`` that are all of a tensor.
    """

    now: Cut
    probes: Cut
    later: Cut
    small: Cut


@dataclass(frozen=True)
class Cut:
    """Parts of tensors side by side, each an array.

    Attributes:
        of: number of each one's tensor.
        starts: where they begin within their tensors, in bytes.
        sizes: theirs, in bytes.
    """

    of: Any
    starts: Any
    sizes: Any

    @classmethod
    def of_all(cls, sizes: Sequence[int]) -> Cut:
        """All of some tensors, in slices; what is less than a slice is part of the one before."""
        runs = []
        for number, size in enumerate(sizes):
            count = max(1, size // SLICE)
            runs += [(number, SLICE * at, SLICE) for at in range(count - 1)]
            runs.append((number, SLICE * (count - 1), size - SLICE * (count - 1)))
        of, starts, each = np.array(runs, dtype=np.uint64).reshape(-1, 3).T
        return cls(of.astype(np.int64), starts.copy(), each.copy())

    def at(self, late: Any, turn: int) -> Parts:
        """Share them out, so that it shows later whether one was written to before it was moved.

        Over :data:`~ftrun.checkpoint.staging.moves.PROBES` saves every byte is in a probe once. At each save a part of
        every large tensor is, so that what changes one as a whole is seen at once.

        Args:
            late: of each tensor whether it may be moved later.
            turn: number of the save.
        """
        waits, large = late[self.of], self.sizes >= LARGE
        few = np.flatnonzero(waits & ~large)
        chosen = (np.arange(len(few)) + turn) % PROBES == 0
        small = self._some(few[~chosen])
        many = self._some(waits & large)
        part = many.sizes // PROBES
        first = part * (turn % PROBES)
        last = many.sizes if turn % PROBES == PROBES - 1 else first + part
        head, probe, tail = many._from(0 * first, first), many._from(first, last), many._from(last, many.sizes)
        return Parts(self._some(~waits), self._some(few[chosen])._and(probe), head._and(tail)._and(small), small)

    def _some(self, which: Any) -> Cut:
        return Cut(self.of[which], self.starts[which], self.sizes[which])

    def _from(self, first: Any, last: Any) -> Cut:
        return Cut(self.of, self.starts + first, last - first)

    def _and(self, other: Cut) -> Cut:
        pairs = ((self.of, other.of), (self.starts, other.starts), (self.sizes, other.sizes))
        return Cut(*map(np.concatenate, pairs))
