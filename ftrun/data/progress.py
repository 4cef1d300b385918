"""How far one loader has got, and the loops over it: what a batch counts for, when, and who is told."""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING, Any, Protocol

from ftrun.data.position import Position
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.data.plan import Plan

_log = logging.getLogger(__name__)


class Follower(Protocol):
    """Who fetches ahead of a loader."""

    def at(self, position: Position) -> None:
        """The committed position is this now. Called by the thread that loops."""
        ...


class Progress:
    """How far one loader has got. Apart from the loader, because torch's makes each assignment of its own slow.

    Args:
        plan: the requests of its loops.
        in_workers: whether workers load the samples.

    Attributes:
        committed: after the last batch that counts as consumed.
        yielded: after the last batch that the loop was given.
        padding: repeats at the end of that batch.
        turn: number of loops begun or broken off; a loop of an earlier turn is over.
        waited: seconds, for batches.
        follower: whoever fetches ahead of the loader.
    """

    __slots__ = ("_in_workers", "_told", "committed", "follower", "padding", "plan", "turn", "waited", "yielded")

    def __init__(self, plan: Plan, *, in_workers: bool) -> None:
        self.plan = plan
        self._in_workers = in_workers
        self.committed = Position()
        self.yielded = Position()
        self.padding = 0
        self.turn = 0
        self.waited = 0.0
        self.follower: Follower | None = None
        self._told = False

    def restore(self, position: Position) -> None:
        """Stand at a stored position. Before the first loop."""
        self.committed = self.yielded = position
        self.rewind()

    def begin(self) -> None:
        """A new loop, from the committed position; the one before is over."""
        self.turn += 1
        self.yielded = self.committed
        self.padding = 0
        self.rewind()

    def rewind(self) -> None:
        """Make the next requests those after the batch that was yielded last."""
        self.plan.start = self.yielded
        self.plan.ahead.clear()

    def commit(self) -> None:
        """Count the batch that was yielded last as consumed."""
        self.committed = self.yielded
        self.plan.source.commit()
        self.tell()

    def tell(self) -> None:
        """Say where the committed position is."""
        if self.follower is not None:
            self.follower.at(self.committed)

    def next(self, turn: int, batches: Iterator[Any]) -> Any:
        """The next batch of a loop. Whoever asks for it has consumed the one before.

        Raises:
            StopIteration: the epoch has ended.
            UsageError: the loop is over.
            BaseException: whatever loading it raises, with a note that says at which position.
        """
        if turn != self.turn:
            raise UsageError(
                "this loop over the loader has ended, because loading a batch failed or a newer loop began: "
                "iter(loader) goes on at the committed position; loops side by side need a loader each"
            )
        if self.committed is not self.yielded:
            self.commit()
        began = time.monotonic()
        try:
            arrived = next(batches)
        except StopIteration:
            self._end_epoch()
            raise
        except BaseException as error:  # Ctrl-C, too: the batch that was asked for must not count as the next one
            self._fail(error)
            raise
        self.waited += time.monotonic() - began
        self.yielded, self.padding = self.plan.ahead.popleft()
        if self.padding and not self._told:
            self._tell_of_padding()
        return self.plan.source.opened(arrived)

    def _end_epoch(self) -> None:
        # Where nobody knew the epoch's length, its end is news.
        if self.committed.epoch == self.plan.start.epoch:
            self.committed = self.yielded = Position(self.committed.epoch + 1, 0)

    def _fail(self, error: BaseException) -> None:
        share = self.plan.share
        error.add_note(
            f"ftrun: the loader of rank {share.rank} of {share.world_size} was waiting for the batch at "
            f"position {self.yielded.samples} of epoch {self.yielded.epoch}"
        )
        self.turn += 1  # this loop is over: what comes next would be at another position
        if self._in_workers:
            # Torch re-raises a worker's error from a frame that refers to what it was doing.
            traceback.clear_frames(error.__traceback__)

    def _tell_of_padding(self) -> None:
        self._told = True
        _log.warning(
            "ftrun: the last batch of this epoch holds %d repeated sample(s) on rank %d (tail=%r): loader.padding says "
            "how many at its end, in every batch. Give them no weight in a loss or a metric.",
            self.padding, self.plan.share.rank, self.plan.recipe.tail,
        )  # fmt: skip


class Loop:
    """One pass to the end of the epoch. Nothing of the loader refers to it, so leaving it ends its workers.

    Args:
        loader: lives as long as its loop: of ``for batch in ft.loader(...)`` nobody else keeps it, and a step that is
            complete must find it.
        progress: of the loader.
        batches: as they are fetched.
    """

    def __init__(self, loader: object, progress: Progress, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._progress = progress
        self._turn = progress.turn
        self._batches = batches

    def __iter__(self) -> Loop:
        return self

    def __next__(self) -> Any:
        return self._progress.next(self._turn, self._batches)

    def __len__(self) -> int:
        return len(self._progress.plan)
