"""An open lane: gives its samples one after another, from shard to shard."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.utils.data._utils.worker as torch_worker

from ftrun.data.iterable.datasets import can_seek
from ftrun.data.iterable.marks import packed, unpacked
from ftrun.data.randomness import sample_seed, seed_everything
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.data.iterable.datasets import Piece, Shards
    from ftrun.data.iterable.lanes import Lanes, Stop
    from ftrun.data.iterable.marks import Packed
    from ftrun.data.iterable.places import Place


@dataclass(frozen=True)
class Draws:
    """Random numbers that belong to a sample of a shard.

    Attributes:
        seed: of the loader.
        each_sample: whether they are settled before each sample, or left to the process.
    """

    seed: int
    each_sample: bool

    def settle(self, stop: Stop, number: int, purpose: str = "sample") -> None:
        """Seed the global generators for one sample."""
        if self.each_sample:
            seed_everything(sample_seed(self.seed, stop.epoch, number, f"{purpose}/{stop.shard}"))


class Reading:
    """One shard that is being read.

    Attributes:
        stop: which one, and how much of it belongs to the lane.
        number: samples read of it.
    """

    def __init__(self, shards: Shards, stop: Stop, draws: Draws) -> None:
        self.stop, self.number = stop, 0
        self._shards, self._draws = shards, draws
        self._piece: Piece = shards.open(stop.shard, stop.epoch, draws.seed)
        self._iterator: Iterator[Any] | None = None

    def seek(self, number: int) -> None:
        """Put it before a sample. Before the first is read, and only where it offers to."""
        piece: Any = self._piece
        piece.seek(number)
        self.number = number

    def restore(self, number: int, state: Packed) -> None:
        """Put it where it was when a state was taken, before a sample."""
        target: Any = self._piece if _has_state(self._piece) else self._begun()
        if not _has_state(target):
            raise StateMismatch(
                f"the checkpoint holds a state of shard {self.stop.shard}, and the dataset has no load_state_dict any "
                "more: give it back, or start over with --fresh"
            )
        target.load_state_dict(unpacked(state))
        self.number = number

    def state(self) -> Packed | None:
        """Its state after the sample that was read last, packed; None where it has none to rely on."""
        if not self._shards.states_hold:
            return None
        target: Any = self._piece if _has_state(self._piece) else self._iterator
        return packed(target.state_dict()) if _has_state(target) else None

    @property
    def can_seek(self) -> bool:
        """Whether it offers to begin anywhere."""
        return can_seek(self._piece)

    def __next__(self) -> Any:
        iterator = self._begun()
        self._draws.settle(self.stop, self.number)
        sample = next(iterator)
        self.number += 1
        return sample

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            self._draws.settle(self.stop, 0, "open")
            self._iterator = iter(self._piece)
        return self._iterator


class Cursor:
    """One lane, from one place on.

    Attributes:
        sample: samples that the lane has given.
        turn: shards behind it.
    """

    def __init__(self, shards: Shards, lanes: Lanes, lane: int, draws: Draws, place: Place) -> None:
        self.sample, self.turn = place.sample, place.turn
        self._shards, self._lanes, self._lane, self._draws = shards, lanes, lane, draws
        self._empty = 0
        self._reading = self._opened()
        if place.state is not None:
            self._reading.restore(place.number, place.state)
        else:
            self._go_to(place.number)

    @property
    def stop(self) -> Stop:
        """The shard that the lane is in."""
        return self._reading.stop

    @property
    def number(self) -> int:
        """Samples read of that shard."""
        return self._reading.number

    def state(self) -> Packed | None:
        """State of that shard, packed; None where it has none."""
        return self._reading.state()

    def skip(self, count: int) -> None:
        """Read samples and drop them."""
        for _ in range(count):
            self.next()

    def next(self) -> Any:
        """The lane's next sample.

        Raises:
            UsageError: a shard ended before the number of samples that it should have, or gives none at all.
        """
        while True:
            reading = self._reading
            if reading.number == reading.stop.end:
                self._turn()
                continue
            try:
                sample = next(reading)
            except StopIteration:
                self._ended(reading)
                continue
            self._empty = 0
            self.sample += 1
            if self._may_hint:
                self._hint()
            return sample

    def _ended(self, reading: Reading) -> None:
        shard, end = reading.stop.shard, reading.stop.end
        if end is not None:
            raise UsageError(
                f"shard {shard} of {self._shards.count} ended after {reading.number} samples, and its length says that "
                f"there are {end} or more: correct the lengths, or leave them out and say epoch_samples="
            )
        self._empty = 0 if reading.number else self._empty + 1
        if self._empty >= self._lanes.round(self._lane):
            raise UsageError(
                f"shard {shard} of {self._shards.count} has no samples"
                + (", nor have the others beside it" if self._empty > 1 else "")
                + f": use fewer shards ({self._shards.how_many}), or check where the dataset gets its data"
            )
        self._turn()

    def _turn(self) -> None:
        self.turn += 1
        self._reading = self._opened()
        self._go_to(self._reading.stop.first)

    def _hint(self) -> None:
        """Once this shard's first sample is there, what is read after it may come: before, it would be in the way."""
        self._may_hint = False
        following = self._lanes.stop(self._lane, self.turn + 1).shard
        if following != self._reading.stop.shard:
            self._shards.expect(following)

    def _opened(self) -> Reading:
        # Where lengths are known the filler knows, too, when which shard is read.
        self._may_hint = self._shards.lengths is None
        return Reading(self._shards, self._lanes.stop(self._lane, self.turn), self._draws)

    def _go_to(self, number: int) -> None:
        """Come to a sample of the shard: at once where it offers that, else by reading those before."""
        reading = self._reading
        if number and reading.can_seek:
            reading.seek(number)
        try:
            while reading.number < number:
                next(reading)
        except StopIteration:
            self._ended(reading)


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


@contextlib.contextmanager
def as_one_reader(shards: Shards) -> Iterator[None]:
    """Let datasets in a worker think that there are no workers, for the length of a block.

    Many split themselves by worker: a shard is a part already, and would lose samples.
    """
    if shards.one_for_each_rank or torch_worker._worker_info is None:
        yield
        return
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
