"""What a Session does so that its node's filler can fetch ahead: it says what is read, and how far it is."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.contract import WorkerContract
    from ftrun.data.filler.process import FillerProcess
    from ftrun.data.filler.registering import Berth, Registered
    from ftrun.session.place import Place

_LOOK = 1.0
_SETTLE = 5.0


class Filling:
    """One rank's part: the node's first rank speaks for all of them. Training thread only.

    Under ftrun the launcher starts the filler, which outlives the ranks. Without it this rank does, as a child process
    that dies with it: threads in the training process would take turns with the training for the interpreter.
    """

    def __init__(self, contract: WorkerContract, place: Place) -> None:
        self._contract = contract
        self._place = place
        self._registered: list[Registered] = []
        self._berth: Berth | None = None
        self._process: FillerProcess | None = None
        self._looked = 0.0
        self._driving: Registered | None = None
        self._total = 0

    def register(self, name: str, loader: Any) -> tuple[Registered | None, Callable[[], None]]:
        """Have a loader fetched ahead of, if its data lies in a cache. Returns at once. On all ranks.

        Returns:
            Who wants to hear of the loader's positions, if anybody does; and what to call when the loader is gone.
        """
        from ftrun.data.filler import registering

        place = self._place
        if place.local_rank != 0:
            return None, _nothing
        first = place.rank - place.local_rank
        self._berth = registering.Berth(
            run_dir=self._contract.run_path,
            node=self._contract.node,
            attempt=self._contract.attempt,
            world_size=place.world_size,
            ranks=tuple(range(first, first + place.local_world_size)),
        )
        made = registering.register(self._berth, name, loader, self._registered[0] if self._registered else None)
        if made is None:
            return None, _nothing
        self._registered.append(made)
        self.look()
        return made, made.withdraw

    def drive(self, loader: Any, total: int, step: int) -> None:
        """The loop takes its batches from this loader, until the run has made so many steps.

        Args:
            loader: whatever yields them.
            total: steps of the whole run.
            step: those that are complete.
        """
        mine = (each for each in self._registered if loader is not None and each.loader is loader)
        self._driving = next(mine, None)
        self._total = total
        self.step(step)

    def step(self, step: int) -> None:
        """So many steps are complete. A few stores in memory."""
        if self._driving is not None:
            self._driving.expect(max(0, self._total - step))
        if self._registered:
            self.look()

    def look(self) -> None:
        """See that the filler runs, where that is this process's business; now and then is enough."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        if self._contract.alone and self._registered:
            from ftrun.data.filler.process import FillerProcess

            if self._process is None:
                self._process = FillerProcess(self._registered[0].directory)
            self._process.ensure()

    def close(self, *, finished: bool) -> None:
        """Let go.

        Args:
            finished: the run is over, and nothing will be read any more.
        """
        if self._process is not None:
            self._process.finish()
        if not self._registered or self._berth is None or not finished:
            return
        from ftrun.data.filler import registering

        for each in self._registered:
            each.settle(_SETTLE)
        with contextlib.suppress(OSError):
            registering.finish(self._berth, self._registered[0].directory, self._registered[0].final())


def _nothing() -> None:
    """Nothing was registered."""
