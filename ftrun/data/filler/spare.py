"""A spare's side: what the run's first node offers is fetched as if this node's ranks were the run's last ones.

Whoever takes a seat comes behind the others, so these are the ranks that it will have. The filler is the same as a
member's, but for its haste: the network is the members'.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.data.filler.offers import Offer, OfferDir, copy_new
from ftrun.data.filler.page import Page
from ftrun.data.filler.places import Pool, put_json
from ftrun.data.filler.process import FillerProcess
from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.filler.places import FillDir
    from ftrun.data.filler.plans import FillPlan

_LOOK, _ASK = 1.0, 5.0
_CLOSE = 0.2


class SpareFiller:
    """Fills the cache of a node that waits. A thread of its own looks; :meth:`hand_over` and later calls end that.

    Args:
        run_dir: of the run, which all nodes share.
        name: of this node.
        usual: says where this node's cache is for want of another word; called on the thread.
        waits: whether this node waits for a seat.
        report: is told in words when it begins.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        usual: Callable[[], str],
        waits: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._offers = OfferDir(run_dir)
        self._usual = functools.cache(usual)
        self._name = name
        self._waits = waits
        self._report = report
        self._count = 0
        self._ask_at = 0.0
        self._pages: dict[str, tuple[FillPlan, Page]] = {}
        self._process: FillerProcess | None = None
        self._held = -1  # a descriptor, by which others see that this process lives
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def directory(self) -> FillDir | None:
        """Where its plans lie; None while nothing is to be fetched."""
        process = self._process
        return process.directory if process is not None else None

    @property
    def pid(self) -> int:
        """The filler's process; 0 where there is none."""
        process = self._process
        return (process.pid if process is not None else 0) or 0

    def serves(self, pool: Pool) -> bool:
        """Whether it fetches into the cache that this is beside."""
        found = self.directory
        return found is not None and found.pool == pool

    def start(self) -> None:
        """Begin, for the first time or once more."""
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="ftrun-spare", daemon=True)
            self._thread.start()

    def hand_over(self) -> None:
        """This node waits no more. What runs goes on, and is the caller's to :meth:`finish`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE)

    def finish(self) -> None:
        """End the filler, and leave nothing of it but the files that it brought."""
        self.hand_over()
        process, self._process = self._process, None
        self._pages.clear()
        if process is not None:
            process.finish()
            process.directory.remove()
            os.close(self._held)

    # The thread

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            with contextlib.suppress(OSError, ValueError, FtrunError):  # it is tried again
                self._look(time.monotonic())
        if self._count:
            self._count, self._ask_at = 0, 0.0
            self._offers.stop_asking(self._name)

    def _look(self, now: float) -> None:
        if not self._waits():
            return
        if now >= self._ask_at:
            self._ask_at = now + _ASK
            self._count += 1
            self._offers.ask(self._name, self._count)
        offers = [offer for path in sorted(self._offers.path.glob("*.json")) if (offer := Offer.read(path)) is not None]
        for offer in offers:
            self._take(offer)
        self._withdraw({each.plan.loader for each in offers})
        process = self._process
        if process is not None and not self._stop.is_set():
            process.ensure()

    def _take(self, offer: Offer) -> None:
        directory = self._directory(self._files(offer))
        if directory is None:
            return
        plan = self._mine(offer)
        known = self._pages.get(plan.loader)
        for each in self._offers.orders(plan.loader):
            copy_new(each, directory.plans / each.name)
        if self._stop.is_set():
            return  # what was copied took long, and all may be taken away by now
        if known is None or known[0] != plan:
            known = self._pages[plan.loader] = plan, self._write(directory, plan, offer)
        known[1].write(offer.position, offer.steps_left, offer.mean)

    def _files(self, offer: Offer) -> str:
        return self._usual() if offer.usual else str(offer.plan.files.get("root", ""))

    def _directory(self, root: str) -> FillDir | None:
        """Of the first loader's cache; a run has one filler on a node."""
        pool = Pool.of(Path(root))
        if self._process is None and root and not self._stop.is_set():
            directory = pool.run(self._run_dir, self._name)
            directory.remove()  # of an earlier spare here
            directory.make()
            self._held = directory.hold_for_spare()
            self._process = FillerProcess(directory, spare=True)
            self._report("what the others read next is fetched into the data cache here, too")
        found = self.directory
        return found if found is not None and found.pool == pool else None

    def _mine(self, offer: Offer) -> FillPlan:
        plan = offer.plan
        last = tuple(range(max(0, plan.world_size - len(plan.ranks)), plan.world_size))
        return replace(plan, ranks=last, files={**plan.files, "root": self._files(offer)})

    def _write(self, directory: FillDir, plan: FillPlan, offer: Offer) -> Page:
        copy_new(self._offers.urls(plan.urls), directory.pool.urls(plan.urls))
        page = directory.page(plan.loader, plan.attempt)
        for old in directory.plans.glob(f"{page.name.partition('.')[0]}.*.page"):
            old.unlink(missing_ok=True)
        made = Page(page, offer.position)
        put_json(directory.plan(plan.loader), replace(plan, position=offer.position).to_json())
        return made

    def _withdraw(self, offered: set[str]) -> None:
        directory = self.directory
        for loader in self._pages.keys() - offered:
            self._pages.pop(loader, None)
            if directory is not None:
                directory.withdraw(loader)
