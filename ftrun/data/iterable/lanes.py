"""Which shards a lane runs through: in spans of one length where lengths are known, else in chains without end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ftrun.data.feistel import Permutation
from ftrun.data.iterable.layout import Layout, lane_lengths, layout

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Plan(NamedTuple):
    """What decides, with the shards and their lengths, which sample is where.

    Attributes:
        global_batch: samples in a batch.
        seed: of the order of shards, and of random numbers.
        shuffle: shards come in an order of its own for each epoch.
        epoch: from 0; always 0 for chains.
    """

    global_batch: int
    seed: int
    shuffle: bool
    epoch: int


class Stop(NamedTuple):
    """One shard on the way of a lane.

    Attributes:
        shard: number of the shard.
        epoch: how often the shard has been read before; the epoch of its random numbers.
        first: number, in the shard, of the first sample that belongs to the lane.
        end: number after the last one; None where the shard says when it ends.
    """

    shard: int
    epoch: int
    first: int
    end: int | None


class Lanes(Protocol):
    """The ways of all lanes."""

    layout: Layout

    def stop(self, lane: int, turn: int) -> Stop:
        """The shard that a lane comes to after ``turn`` others."""
        ...

    def find(self, lane: int, sample: int) -> tuple[int, int] | None:
        """Turn and number in the shard of a lane's sample; None where that isn't known."""
        ...

    def round(self, lane: int) -> int:
        """Turns after which a lane has been to all of its shards."""
        ...


def lanes(plan: Plan, shards: int, lengths: NDArray[np.int64] | None, *, one_for_each_rank: bool = False) -> Lanes:
    """The ways of all lanes in one epoch.

    Args:
        plan: what else decides.
        shards: number of shards.
        lengths: samples in each shard; int64, one for each shard; None where they aren't known.
        one_for_each_rank: shard r is what rank r alone can read.
    """
    if one_for_each_rank:
        return Chains(Layout(1, shards), np.arange(shards))
    made = layout(plan.global_batch, shards, lengths_known=lengths is not None)
    order = Permutation(shards, plan.seed, plan.epoch).take(0, shards) if plan.shuffle else np.arange(shards)
    if lengths is None:
        return Chains(made, order)
    return Spans(made, order, lengths, plan)


class Spans:
    """All shards one after another, cut into one stretch for each lane; no sample is in two of them.

    Samples that don't fill a last global batch lie between the stretches, and at the end: with them, as far as they
    go, a stretch begins where a shard does. One that begins inside a shard costs its reader what is before.
    """

    def __init__(self, made: Layout, order: NDArray[np.int64], lengths: NDArray[np.int64], plan: Plan) -> None:
        self.layout = made
        self._epoch = plan.epoch
        self._order = order[lengths[order] > 0]
        self._starts = _sums(lengths[self._order])
        batches = int(self._starts[-1]) // plan.global_batch
        self._begins, self._ends = _stretches(lane_lengths(made, plan.global_batch, batches), self._starts)

    def stop(self, lane: int, turn: int) -> Stop:
        """See :meth:`Lanes.stop`."""
        place = self._place(int(self._begins[lane])) + turn
        start, end = int(self._starts[place]), int(self._starts[place + 1])
        first = max(int(self._begins[lane]) - start, 0)
        return Stop(int(self._order[place]), self._epoch, first, min(int(self._ends[lane]), end) - start)

    def find(self, lane: int, sample: int) -> tuple[int, int]:
        """See :meth:`Lanes.find`."""
        at = int(self._begins[lane]) + sample
        place = self._place(at)
        return place - self._place(int(self._begins[lane])), at - int(self._starts[place])

    def round(self, lane: int) -> int:
        """See :meth:`Lanes.round`."""
        return self._place(int(self._ends[lane])) - self._place(int(self._begins[lane])) + 1

    def _place(self, at: int) -> int:
        return int(np.searchsorted(self._starts, at, side="right")) - 1


class Chains:
    """The same number of shards for each lane, one after another, and again from the first, without end."""

    def __init__(self, made: Layout, order: NDArray[np.int64]) -> None:
        self.layout = made
        self._order = order

    def stop(self, lane: int, turn: int) -> Stop:
        """See :meth:`Lanes.stop`."""
        again, turn = divmod(turn, self.round(lane))
        return Stop(int(self._order[lane + turn * self.layout.lanes]), again, 0, None)

    def find(self, lane: int, sample: int) -> None:
        """See :meth:`Lanes.find`."""
        return

    def round(self, lane: int) -> int:
        """See :meth:`Lanes.round`."""
        return len(range(lane, self._order.size, self.layout.lanes))


def _stretches(lengths: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each lane begins and ends in all shards one after another."""
    spare, at = int(starts[-1] - lengths.sum()), 0
    begins = np.empty_like(lengths)
    for lane, length in enumerate(lengths.tolist()):
        to_next = int(starts[np.searchsorted(starts, at)]) - at
        if to_next <= spare:
            spare, at = spare - to_next, at + to_next
        begins[lane] = at
        at += length
    return begins, begins + lengths


def _sums(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
