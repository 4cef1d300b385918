"""What one node reads of a dataset in shards, and when it reads a file next. Pure.

A shard's files are due when the first batch comes that takes a sample of it, and in use until the last one: both follow
from the lengths of the shards, as the loader's lanes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ftrun.data.filler.course import Stretch, distance
from ftrun.data.iterable.lanes import Plan, Spans, lanes
from ftrun.data.iterable.layout import lane_lengths, parts
from ftrun.data.order import Share
from ftrun.data.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ftrun.data.iterable.layout import Layout
    from ftrun.data.position import Recipe

SHUFFLED = "shuffled-shards-v1"
_BLOCK = 256
"""Files of a stretch, about."""


@dataclass(frozen=True)
class ShardFiles:
    """A dataset's shards, as far as its files go.

    Attributes:
        files: how many files each shard has; they are numbered through, shard by shard.
        lengths: samples in each shard; None where nobody knows them.
    """

    files: tuple[int, ...]
    lengths: tuple[int, ...] | None


class _Uses(NamedTuple):
    """The readings of files in one epoch, in the order in which they begin.

    Attributes:
        files: which are read; int64.
        begins: places of the epoch from which on they are; int64.
        ends: and up to which; int64.
    """

    files: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def lanes_of(made: Layout, global_batch: int, world_size: int, ranks: tuple[int, ...]) -> list[int]:
    """The lanes that some ranks read."""
    if len(set(ranks)) >= world_size:
        return list(range(made.lanes))
    taken = (
        part.lane
        for batch in range(made.groups)
        for rank in ranks
        for part in parts(made, global_batch, batch, Share(rank, world_size))
    )
    return sorted(set(taken))


class ShardCourse:
    """The way through a dataset in shards; see :class:`ftrun.data.filler.course.Way`.

    Args:
        recipe: of the run.
        shards: their files and lengths.
        world_size: ranks that share a global batch.
        ranks: those of the node.
    """

    def __init__(self, recipe: Recipe, shards: ShardFiles, world_size: int, ranks: tuple[int, ...]) -> None:
        self.global_batch = recipe.global_batch
        self.world_size, self.ranks = world_size, ranks
        self._recipe, self._files = recipe, shards.files
        assert shards.lengths is not None
        self._lengths = np.asarray(shards.lengths, dtype=np.int64)
        self._firsts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(shards.files, dtype=np.int64)])
        self._usable = int(self._lengths.sum()) // recipe.global_batch * recipe.global_batch
        self._uses = lru_cache(maxsize=3)(self._computed)

    def samples_for(self, files: float) -> float:
        """See :meth:`Way.samples_for`."""
        return files * self._usable / max(1, len(self._uses(0).files))

    @property
    def block(self) -> int:
        """See :attr:`Way.block`."""
        return max(self.global_batch, int(self.samples_for(_BLOCK)))

    def stretch(self, start: Position, count: int) -> Stretch | None:
        """See :meth:`Way.stretch`: files whose reading begins there."""
        if not self._usable:
            return None
        if start.samples >= self._usable:
            return self.stretch(Position(start.epoch + 1), count)
        stop = min(start.samples + count, self._usable)
        uses = self._uses(start.epoch)
        first, last = np.searchsorted(uses.begins, [start.samples, stop])
        after = Position(start.epoch + 1) if stop == self._usable else Position(start.epoch, stop)
        return Stretch(start.epoch, uses.begins[first:last], uses.files[first:last], after)

    def under_way(self, start: Position) -> Stretch | None:
        """See :meth:`Way.under_way`."""
        uses = self._uses(start.epoch)
        open_there = (uses.begins < start.samples) & (uses.ends > start.samples)
        files = uses.files[open_there]
        return Stretch(start.epoch, np.full(len(files), start.samples), files, start)

    def distance(self, of: Position, start: Position) -> float:
        """See :meth:`Way.distance`."""
        return distance(of, start, self.length)

    def next_use(self, indices: NDArray[np.int64], start: Position) -> NDArray[np.float64]:
        """See :meth:`Way.next_use`."""
        ahead = float(self._usable - start.samples)
        found = np.full(int(self._firsts[-1]), ahead + 2.0 * self._usable)
        for epoch, before in ((start.epoch + 1, -ahead), (start.epoch, float(start.samples))):
            uses = self._uses(epoch)
            to_come = uses.ends > before
            away = np.maximum(uses.begins[to_come] - before, 0.0)
            np.minimum.at(found, uses.files[to_come], away)
        return found[indices]

    def length(self, epoch: int) -> int:
        """See :meth:`Way.length`."""
        return self._usable or self.global_batch

    def _computed(self, epoch: int) -> _Uses:
        recipe, count = self._recipe, len(self._files)
        plan = Plan(recipe.global_batch, recipe.seed, recipe.order == SHUFFLED, epoch)
        ways = lanes(plan, count, self._lengths)
        assert isinstance(ways, Spans)
        found = sorted(use for lane in self._lanes(ways.layout) for use in self._of_lane(ways, lane))
        table = np.array(found, dtype=np.int64).reshape(-1, 3)
        return _Uses(table[:, 2], table[:, 0], table[:, 1])

    def _lanes(self, made: Layout) -> list[int]:
        return lanes_of(made, self.global_batch, self.world_size, self.ranks)

    def _of_lane(self, ways: Spans, lane: int) -> Iterator[tuple[int, int, int]]:
        """Begin, end and number of each file that a lane reads."""
        made, batch = ways.layout, self.global_batch
        length = int(lane_lengths(made, batch, self._usable // batch)[lane])
        group, slot = divmod(lane, made.width)

        def visit(sample: int) -> int:
            """The batch that takes a sample of the lane: samples are dealt out to the lanes of a group in turn."""
            return (sample * made.width + slot) // batch * made.groups + group

        given = turn = 0
        while given < length:
            stop = ways.stop(lane, turn)
            assert stop.end is not None
            turn, size = turn + 1, stop.end - stop.first
            if size > 0:
                begin, end = visit(given) * batch, (visit(given + size - 1) + 1) * batch
                for file in range(int(self._firsts[stop.shard]), int(self._firsts[stop.shard + 1])):
                    yield begin, end, file
                given += size
