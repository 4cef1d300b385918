"""From where a lane is read on: an open shard, a stored state, a seek, or the start of a shard and skipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.data.iterable.lanes import Lanes
    from ftrun.data.iterable.marks import Mark, Packed


class Place(NamedTuple):
    """A point on the way of a lane from which it can be read.

    Attributes:
        sample: samples that the lane has given before.
        turn: shards behind it.
        number: samples of its shard before it.
        state: of the shard there, packed; None where it is sought, or read from its start.
        skip: samples to read and drop: those of the shard before ``number``, where it can't seek and has no state,
            and those of the lane after it.
    """

    sample: int
    turn: int
    number: int
    state: Packed | None
    skip: int


def nearest(lanes: Lanes, lane: int, sample: int, marks: Iterable[Mark], *, can_seek: bool) -> Place:
    """Where to begin, so that the least is skipped before a sample of a lane.

    Args:
        lanes: their ways in the epoch.
        lane: number of the lane.
        sample: samples that the lane has given before the one that is wanted.
        marks: of this lane, in this epoch.
        can_seek: shards offer to begin anywhere.
    """
    known = lanes.find(lane, sample)
    places = [_in_shard(sample, *((0, 0, 0) if known is None else (sample, *known)), can_seek=can_seek)]
    for mark in marks:
        if mark.sample > sample or (known is not None and mark.turn != known[0]):
            continue
        if mark.state is not None:
            skip = sample - mark.sample
            places.append(Place(mark.sample, mark.turn, mark.number, mark.state, skip))
        elif known is None:
            places.append(_in_shard(sample, mark.sample, mark.turn, mark.number, can_seek=can_seek))
    return min(places, key=lambda place: place.skip)


def _in_shard(wanted: int, sample: int, turn: int, number: int, *, can_seek: bool) -> Place:
    return Place(sample, turn, number, None, wanted - sample + (0 if can_seek else number))
