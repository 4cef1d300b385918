"""Marks: where a lane was, and what it takes to go on from there. They travel with batches and into checkpoints.

A mark only ever saves time. Which sample comes next follows from the position, which all ranks share; a lane without
a mark is read from where that is known, and samples are skipped up to the position.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from ftrun.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = 1


class Packed(NamedTuple):
    """A state as it was at one moment; any value, None among them."""

    value: Any


class Mark(NamedTuple):
    """One point on the way of a lane.

    Attributes:
        epoch: of the loader; 0 where lanes are endless.
        sample: samples that the lane had given in that epoch.
        turn: shards that it had left behind.
        number: samples that it had read of the shard it was in.
        state: of that shard, packed by :func:`packed`; None where it was not asked for.
    """

    epoch: int
    sample: int
    turn: int
    number: int
    state: Packed | None


def packed(state: Any) -> Packed:
    """A shard's state on its way between a worker and the training process: a copy that nothing changes any more."""
    return Packed(copy.deepcopy(state))


def unpacked(state: Packed) -> Any:
    """What :func:`packed` was given, for somebody who may change it."""
    return copy.deepcopy(state.value)


class Book:
    """What is known of the lanes: of each the latest mark, and the latest with a state."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[bool, Mark]] = {}
        self._epoch = 0

    def note(self, lane: int, mark: Mark) -> None:
        """Keep a mark in place of an older one of its kind. Those of an epoch before are of no use any more."""
        if mark.epoch != self._epoch:
            self._marks.clear()
            self._epoch = mark.epoch
        self._marks.setdefault(lane, {})[mark.state is not None] = mark

    def take(self, newer: Book) -> None:
        """Note all that another book has, and empty it."""
        for lane, marks in newer._marks.items():
            for mark in marks.values():
                self.note(lane, mark)
        newer._marks = {}

    def of(self, lane: int) -> tuple[Mark, ...]:
        """The marks of a lane, none where nothing is known."""
        return tuple(self._marks.get(lane, {}).values())

    def mean_length(self) -> float:
        """Samples of a shard, on the average of those that lanes have left behind; 0 where nobody knows.

        Before that, twice what has been read of one: more than that may come. Any thread.
        """
        marks = [mark for marks in list(self._marks.values()) for mark in list(marks.values())]
        turns = sum(mark.turn for mark in marks)
        if turns:
            return sum(mark.sample - mark.number for mark in marks) / turns
        return 2.0 * max((mark.number for mark in marks), default=0)

    def keep(self, lanes: Iterable[int]) -> None:
        """Forget all other lanes."""
        kept = set(lanes)
        self._marks = {lane: marks for lane, marks in self._marks.items() if lane in kept}

    def stored(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint: plain values, and states as the dataset returned them."""
        return {
            # The place is in the name, as ranks that share a lane may each have stored a mark of it.
            f"{lane}@{mark.epoch}.{mark.sample}{'' if mark.state is None else 's'}": _to_stored(mark)
            for lane, marks in sorted(self._marks.items())
            for mark in marks.values()
        }

    @classmethod
    def of_stored(cls, stored: Mapping[str, Mapping[str, Any]]) -> Book:
        """Read it back, of each lane the latest.

        Raises:
            StateMismatch: it isn't what :meth:`stored` returns.
        """
        book = cls()
        try:
            found = [(int(name.split("@")[0]), _from_stored(value)) for name, value in stored.items()]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StateMismatch(
                f"the state of the data shards in the checkpoint makes no sense ({error!r}): resume from another "
                "checkpoint, or start over with --fresh"
            ) from error
        for lane, mark in sorted(found, key=lambda each: each[1][:2]):
            book.note(lane, mark)
        return book


def _to_stored(mark: Mark) -> dict[str, Any]:
    value: dict[str, Any] = mark._asdict()
    del value["state"]
    return value if mark.state is None else {**value, "state": unpacked(mark.state)}


def _from_stored(value: Mapping[str, Any]) -> Mark:
    numbers = [value[name] for name in Mark._fields[:-1]]
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"numbers {numbers}")
    epoch, sample, turn, number = numbers
    return Mark(epoch, sample, turn, number, packed(value["state"]) if "state" in value else None)


def merged(states: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What several ranks stored, as one: for a world of another size, whose ranks go on with each other's shards.

    Args:
        states: the entry ``shards`` of each rank's loader state, None where there is none; this rank's own first.
    """
    found = [each for each in states if each is not None]
    if not found:
        return None
    marks: dict[str, Any] = {}
    for each in reversed(found):
        marks |= each.get("marks", {})
    return {**found[0], "marks": marks}
