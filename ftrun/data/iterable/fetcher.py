"""What runs in a loader's worker for a dataset that is read in order: takes a ticket, returns a batch in an envelope.

The same runs in the training process where the loader has no workers. A ticket says all that is needed; lanes that
stand where it wants to go on are read on, and others are opened anew.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import get_worker_info

from ftrun.data.iterable.cursor import Cursor, Draws, as_one_reader
from ftrun.data.iterable.lanes import Lanes, Plan, lanes
from ftrun.data.iterable.marks import Mark
from ftrun.data.iterable.places import nearest
from ftrun.data.randomness import preserved, sample_seed, seed_everything
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.iterable.datasets import Shards
    from ftrun.data.iterable.layout import Part
    from ftrun.data.iterable.marks import Packed
    from ftrun.data.position import Position

# States are taken so seldom that they cost a hundredth of the time: a big one every few seconds, a small one with
# every batch.
_SHARE = 0.01


class Ticket(NamedTuple):
    """One rank's part of one global batch.

    Attributes:
        plan: by which samples are found.
        batch: number of the batch, for messages.
        parts: what to take.
        marks: of lanes that come for the first time since the loop began.
        padding: no sample is a repeat.
        after: the position that follows is what the recipe says.
    """

    plan: Plan
    batch: int
    parts: list[Part]
    marks: dict[int, tuple[Mark, ...]]
    padding: int = 0
    after: Position | None = None


class Notes(NamedTuple):
    """What a worker says with a batch.

    Attributes:
        marks: of the lanes that the batch comes from.
        samples: samples that were read for it, dropped ones too.
        seconds: that reading them took.
    """

    marks: list[tuple[int, Mark]]
    samples: int
    seconds: float


class Envelope(NamedTuple):
    """A batch and what goes with it; a tuple, so that torch pins the memory of what is inside."""

    batch: Any
    notes: Notes


class ShardFetcher:
    """Stands between torch's loader and a dataset in shards.

    Args:
        dataset: the user's, for those who look at it in a worker.
        shards: the dataset as shards.
        collate: the user's ``collate_fn``, or torch's default.
        seed: of the random numbers of each sample.
        sample_seeds: seed before each sample.
        can_seek: the shards offer to begin anywhere.
    """

    def __init__(
        self,
        dataset: Any,
        shards: Shards,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int,
        sample_seeds: bool,
        can_seek: bool,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self._shards = shards
        self._draws = Draws(seed, sample_seeds)
        self._can_seek = can_seek
        self._forget()

    def _forget(self) -> None:
        self._plan: Plan | None = None
        self._lanes: Lanes | None = None
        self._cursors: dict[int, Cursor] = {}
        self._asked: dict[int, tuple[float, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open: that stays in its process."""
        open_here = ("_plan", "_lanes", "_cursors", "_asked")
        return {name: value for name, value in self.__dict__.items() if name not in open_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __getitems__(self, ticket: Ticket) -> Envelope:
        """Fetch and collate one batch; torch passes what the batch sampler yielded, as it is.

        Raises:
            Exception: whatever the dataset or ``collate_fn`` raises, with a note that says where.
            RuntimeError: ``collate_fn`` let a StopIteration out, which would end the epoch without a word.
        """
        one_process = get_worker_info() is None
        self._turn_to(ticket.plan)
        with preserved() if one_process and self._draws.each_sample else contextlib.nullcontext():
            samples: list[Any] = []
            marks: list[tuple[int, Mark]] = []
            began, read = time.perf_counter(), 0
            with as_one_reader(self._shards):
                for part in ticket.parts:
                    read += self._take(part, ticket, samples)
                seconds = time.perf_counter() - began
                for part in ticket.parts:
                    marks += self._marks(part)
            return Envelope(self._collated(ticket, samples), Notes(marks, read, seconds))

    def _turn_to(self, plan: Plan) -> None:
        if plan != self._plan:
            self._forget()
            self._plan = plan
            shards = self._shards
            self._lanes = lanes(plan, shards.count, shards.lengths, one_for_each_rank=shards.one_for_each_rank)

    def _take(self, part: Part, ticket: Ticket, samples: list[Any]) -> int:
        """Add a part's samples, and say how many were read for it."""
        cursor = self._cursors.pop(part.lane, None)  # what fails is not read on
        begun = cursor.sample if cursor is not None else 0
        try:
            if cursor is None or not begun <= part.first or (self._can_seek and begun < part.first):
                cursor, skipped = self._opened(part, ticket)
            else:
                skipped = part.first - begun
            cursor.skip(part.first - cursor.sample)
            samples += [cursor.next() for _ in range(part.size)]
        except Exception as error:
            error.add_note(_where(part, ticket, cursor))
            raise
        self._cursors[part.lane] = cursor
        return skipped + part.size

    def _opened(self, part: Part, ticket: Ticket) -> tuple[Cursor, int]:
        assert self._lanes is not None
        marks = ticket.marks.get(part.lane, ())
        place = nearest(self._lanes, part.lane, part.first, marks, can_seek=self._can_seek)
        return Cursor(self._shards, self._lanes, part.lane, self._draws, place), place.skip

    def _marks(self, part: Part) -> list[tuple[int, Mark]]:
        """What will save time when this lane is read on by another process."""
        cursor, lengths = self._cursors[part.lane], self._shards.lengths
        if not part.last or (self._can_seek and lengths is not None):
            return []
        assert self._plan is not None
        mark = Mark(self._plan.epoch, cursor.sample, cursor.turn, cursor.number, None)
        found = [(part.lane, mark)] if lengths is None else []
        state = None if self._can_seek else self._state(part.lane, cursor)
        return found if state is None else [*found, (part.lane, mark._replace(state=state))]

    def _state(self, lane: int, cursor: Cursor) -> Packed | None:
        now = time.perf_counter()
        last, cost = self._asked.get(lane, (0.0, 0.0))
        if now - last < cost / _SHARE:
            return None
        state = cursor.state()
        # It is also sent, and unpacked where it is stored: as much again. Once it may have taken long by chance.
        took = 2 * (time.perf_counter() - now)
        self._asked[lane] = (now, min(took, 2 * cost) if cost else took)
        return state

    def _collated(self, ticket: Ticket, samples: list[Any]) -> Any:
        part = ticket.parts[0]
        if self._draws.each_sample:
            seed = sample_seed(self._draws.seed, ticket.batch, part.lane, purpose=f"collate/{ticket.plan.epoch}")
            seed_everything(seed)
        try:
            return self.collate(samples)
        except StopIteration as error:
            raise RuntimeError(f"StopIteration came out of collate_fn for batch {ticket.batch}") from error
        except Exception as error:
            error.add_note(
                f"ftrun was putting batch {ticket.batch} of epoch {ticket.plan.epoch} together, in collate_fn"
            )
            raise


def _where(part: Part, ticket: Ticket, cursor: Cursor | None) -> str:
    at = "at its start" if cursor is None else f"after {cursor.number} samples of shard {cursor.stop.shard}"
    return f"ftrun was reading lane {part.lane} for batch {ticket.batch} of epoch {ticket.plan.epoch}, {at}"


def check_one_worker(shards: Shards, num_workers: int) -> None:
    """Refuse several workers for a dataset that each would read whole.

    Raises:
        UsageError: says what works.
    """
    if shards.one_for_each_rank and num_workers > 1:
        raise UsageError(
            f"num_workers={num_workers}: this dataset can't be cut into shards, so each worker would read all of it. "
            "Use num_workers=1, or give the dataset a method shard(index, count) that returns an iterable over a part"
        )
