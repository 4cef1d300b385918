"""How a global batch is put together from lanes, and which part of it a rank takes. Pure, and the same everywhere.

Lanes come in groups. Batch k takes its samples from the lanes of group ``k % groups``, the same number from each
where that divides. A rank takes one stretch of the batch, lane by lane, so its lanes are the same in every batch of
the group: as long as the ranks divide the lanes of a group, and the workers the groups, each lane is read by one
worker of one rank, and nothing is read twice.

The ranks' parts, one after another, are the global batch: the same list for any number of ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftrun.data.order import Share

# Groups for one, two, four or eight workers; few enough that one batch is mixed from many shards.
_GROUPS = (8, 4, 2, 1)
_FEW = 8


class Layout(NamedTuple):
    """Lanes and their groups.

    Attributes:
        groups: batch k takes its samples from group ``k % groups``.
        width: lanes in a group. Lane ``l`` belongs to group ``l // width``.
    """

    groups: int
    width: int

    @property
    def lanes(self) -> int:
        """Number of lanes in all groups."""
        return self.groups * self.width


class Part(NamedTuple):
    """What one rank takes from one lane for one batch.

    Attributes:
        lane: number of the lane.
        first: samples that the lane has given before.
        size: samples to take, at least 1.
        last: whether no other rank takes later samples of this lane for the same batch.
    """

    lane: int
    first: int
    size: int
    last: bool


def layout(global_batch: int, shards: int, *, lengths_known: bool) -> Layout:
    """Choose lanes, for at most one lane for each shard.

    Args:
        global_batch: samples in a batch.
        shards: number of shards, at least 1.
        lengths_known: lanes may be cut to one length. If not, all lanes get the same number of shards, as one that
            has fewer would begin again sooner, and its samples would come up more often.
    """
    free = _free(global_batch, shards)
    if lengths_known or shards % free.lanes == 0:
        return free
    even = max(
        (
            Layout(groups, width)
            for groups in _GROUPS
            for width in _divisors(global_batch)
            if shards % (groups * width) == 0
        ),
        key=lambda each: (each.lanes, each.width),
    )
    return Layout(1, shards) if even.lanes < _FEW and shards <= global_batch else even


def fitting(global_batch: int, world_size: int, shards: int, *, lengths_known: bool) -> int | None:
    """A number of shards, near to or above another, of which each rank gets lanes of its own; None for none found."""
    candidates = [*(8 * world_size * each for each in range(1, 9)), 8 * global_batch]
    for each in sorted(each for each in candidates if each > shards):
        if layout(global_batch, each, lengths_known=lengths_known).width % world_size == 0:
            return each
    return None


def _free(global_batch: int, shards: int) -> Layout:
    # Of few shards as many for ranks as for workers; of many, eight groups. An even number, if there is one, since
    # there are mostly two ranks or a multiple.
    most = max(math.isqrt(shards), shards // _GROUPS[0])
    width = max((each for each in _divisors(global_batch) if each <= most), key=lambda each: (each % 2 == 0, each))
    return Layout(next(each for each in _GROUPS if each * width <= shards), width)


def _divisors(number: int) -> list[int]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in low]


def lane_lengths(layout: Layout, global_batch: int, batches: int) -> NDArray[np.int64]:
    """Samples that each lane gives in the first ``batches`` batches; int64, one for each lane."""
    visits = (batches + layout.groups - 1 - np.arange(layout.groups, dtype=np.int64)) // layout.groups
    slots = np.arange(layout.width, dtype=np.int64)
    return _given(visits[:, None] * global_batch, slots[None, :], layout.width).reshape(-1)


def parts(layout: Layout, global_batch: int, batch: int, share: Share) -> list[Part]:
    """What one rank takes for one batch, in the order of the lanes.

    Args:
        layout: of the lanes.
        global_batch: samples in a batch.
        batch: number of the batch, from 0.
        share: the rank and the world size.
    """
    visit, group = divmod(batch, layout.groups)
    slots = np.arange(layout.width, dtype=np.int64)
    firsts = _given(visit * global_batch, slots, layout.width)
    ends = np.cumsum(_given((visit + 1) * global_batch, slots, layout.width) - firsts)
    begin, end = (global_batch * rank // share.world_size for rank in (share.rank, share.rank + 1))
    return _stretch(firsts, ends, begin, end, group * layout.width)


def _given(samples: int | NDArray[np.int64], slots: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """How many of a group's first ``samples`` samples come from each of its lanes: they are dealt out in turn."""
    return np.asarray((samples - slots + width - 1) // width, dtype=np.int64)


def _stretch(firsts: NDArray[np.int64], ends: NDArray[np.int64], begin: int, end: int, first_lane: int) -> list[Part]:
    found = []
    slot = int(np.searchsorted(ends, begin, side="right"))
    while begin < end:
        stop = min(int(ends[slot]), end)
        if stop > begin:
            before = int(ends[slot - 1]) if slot else 0
            first = int(firsts[slot]) + begin - before
            found.append(Part(first_lane + slot, first, stop - begin, stop == int(ends[slot])))
        begin, slot = max(begin, stop), slot + 1
    return found
