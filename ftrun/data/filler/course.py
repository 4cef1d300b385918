"""What one node reads, from a position on, and when it reads a file next. Pure.

Distances are in samples of all ranks together, from the committed position: what the next step takes is less than a
global batch away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ftrun.data.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ftrun.data.filler.orders import EpochOrder


_BLOCK = 2048


@dataclass(frozen=True)
class Stretch:
    """Some of what comes next.

    Attributes:
        epoch: in which it comes.
        places: at which this node's files are due.
        indices: of these files.
        after: the position behind the stretch.
    """

    epoch: int
    places: NDArray[np.int64]
    indices: NDArray[np.int64]
    after: Position


class Way(Protocol):
    """What one node's ranks read of one loader's data, whatever a file of it is."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        ...

    @property
    def block(self) -> int:
        """Places to look at at a time."""
        ...

    def samples_for(self, files: float) -> float:
        """Samples of all ranks in which this node reads so many files, about."""
        ...

    def stretch(self, start: Position, count: int) -> Stretch | None:
        """The files that are due in the next ``count`` places; fewer at the end of an epoch. None where it's unknown.

        The end of an epoch is the beginning of the next one.
        """
        ...

    def under_way(self, start: Position) -> Stretch | None:
        """The files that ranks which begin there read at once, though they were due before."""
        ...

    def distance(self, of: Position, start: Position) -> float:
        """How far a position is from another one; negative when it is behind it."""
        ...

    def next_use(self, indices: NDArray[np.int64], start: Position) -> NDArray[np.float64]:
        """How far away the next use of each file is, as far as the next epoch; what comes later is further still."""
        ...

    def length(self, epoch: int) -> int:
        """Samples of an epoch that count."""
        ...


def distance(of: Position, start: Position, length: Callable[[int], int]) -> float:
    """How far a position is from another one, by the lengths of epochs; negative when it is behind it."""
    if of.epoch == start.epoch:
        return of.samples - start.samples
    step = 1 if of.epoch > start.epoch else -1
    first, last = (start, of) if step > 0 else (of, start)
    between = sum(length(epoch) for epoch in range(first.epoch, min(last.epoch, first.epoch + 100)))
    return step * (between - first.samples + last.samples)


@dataclass(frozen=True)
class Course:
    """The way through a dataset whose samples are files.

    Attributes:
        global_batch: samples of a step.
        world_size: ranks that share it: rank r takes every ``world_size``-th sample of it, from the r-th.
        ranks: those of the node.
        epochs: orders by epoch; None for one that isn't known yet.
    """

    global_batch: int
    world_size: int
    ranks: tuple[int, ...]
    epochs: Callable[[int], EpochOrder | None]

    @property
    def all_ranks(self) -> bool:
        """Whether everything is read here."""
        return len(set(self.ranks)) >= self.world_size

    @property
    def block(self) -> int:
        """See :attr:`Way.block`."""
        return _BLOCK

    def samples_for(self, files: float) -> float:
        """See :meth:`Way.samples_for`."""
        return files * self.world_size / max(1, len(self.ranks))

    def under_way(self, start: Position) -> None:
        """See :meth:`Way.under_way`."""
        return

    def stretch(self, start: Position, count: int) -> Stretch | None:
        """See :meth:`Way.stretch`: this node's samples among the next ``count`` places."""
        known = self.epochs(start.epoch)
        if known is None or known.usable < 1:
            return None
        stop = min(start.samples + count, known.usable)
        if start.samples >= stop:
            return self.stretch(Position(start.epoch + 1), count) if start.samples else None
        places = np.arange(start.samples, stop, dtype=np.int64)
        places = places[self._here(places, known)]
        after = Position(start.epoch + 1) if stop == known.usable else Position(start.epoch, stop)
        return Stretch(start.epoch, places, known.order.at(places), after)

    def distance(self, of: Position, start: Position) -> float:
        """See :meth:`Way.distance`."""
        return distance(of, start, self.length)

    def next_use(self, indices: NDArray[np.int64], start: Position) -> NDArray[np.float64]:
        """See :meth:`Way.next_use`."""
        ahead = float(self.length(start.epoch) - start.samples)
        later = ahead + 2.0 * self.length(start.epoch + 1)
        found = np.full(len(indices), later)
        following = self.epochs(start.epoch + 1)
        if following is not None:
            self._note(found, following, indices, 0, ahead)
        now = self.epochs(start.epoch)
        if now is not None:
            self._note(found, now, indices, start.samples, -float(start.samples))
        return found

    def _note(
        self, found: NDArray[np.float64], known: EpochOrder, indices: NDArray[np.int64], first: int, offset: float
    ) -> None:
        places = known.order.places(indices)
        counts = (places >= first) & (places < known.usable)
        counts[counts] = self._here(places[counts], known)
        found[counts] = places[counts] + offset

    def _here(self, places: NDArray[np.int64], known: EpochOrder) -> NDArray[np.bool_]:
        """Which places are those of this node's ranks."""
        if self.all_ranks:
            return np.ones(len(places), dtype=bool)
        if known.ends is None:
            offsets = places % self.global_batch
        else:
            bounds = np.concatenate([[0], known.ends])
            offsets = places - bounds[np.searchsorted(bounds, places, side="right") - 1]
        return np.isin(offsets % self.world_size, np.asarray(self.ranks))

    def length(self, epoch: int) -> int:
        """See :meth:`Way.length`; a neighbour's where it isn't known."""
        for each in (epoch, epoch - 1, epoch + 1):
            known = self.epochs(each)
            if known is not None:
                return known.usable
        return self.global_batch
