"""The run's first node, as far as spares go: while one asks, it says what is read, and how far the training is."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING

from ftrun.data.filler import page
from ftrun.data.filler.offers import Offer, OfferDir, copy_new, put_offer
from ftrun.data.filler.places import Pointer
from ftrun.data.filler.plans import FillPlan
from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftrun.data.filler.places import FillDir

_LOOK = 1.0
_FORGOTTEN = 60.0
"""Seconds without a sign of a spare after which it is gone."""
_CLOSE = 0.2


class Offering:
    """Looks for spares that ask, on a thread of its own: the run directory may be slow.

    Args:
        run_dir: of the run.
        node: number of this node, whose plans are offered.
        usual: says where this node's cache is for want of another word; called on the thread.
    """

    def __init__(self, run_dir: Path, node: int, usual: Callable[[], str]) -> None:
        self._offers = OfferDir(run_dir)
        self._pointer = Pointer.of(run_dir, node)
        self._usual = functools.cache(usual)
        self._heard: dict[str, tuple[bytes, float]] = {}
        self._told: dict[str, Offer] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-offering", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            with contextlib.suppress(OSError, ValueError, FtrunError):  # it is tried again
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Look once.

        Args:
            now: on the monotonic clock.

        Raises:
            OSError: the run directory, or the cache's, can't be used.
        """
        if not self._somebody_asks(now):
            return
        directory = self._pointer.read()
        plans = [FillPlan.read(each) for each in directory.plans.glob("*.json")] if directory is not None else []
        if directory is not None and plans:
            self._offers.make()
        for plan in plans:
            if plan is not None and directory is not None:
                self._offer(directory, plan)
        for loader in self._told.keys() - {plan.loader for plan in plans if plan is not None}:
            del self._told[loader]
            self._offers.offer(loader).unlink(missing_ok=True)

    def _somebody_asks(self, now: float) -> bool:
        asked = self._offers.asked()
        # By whether it changes, never by its age: no clock is compared with another one's.
        self._heard = {
            name: self._heard[name] if name in self._heard and self._heard[name][0] == said else (said, now)
            for name, said in asked.items()
        }
        gone = [name for name, (_, at) in self._heard.items() if now - at >= _FORGOTTEN]
        for name in gone:  # it was killed, and nobody else takes away what it has left
            self._offers.stop_asking(name.removesuffix(".json"))
        return len(gone) < len(self._heard)

    def _offer(self, directory: FillDir, plan: FillPlan) -> None:
        told = page.read(directory.page(plan.loader, plan.attempt))
        where = (plan.position, None, 0.0) if told is None else (told.position, told.steps_left, told.mean)
        offer = Offer(plan, *where, usual=plan.files.get("root") == self._usual())
        if self._told.get(plan.loader) == offer and self._offers.offer(plan.loader).exists():
            return
        copy_new(directory.pool.urls(plan.urls), self._offers.urls(plan.urls))
        prefix = self._offers.offer(plan.loader).stem
        for each in directory.plans.glob(f"{prefix}.*"):
            if each.suffix in (".order", ".ends"):
                copy_new(each, self._offers.path / each.name)
        put_offer(self._offers.offer(plan.loader), offer)
        self._told[plan.loader] = offer
