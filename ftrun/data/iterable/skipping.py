"""What it costs to go on where nothing better than skipping is offered: said before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftrun.data.iterable.places import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.data.iterable.lanes import Lanes
    from ftrun.data.iterable.layout import Part
    from ftrun.data.iterable.marks import Book

_FEW = 100
_MINUTE = 60.0


def forecast(ways: Lanes, mine: Iterable[Part], marks: Book, *, can_seek: bool) -> dict[int, int]:
    """Samples to read and drop before the first one of each lane that is wanted, by lane."""
    found: dict[int, int] = {}
    for part in mine:
        if part.lane not in found:
            place = nearest(ways, part.lane, part.first, marks.of(part.lane), can_seek=can_seek)
            found[part.lane] = place.skip
    return found


class Skip(NamedTuple):
    """What one rank has to skip.

    Attributes:
        samples: in all of its lanes; 0 where they are too few to speak of.
        workers: processes that skip at the same time.
        seconds: that it will take; None where no sample has been timed yet.
        resumes: it is for going on, and not because shards of unequal lengths are cut.
    """

    samples: int
    workers: int
    seconds: float | None
    resumes: bool

    @classmethod
    def of(cls, skips: dict[int, int], workers: int, rate: float | None, *, resumes: bool) -> Skip:
        """Add it up.

        Args:
            skips: samples by lane.
            workers: of the rank; 0 for none.
            rate: seconds for a sample.
            resumes: see above.
        """
        samples = sum(skips.values())
        samples = samples if samples >= _FEW else 0
        busy = max(1, min(workers, len(skips)))
        return cls(samples, busy, None if rate is None else samples * rate / busy, resumes)

    def text(self, world_size: int) -> str:
        """One sentence for people."""
        where = "rank 0 and, likewise, each other rank" if world_size > 1 else "the loader"
        took = "how long a sample takes isn't known yet" if self.seconds is None else f"about {_span(self.seconds)}"
        why = (
            "to go on exactly where it was" if self.resumes else "to share out shards of unequal lengths in each epoch"
        )
        return (
            f"{why}, {where} reads and drops {self.samples:,} samples first, {took}. "
            "A dataset whose shards have seek(number), or state_dict and load_state_dict, goes on at once"
        )


def _span(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{max(seconds, 1):.0f} s"
    if seconds < _MINUTE * _MINUTE:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _MINUTE / _MINUTE:.1f} h"
