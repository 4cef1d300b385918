"""Fetching ahead in the loader's own process, for loaders that no Session has made."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ftrun.data.filler import orders
from ftrun.data.filler.chains import shard_course
from ftrun.data.filler.course import Course
from ftrun.data.filler.filler import Filler
from ftrun.data.filler.lane import Bounds, Lane
from ftrun.data.filler.read_files import mean_length, read_files

if TYPE_CHECKING:
    from ftrun.data.filler.course import Way
    from ftrun.data.filler.orders import EpochOrder
    from ftrun.data.filler.read_files import ReadFiles
    from ftrun.data.position import Position

THREADS = 8
_SAMPLES = 4096
"""Each rank fetches for itself here: together they go as far as a node's filler."""


class Idle:
    """For loaders whose data lies in no cache."""

    def at(self, position: Position) -> None:
        """Nothing is done about it."""


class OwnFiller:
    """Threads that fetch ahead of one loader, and end with it.

    Args:
        lane: what is fetched.
        source: of the loader.
    """

    def __init__(self, lane: Lane, source: Any) -> None:
        self._lane = lane
        self._source = source
        self._filler = Filler(THREADS)
        self._filler.follow([lane])
        weakref.finalize(self, _stop, self._filler, os.getpid())

    def at(self, position: Position) -> None:
        """The committed position is this now."""
        self._filler.learned(self._lane, mean_length(self._source))
        # Else threads would be woken at each step, and take turns with the training for the interpreter.
        if not self._lane.rests_at(position):
            self._filler.moved(self._lane, position, None)


def _stop(filler: Filler, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has none of the threads, and perhaps the lock of one
        filler.stop()


def own_filler(loader: Any) -> OwnFiller | Idle:
    """What fetches ahead of a loader that nobody else fetches ahead of. Called at its first loop.

    Args:
        loader: an :class:`ftrun.DataLoader`.
    """
    found = read_files(loader)
    if found is None or (found.shards is None and orders.must_be_written(loader.recipe)):
        return Idle()
    files = found.files
    # Of its own: what the training process has open belongs to its reads.
    own = type(files).from_spec(files.spec())
    most = Bounds().bytes if files.limit is None else max(1, files.limit // 2)
    lane = Lane("own", _course(loader, found), found.urls, own, Bounds(_SAMPLES, most), loader.position)
    return OwnFiller(lane, loader.source)


def _course(loader: Any, found: ReadFiles) -> Way:
    recipe, share = loader.recipe, loader.share
    if found.shards is not None:
        return shard_course(recipe, found.shards, share.world_size, (share.rank,))

    @lru_cache(maxsize=4)
    def computed(epoch: int) -> EpochOrder | None:
        return orders.computed(recipe, epoch)

    return Course(recipe.global_batch, share.world_size, (share.rank,), computed)
