"""What one node reads of a dataset in shards whose lengths nobody knows, and when, about. Pure.

Each lane runs through its shards in an order that is known; only when it leaves one is not. The ranks tell how many
samples the shards have had on the average. By that a shard is taken to be due half a shard sooner, and to be in use
half a shard longer, than it would be if all were of that length.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from ftrun.data.filler.course import Stretch, distance
from ftrun.data.filler.shards import SHUFFLED, ShardCourse, lanes_of
from ftrun.data.iterable.lanes import Chains, Plan, lanes
from ftrun.data.position import Position

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftrun.data.filler.course import Way
    from ftrun.data.filler.shards import ShardFiles
    from ftrun.data.position import Recipe

UNKNOWN = 16_384.0
"""Samples of a shard as long as nobody knows: many, so that nothing is taken to be behind that isn't."""
_SLACK = 0.5
_FILES = 256
"""Files of a stretch, about."""
_ENDLESS = 1 << 50
_NEWS = 0.1
"""By which share an average must change to make a difference."""


class ChainCourse:
    """The way through such a dataset; see :class:`ftrun.data.filler.course.Way`.

    Args:
        recipe: of the run.
        shards: their files.
        world_size: ranks that share a global batch.
        ranks: those of the node.
        mean: samples of a shard, on the average of those that were read; 0 where none was.
    """

    def __init__(
        self, recipe: Recipe, shards: ShardFiles, world_size: int, ranks: tuple[int, ...], mean: float = 0.0
    ) -> None:
        self.global_batch = recipe.global_batch
        self.world_size, self.ranks, self.mean = world_size, ranks, mean
        self._recipe, self._shards = recipe, shards
        plan = Plan(recipe.global_batch, recipe.seed, recipe.order == SHUFFLED, 0)
        ways = lanes(plan, len(shards.files), None)
        assert isinstance(ways, Chains)
        self._ways = ways
        self._here = lanes_of(ways.layout, recipe.global_batch, world_size, ranks)
        self._firsts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(shards.files, dtype=np.int64)])
        # Samples of all ranks in which each lane gets one shard further.
        self._turn = (mean or UNKNOWN) * ways.layout.lanes

    def with_mean(self, mean: float) -> ChainCourse:
        """The same way, with another average."""
        return ChainCourse(self._recipe, self._shards, self.world_size, self.ranks, mean)

    def is_news(self, mean: float) -> bool:
        """Whether another average makes a difference."""
        return mean > 0 and abs(mean - self.mean) > _NEWS * self.mean

    @property
    def block(self) -> int:
        """See :attr:`Way.block`."""
        return max(self.global_batch, int(self.samples_for(_FILES)))

    def samples_for(self, files: float) -> float:
        """See :meth:`Way.samples_for`."""
        each_turn = len(self._here) * max(1.0, float(self._firsts[-1]) / len(self._shards.files))
        return files * self._turn / max(1.0, each_turn)

    def stretch(self, start: Position, count: int) -> Stretch | None:
        """See :meth:`Way.stretch`."""
        whole = self.length(start.epoch)
        if start.samples >= whole:
            return self.stretch(Position(start.epoch + 1), count)
        stop = min(start.samples + count, whole)
        before = start.epoch * whole
        first, last = self._turns(before + start.samples), self._turns(before + stop)
        places, files = [], []
        for turn in range(math.ceil(first + _SLACK), math.ceil(last + _SLACK)):
            due = int((turn - _SLACK) * self._turn) - before
            found = self._files_of(turn)
            places += [min(max(due, start.samples), stop - 1)] * len(found)
            files += found
        after = Position(start.epoch + 1) if stop == whole else Position(start.epoch, stop)
        return Stretch(start.epoch, np.array(places, dtype=np.int64), np.array(files, dtype=np.int64), after)

    def under_way(self, start: Position) -> Stretch | None:
        """See :meth:`Way.under_way`: also what may be, as far as the average goes."""
        now = self._turns(start.epoch * self.length(start.epoch) + start.samples)
        turns = range(max(0, math.floor(now - 1 - _SLACK) + 1), math.ceil(now + _SLACK))
        files = [file for turn in turns or range(1) for file in self._files_of(turn)]
        return Stretch(start.epoch, np.full(len(files), start.samples), np.array(files, dtype=np.int64), start)

    def distance(self, of: Position, start: Position) -> float:
        """See :meth:`Way.distance`."""
        return distance(of, start, self.length)

    def next_use(self, indices: NDArray[np.int64], start: Position) -> NDArray[np.float64]:
        """See :meth:`Way.next_use`; infinity for what is never read here."""
        now = self._turns(start.epoch * self.length(start.epoch) + start.samples)
        # Asked for each directory of the cache, with a lock held for all that: no loop over shards.
        turns, wholes = (each[indices] for each in self._visits)
        # The first time that it is still in use, or to come.
        again = np.maximum(0.0, np.ceil((now - 1 - _SLACK - turns) / wholes))
        found: NDArray[np.float64] = np.maximum(0.0, (turns + again * wholes - _SLACK - now) * self._turn)
        return found

    @functools.cached_property
    def _visits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of each file the first turn in which it is read here, infinity for never; and how many turns come between."""
        turns, wholes = np.full(len(self._shards.files), np.inf), np.ones(len(self._shards.files))
        for lane in self._here:
            whole = self._ways.round(lane)
            mine = np.array([self._ways.stop(lane, turn).shard for turn in range(whole)], dtype=np.int64)
            turns[mine], wholes[mine] = np.arange(whole), whole
        return np.repeat(turns, self._shards.files), np.repeat(wholes, self._shards.files)

    def length(self, epoch: int) -> int:
        """See :meth:`Way.length`."""
        usable = self._recipe.usable
        return _ENDLESS if usable is None else usable or self.global_batch

    def _turns(self, samples: float) -> float:
        """How many shards each lane has left behind after so many samples of all ranks."""
        return samples / self._turn

    def _files_of(self, turn: int) -> list[int]:
        """The files that this node's lanes read in a turn."""
        shards = (self._ways.stop(lane, turn).shard for lane in self._here)
        return [file for shard in shards for file in range(int(self._firsts[shard]), int(self._firsts[shard + 1]))]


def shard_course(recipe: Recipe, shards: ShardFiles, world_size: int, ranks: tuple[int, ...]) -> Way:
    """The way through a dataset in shards, whether their lengths are known or not."""
    kind = ChainCourse if shards.lengths is None else ShardCourse
    return kind(recipe, shards, world_size, ranks)
