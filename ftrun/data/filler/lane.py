"""One loader that is fetched ahead of: where it is, how far ahead the filler has got, and what is due next."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftrun.data.filler.seen import Seen
from ftrun.data.filler.urls import UrlIndex
from ftrun.data.position import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ftrun.data.filler.course import Stretch, Way
    from ftrun.data.filler.urls import Strings

_FIRST = 64
"""Files that are fetched before anybody knows how large they are."""
_MANY = 3
_OFTEN, _SELDOM = 8, 2
"""Into how many parts what is ahead is divided, to look at one at a time; the other number where all is there."""


@dataclass(frozen=True)
class Bounds:
    """How far ahead the filler goes.

    Attributes:
        samples: of this node.
        bytes: that they take.
    """

    samples: int = 16_384
    bytes: int = 16 << 30


class Due(NamedTuple):
    """One file to bring in.

    Attributes:
        lane: whose it is.
        sample: its index in the dataset.
        epoch: in which it is read.
        place: at which.
        failures: attempts at it that failed.
    """

    lane: Lane
    sample: int
    epoch: int
    place: int
    failures: int = 0

    @property
    def position(self) -> Position:
        """When it is read."""
        return Position(self.epoch, self.place)

    @property
    def url(self) -> str:
        """What it is."""
        return self.lane.urls[self.sample]


class Lane:
    """One loader. Not thread-safe: whoever calls holds the filler's lock.

    Args:
        name: of the loader.
        course: what is read.
        urls: by dataset index.
        files: the cache.
        bounds: how far to go ahead.
        position: where the training is.
    """

    def __init__(self, name: str, course: Way, urls: Strings, files: Any, bounds: Bounds, position: Position) -> None:
        self.name = name
        self.course = course
        self.urls = urls
        self.files = files
        self.position = position
        self.steps_left: int | None = None
        self.pace = 0.0
        self.paused = 0.0
        self.seen = Seen(len(urls))
        self._bounds = bounds
        self._cursor = position
        self._queue: deque[Due] = deque()
        self._again: list[tuple[float, int, int, Due]] = []
        self._known = 0
        self._bytes = 0
        self._index: UrlIndex | None = None
        self._gone: set[int] = set()
        self._rest: tuple[Position, Position] | None = None
        self._is_known = False
        self._begin_at(position)

    @property
    def mean(self) -> float:
        """Bytes of a file, as far as they are known."""
        return self._bytes / self._known if self._known else 0.0

    @property
    def ahead(self) -> float:
        """Samples of all ranks from the position to what is taken next."""
        return max(0.0, self.course.distance(self._queue[0].position if self._queue else self._cursor, self.position))

    @property
    def steps_ahead(self) -> float:
        """The same in steps."""
        return self.ahead / self.course.global_batch

    def steps_to(self, due: Due) -> float:
        """Steps until a file is read."""
        return self.course.distance(due.position, self.position) / self.course.global_batch

    def rests_at(self, position: Position) -> bool:
        """Whether nothing would be due if the training were there. The one method that asks for no lock."""
        rest = self._rest
        return rest is not None and rest[0] <= position < rest[1]

    def move(self, position: Position, steps_left: int | None) -> bool:
        """The training is there now; whether that is news. Backwards, everything is looked at again.

        Args:
            position: the committed one.
            steps_left: of the run; None where nobody says it anew, which leaves a known end where it is.
        """
        if steps_left is None:
            steps_left = self.steps_left_from(position)
        news = (position, steps_left) != (self.position, self.steps_left)
        self.steps_left = steps_left
        if news:
            self._rest = None
        if position == self.position:
            return news
        if self.course.distance(position, self.position) < 0:
            self._queue.clear()
            self._again.clear()
            self._begin_at(position)
        self.position = position
        if self.course.distance(self._cursor, position) < 0:
            self._cursor = position
        return True

    def take_course(self, course: Way) -> None:
        """What comes when is known better now: everything ahead is looked at again."""
        self.course = course
        self._rest = None
        self._queue.clear()
        self._begin_at(self.position)

    def steps_left_from(self, position: Position) -> int | None:
        """Steps from a position to the end of the run; None where nobody has said where that is."""
        if self.steps_left is None:
            return None
        steps = self.course.distance(position, self.position) / self.course.global_batch
        return max(0, math.ceil(self.steps_left - steps))

    def note(self, size: int) -> None:
        """A file has so many bytes."""
        if size:
            self._known += 1
            self._bytes += size
            self._rest = None

    def is_missing(self, due: Due) -> None:
        """A file isn't in the cache."""
        if self.seen.is_missing(due.sample):
            self._rest = None
            self._queue.clear()
            self._begin_at(self.position)

    def later(self, due: Due, at: float) -> None:
        """Try once more, unless the ranks have had to do it by then.

        Args:
            due: what failed.
            at: on the monotonic clock.
        """
        if due.failures < _MANY:
            self._rest = None
            heapq.heappush(self._again, (at, due.epoch, due.place, due._replace(failures=due.failures + 1)))

    def gone(self, due: Due) -> None:
        """Its file isn't there any more: whoever reads it will say so."""
        self._gone.add(due.sample)

    def back(self, due: Due, until: float) -> None:
        """It can't be brought in before that time on the monotonic clock."""
        self._rest = None
        self._queue.appendleft(due)
        self.paused = until

    def take(self, now: float) -> Due | None:
        """What is due next; None where enough is ahead, or nothing is known."""
        if now < self.paused:
            return None
        while self._again and self._again[0][0] <= now:
            due = heapq.heappop(self._again)[-1]
            if self.steps_to(due) >= 0:
                return due
        while True:
            while self._queue:
                due = self._queue.popleft()
                if due.sample not in self._gone and self.course.distance(due.position, self.position) >= 0:
                    return due
            if not self._refill():
                return None

    def _refill(self) -> bool:
        course = self.course
        room = int(self._limit() - course.distance(self._cursor, self.position))
        # Not for a file at a time: orders are computed in blocks.
        block = course.block
        least = min(block, max(1, int(self._limit()) // (_SELDOM if self._is_known else _OFTEN)))
        if room < least:
            self._rest_for(least - room)
            return False
        stretch = course.stretch(self._cursor, min(room, block))
        if stretch is None:
            return False
        self._cursor = stretch.after
        self._add(stretch)
        return True

    def _rest_for(self, samples: int) -> None:
        """Nothing is due before the training has come so much further, in this epoch."""
        here = self.position
        there = here.samples + samples
        last = Position(here.epoch, there) if there < self.course.length(here.epoch) else Position(here.epoch + 1)
        self._rest = None if self._again else (here, last)

    def _begin_at(self, position: Position) -> None:
        self._cursor = position
        stretch = self.course.under_way(position)
        if stretch is not None:
            self._add(stretch)

    def _add(self, stretch: Stretch) -> None:
        if not len(stretch.indices):
            return
        wanted, self._is_known = self.seen.to_look_for(stretch.indices)
        pairs = zip(stretch.places[wanted].tolist(), stretch.indices[wanted].tolist(), strict=True)
        self._queue.extend(Due(self, index, stretch.epoch, place) for place, index in pairs)

    def _limit(self) -> float:
        """Samples of all ranks that may be ahead."""
        mine = float(self._bounds.samples if self._known else min(_FIRST, self._bounds.samples))
        if self.mean:
            mine = max(1.0, min(mine, self._bounds.bytes / self.mean))
        everyone = self.course.samples_for(mine)
        # After a whole epoch everything has come by.
        everyone = min(everyone, float(self.course.length(self._cursor.epoch)))
        everyone = max(everyone, float(self.course.global_batch))
        return everyone if self.steps_left is None else min(everyone, self.steps_left * self.course.global_batch)

    def next_use(self, urls: Sequence[str]) -> NDArray[np.float64]:
        """Steps until each file is read next; infinity for those that aren't this loader's."""
        if self._index is None:
            self._index = UrlIndex(self.urls)
        found = np.full(len(urls), np.inf)
        if len(self.urls):
            indices = self._index.find(urls)
            mine = np.flatnonzero(indices >= 0)
            found[mine] = self.course.next_use(indices[mine], self.position) / self.course.global_batch
        return found
