"""What the loader sees of a dataset that is read in order: an epoch's batches, and state beyond the position."""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

from ftrun.data.iterable.datasets import can_seek, shards_of
from ftrun.data.iterable.lanes import Plan, lanes
from ftrun.data.iterable.layout import fitting, parts
from ftrun.data.iterable.marks import VERSION, Book
from ftrun.data.iterable.skipping import Skip, forecast
from ftrun.data.words import whole
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ftrun.data.iterable.fetcher import Envelope, ShardFetcher, Ticket
    from ftrun.data.iterable.lanes import Lanes
    from ftrun.data.iterable.layout import Part
    from ftrun.data.iterable.marks import Mark
    from ftrun.data.order import Share
    from ftrun.data.position import Position, Recipe

_log = logging.getLogger(__name__)

IN_ORDER = "shards-v1"
SHUFFLED = "shuffled-shards-v1"

# How much the last batch counts in the time that a sample takes.
_WEIGHT = 0.1
_SHARE = 0.01
"""Of the time, that may be spent on finding out how long shards are."""


class ShardSource:
    """A dataset in shards, as one source of batches. In the training process.

    Where the dataset knows the lengths of its shards, an epoch has each sample once, but for those that don't fill a
    global batch. Where it doesn't, shards begin again one by one when they end, and the epoch has no end, or the one
    that ``epoch_samples`` says: how long a shard is, only its reader finds out, and no rank waits for another's word.

    Args:
        dataset: anything that :func:`ftrun.data.iterable.is_iterable`.
        world_size: ranks that share a global batch.
        virtual_shards: number of shards, where the dataset leaves that open; kept for the life of the run.
        epoch_samples: samples of an epoch, where lengths aren't known.

    Attributes:
        state_key: under which a checkpoint stores :meth:`state`.
        n: samples in an epoch; None where it has no end.

    Raises:
        UsageError: arguments that don't fit the dataset, or a dataset that could never be resumed.
    """

    state_key = "shards"

    def __init__(
        self,
        dataset: Any,
        *,
        world_size: int = 1,
        virtual_shards: int | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.shards = shards_of(dataset, world_size, virtual_shards)
        self.n = self._length(epoch_samples)
        self._world_size = world_size
        # A whole dataset isn't opened before it is read: that may cost.
        self._can_seek = can_seek(dataset if self.shards.one_for_each_rank else self.shards.open(0, 0, 0))
        self._num_workers = 0
        self._rate: float | None = None
        self._committed, self._yielded = Book(), Book()
        self._fetcher: tuple[Any, ShardFetcher] | None = None
        self._said = False
        self._mean = self._mean_due = 0.0

    def _length(self, epoch_samples: int | None) -> int | None:
        lengths = self.shards.lengths
        if lengths is None:
            if epoch_samples is None:
                return None
            return whole("epoch_samples", epoch_samples, 1, "an epoch has at least one sample")
        if epoch_samples is not None:
            raise UsageError(
                f"epoch_samples={epoch_samples}: this dataset knows the lengths of its shards, {int(lengths.sum())} "
                "samples in all, and an epoch has each of them once: leave epoch_samples out"
            )
        return int(lengths.sum())

    def fingerprint(self) -> str:
        """What tells this dataset and its shards from others."""
        own = getattr(self.dataset, "fingerprint", None)
        own = own() if callable(own) else own
        parts = [type(self.dataset).__qualname__, self.shards.name]
        return "/".join(parts if own is None else [*parts, str(own)])

    def order_name(self, order: str | None, shuffle: bool) -> str:
        """The versioned name of the order of samples.

        Raises:
            UsageError: there is no such order for shards.
        """
        if order is not None and order not in (IN_ORDER, SHUFFLED):
            raise UsageError(
                f"order={order!r} needs a dataset with __len__ and __getitem__, and {type(self.dataset).__name__} is "
                "read in order: leave it out; shuffle=True gives shards another order in each epoch"
            )
        if self.shards.one_for_each_rank and SHUFFLED in (order, SHUFFLED if shuffle else None):
            raise UsageError(
                f"shuffle=True gives shards another order, and {type(self.dataset).__name__} has none: leave it out "
                "and shuffle in the dataset, or give it a method shard(index, count)"
            )
        return order or (SHUFFLED if shuffle else IN_ORDER)

    def check_workers(self, num_workers: int) -> None:
        """Hear how many workers each rank has.

        Raises:
            UsageError: more than this dataset can have.
        """
        from ftrun.data.iterable.fetcher import check_one_worker

        check_one_worker(self.shards, num_workers)
        self._num_workers = num_workers

    def tickets(self, recipe: Recipe, share: Share, start: Position) -> Iterator[Ticket]:
        """This rank's batches from a position to the end of its epoch, if it has one.

        Args:
            recipe: of the run.
            share: the rank and the world size.
            start: the position.
        """
        from ftrun.data.iterable.fetcher import Ticket

        self._check(recipe, share)
        endless = self.shards.lengths is None
        plan = Plan(recipe.global_batch, recipe.seed, recipe.order == SHUFFLED, 0 if endless else start.epoch)
        ways = self._ways(plan)
        whole = None if self.n is None else self.n // recipe.global_batch
        before = start.epoch * whole if endless and whole is not None else 0
        first = start.samples // recipe.global_batch
        self._begin(ways, share, recipe, before + first)
        told: set[int] = set()
        for batch in itertools.count(first) if whole is None else range(first, whole):
            taken = parts(ways.layout, recipe.global_batch, before + batch, share)
            yield Ticket(plan, before + batch, taken, self._news(taken, told, plan))

    def _check(self, recipe: Recipe, share: Share) -> None:
        if recipe.tail not in ("drop", "error"):
            raise UsageError(
                f"tail={recipe.tail!r} needs a dataset with __len__ and __getitem__: use tail='drop' for one that is "
                "read in order"
            )
        if self.shards.one_for_each_rank and recipe.global_batch % share.world_size:
            raise UsageError(
                f"a global batch of {recipe.global_batch} can't be split evenly over {share.world_size} ranks, each of "
                "which reads this dataset by itself: use a multiple, or give the dataset a method shard(index, count)"
            )

    def _ways(self, plan: Plan) -> Lanes:
        shards = self.shards
        return lanes(plan, shards.count, shards.lengths, one_for_each_rank=shards.one_for_each_rank)

    def _news(self, taken: list[Part], told: set[int], plan: Plan) -> dict[int, tuple[Mark, ...]]:
        news = {}
        for part in taken:
            if part.lane not in told:
                told.add(part.lane)
                marks = tuple(each for each in self._committed.of(part.lane) if each.epoch == plan.epoch)
                if marks:
                    news[part.lane] = marks
        return news

    def _begin(self, ways: Lanes, share: Share, recipe: Recipe, batch: int) -> None:
        self._yielded = Book()
        # A cycle, or a few where lanes wander between ranks.
        cycle = range(batch, batch + 4 * ways.layout.groups)
        mine = [part for each in cycle for part in parts(ways.layout, recipe.global_batch, each, share)]
        if not self._said:
            self._said = True
            skips = forecast(ways, mine, self._committed, can_seek=self._can_seek)
            skip = Skip.of(skips, self._num_workers, self._rate, resumes=batch > 0)
            self._say(ways, share, recipe.global_batch, skip)
        self._committed.keep(part.lane for part in mine if part.last)

    def _say(self, ways: Lanes, share: Share, global_batch: int, skip: Skip) -> None:
        if share.rank:
            return
        if skip.samples:
            _log.warning("ftrun: %s", skip.text(share.world_size))
        ways_out = [] if self.shards.one_for_each_rank or self._can_seek else self._ways_out(ways, share, global_batch)
        if ways_out:
            _log.warning(
                "ftrun: %d shards can't be dealt out evenly to %d ranks x %d workers, so some samples are read by more "
                "than one of them and dropped there. That is exact, and slower. What helps: %s",
                self.shards.count, share.world_size, max(self._num_workers, 1), "; ".join(ways_out),
            )  # fmt: skip

    def _ways_out(self, ways: Lanes, share: Share, global_batch: int) -> list[str]:
        shards, found = self.shards, []
        if ways.layout.width % share.world_size:
            known = shards.lengths is not None
            enough = fitting(global_batch, share.world_size, shards.count, lengths_known=known)
            found.append(f"{enough or 'more'} shards ({shards.how_many})")
        if ways.layout.groups % max(self._num_workers, 1):
            fit = [str(each) for each in (1, 2, 4, 8) if ways.layout.groups % each == 0]
            found.append(f"num_workers={' or '.join(fit)}")
        return found

    def fetcher(self, collate: Callable[[list[Any]], Any], seed: int, sample_seeds: bool) -> ShardFetcher:
        """What runs in each worker. The same one again for the same arguments, as it keeps shards open."""
        from ftrun.data.iterable.fetcher import ShardFetcher

        key = (collate, seed, sample_seeds)
        if self._fetcher is None or self._fetcher[0] != key:
            made = ShardFetcher(
                self.dataset, self.shards, collate, seed=seed, sample_seeds=sample_seeds, can_seek=self._can_seek
            )
            self._fetcher = key, made
        return self._fetcher[1]

    def opened(self, arrived: Envelope) -> Any:
        """A batch out of its envelope, whose notes count when the batch is committed."""
        notes = arrived.notes
        for lane, mark in notes.marks:
            self._yielded.note(lane, mark)
        if notes.samples:
            rate = notes.seconds / notes.samples
            self._rate = rate if self._rate is None else self._rate + _WEIGHT * (rate - self._rate)
        return arrived.batch

    def commit(self) -> None:
        """The batch that was opened last counts."""
        self._committed.take(self._yielded)

    def mean_length(self) -> float:
        """Samples of a shard, on the average, where the dataset doesn't say; 0 where it does, or nobody knows yet."""
        now = time.monotonic()
        if self.shards.lengths is None and now >= self._mean_due:
            began = time.thread_time()  # not by the clock: it may stand still meanwhile, and that is no work
            self._mean = self._committed.mean_length()
            self._mean_due = now + (time.thread_time() - began) / _SHARE
        return self._mean

    def state(self) -> dict[str, Any] | None:
        """What this rank knows of its shards beyond the position; None where nothing is to be known."""
        marks = self._committed.stored()
        if not marks and not self.shards.one_for_each_rank and self._can_seek:
            return None
        world_size = self._world_size if self.shards.one_for_each_rank else None
        return {"v": VERSION, "world_size": world_size, "seconds": self._rate, "marks": marks}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take back what :meth:`state` returned, or several ranks' :func:`ftrun.data.iterable.merged`.

        Raises:
            StateMismatch: it can't be resumed here exactly.
        """
        if state is None:
            return
        then = state.get("world_size")
        if state.get("v") != VERSION:
            raise StateMismatch(
                f"this version of ftrun reads states of data shards of version {VERSION}, and the checkpoint has "
                f"{state.get('v')!r}: resume with the version of ftrun that wrote it, or start over with --fresh"
            )
        if self.shards.one_for_each_rank and then != self._world_size:
            raise StateMismatch(
                f"{type(self.dataset).__name__} can't be cut into shards, so each of {then} ranks had read it by "
                f"itself, and {self._world_size} ranks can't take that over exactly: resume with {then} ranks, or "
                "start over with --fresh and a dataset that has shard(index, count)"
            )
        self._rate = state.get("seconds")
        self._committed = Book.of_stored(state.get("marks", {}))
