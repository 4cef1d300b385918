"""A rank's side: saying what its node reads, and then, at each step, how far it is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import weakref
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ftrun.data.filler import orders
from ftrun.data.filler.page import Page
from ftrun.data.filler.places import FillDir, Pointer, Pool, put_json
from ftrun.data.filler.plans import FillPlan
from ftrun.data.filler.read_files import mean_length, read_files
from ftrun.data.filler.shown import Shown, baseline
from ftrun.data.filler.urls import pack, store
from ftrun.data.order import TORCH, order_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ftrun.data.filler.read_files import ReadFiles
    from ftrun.data.filler.urls import Strings
    from ftrun.data.position import Position, Recipe

    _Listed = tuple[NDArray[Any], NDArray[Any] | None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Berth:
    """Where a rank stands, as far as a plan goes.

    Attributes:
        run_dir: of the run.
        node: number of the node.
        attempt: of the run.
        world_size: ranks that share each global batch.
        ranks: those of this node.
    """

    run_dir: Path
    node: int
    attempt: int
    world_size: int
    ranks: tuple[int, ...]


class Registered:
    """One loader that is fetched ahead of by the node's filler. Training thread; writing is left to another one.

    Attributes:
        name: of the loader.
        directory: the run's.

    Args:
        berth: where this rank stands.
        name: of the loader.
        loader: an :class:`ftrun.DataLoader` over files of a cache.
        found: what it reads.
        directory: the run's.
        is_first: no other loader of this process has been registered there.
    """

    def __init__(
        self, berth: Berth, name: str, loader: Any, found: ReadFiles, *, directory: FillDir, is_first: bool
    ) -> None:
        self._berth = berth
        self.name = name
        # A loader that the script lets go of must be free to go.
        self._loader = weakref.ref(loader)
        self._files, self._shards = found.files, found.shards
        self._recipe: Recipe = loader.recipe
        self._written = found.shards is None and orders.must_be_written(self._recipe)
        self._position: Position = loader.position
        self._steps_left: int | None = None
        self._page: Page | None = None
        self._orders_of = -1
        self._is_withdrawn = False
        self._pid = os.getpid()
        self.directory = directory
        self._make(is_first)
        first = self._asked(self._position.epoch)  # what the loop would ask a moment later anyway
        self._thread = threading.Thread(
            target=self._register, args=(found.urls, first), name="ftrun-register", daemon=True
        )
        self._thread.start()

    @property
    def loader(self) -> Any:
        """The loader; None where the script has let go of it."""
        return self._loader()

    def at(self, position: Position) -> None:
        """The committed position is this now. A few stores in memory."""
        self._position = position
        page = self._page
        if page is not None:
            page.write(position, self._steps_left, self._mean())
            if self._written and position.epoch != self._orders_of and position.samples:
                self._write_orders_beside(position.epoch)

    def expect(self, steps_left: int | None) -> None:
        """The run will make so many more steps with this loader; None where nobody knows."""
        self._steps_left = steps_left
        if self._page is not None:
            self._page.write(self._position, steps_left, self._mean())

    def _mean(self) -> float:
        loader = self.loader if self._shards is not None else None
        return 0.0 if loader is None else mean_length(loader.source)

    def withdraw(self) -> None:
        """Nobody will read with this loader any more: nothing is fetched for it from now on. Any thread, any moment."""
        if os.getpid() != self._pid:  # a forked child lets go of its copy
            return
        self._is_withdrawn = True
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.directory.withdraw(self.name)

    def settle(self, seconds: float) -> None:
        """Wait for what is being written."""
        self._thread.join(seconds)

    def final(self) -> Shown:
        """What has happened in the cache since the run began."""
        files = self._files
        return Shown(root=str(files.root), limit=files.limit).counted(
            files.counters(node=True), baseline(self.directory)
        )

    def _make(self, is_first: bool) -> None:
        pointer = Pointer.of(self._berth.run_dir, self._berth.node)
        # Of several loaders the first writes where the directory is, in its own time.
        self._is_new = is_first and pointer.read() != self.directory
        with contextlib.suppress(OSError):  # said by what is written next
            if self._is_new:
                self.directory.remove()  # of an earlier run in a run directory of that name
            self.directory.make()

    # In a thread of its own

    def _register(self, urls: Strings, first: _Listed | None) -> None:
        try:
            self._write(urls, first)
        except Exception as error:  # a full disk, options unknown to JSON, whatever a list of URLs raises
            _log.warning("ftrun: loader %r is not fetched ahead of: %s: %s", self.name, type(error).__name__, error)

    def _write(self, urls: Strings, first: _Listed | None) -> None:
        berth, directory, name = self._berth, self.directory, self.name
        spec = self._files.spec()
        json.dumps(spec)
        if self._is_new:
            Pointer.of(berth.run_dir, berth.node).point(directory)
        if not directory.baseline.exists():
            put_json(directory.baseline, asdict(self._files.counters(node=True)))
        digest, content = pack(urls)
        store(directory.pool.urls(digest), content)
        del content
        if self._written:
            self._write_orders(self._position.epoch, first)
        page = Page(directory.page(name, berth.attempt), self._position)
        plan = FillPlan(
            loader=name,
            attempt=berth.attempt,
            recipe=self._recipe,
            world_size=berth.world_size,
            ranks=berth.ranks,
            position=self._position,
            urls=digest,
            files=spec,
            written=self._written,
            shards=self._shards,
        )
        put_json(directory.plan(name), plan.to_json())
        if self._is_withdrawn:  # meanwhile
            self._remove()
        self._page = page
        page.write(self._position, self._steps_left, self._mean())
        self._drop_old(directory)

    def _drop_old(self, directory: FillDir) -> None:
        mine = directory.page(self.name, self._berth.attempt)
        for path in directory.plans.glob(f"{mine.name.partition('.')[0]}.*.page"):
            if path != mine:
                path.unlink(missing_ok=True)

    # Orders

    def _asked(self, epoch: int) -> _Listed | None:
        """What a user's sampler lists. Training thread: asking seeds the generators that training draws from."""
        if not self._written or self._recipe.order == TORCH:
            return None
        ask = getattr(self.loader, "listed", None)
        found: _Listed | None = ask(epoch) if ask is not None else None
        return found

    def _write_orders_beside(self, epoch: int) -> None:
        self._orders_of = epoch
        with contextlib.suppress(Exception):  # whatever a sampler raises: its loop will, too
            listed = self._asked(epoch)
            threading.Thread(target=self._try_orders, args=(epoch, listed), name="ftrun-register", daemon=True).start()

    def _try_orders(self, epoch: int, listed: _Listed | None) -> None:
        with contextlib.suppress(Exception):  # a hint that is missing costs time only
            self._write_orders(epoch, listed)

    def _write_orders(self, epoch: int, listed: _Listed | None) -> None:
        """This epoch's, and where it can be computed the next one's; older ones go."""
        self._orders_of = epoch
        recipe = self._recipe
        if listed is not None:
            orders.write(self.directory.order(self.name, epoch), *listed)
        elif recipe.order == TORCH and recipe.n is not None:
            for each in (epoch, epoch + 1):
                orders.write(self.directory.order(self.name, each), order_of(recipe, each).take(0, recipe.n), None)
        prefix = self.directory.order(self.name, epoch).name.partition(".")[0]
        for path in self.directory.plans.glob(f"{prefix}.*.*"):
            number = path.name.split(".")[1]
            if path.suffix in (".order", ".ends") and number.isdecimal() and int(number) < epoch:
                path.unlink(missing_ok=True)


def register(berth: Berth, name: str, loader: Any, beside: Registered | None = None) -> Registered | None:
    """Have a loader fetched ahead of; None for data that lies in no cache, or whose order nobody knows.

    Args:
        berth: where this rank stands.
        name: of the loader.
        loader: an :class:`ftrun.DataLoader`.
        beside: the first loader that this process has registered.

    Raises:
        UsageError: what its dataset says of its shards can't be.
    """
    found = read_files(loader)
    if found is None:
        return None
    directory = Pool.of(found.files.root).run(berth.run_dir, berth.node)
    if beside is not None and beside.directory != directory:
        _log.warning(
            "ftrun: loader %r is not fetched ahead of: its cache, %s, is another one than that of loader %r, and a run "
            "has one filler on a node; give both one CachedFiles.",
            name, found.files.root, beside.name,
        )  # fmt: skip
        return None
    return Registered(berth, name, loader, found, directory=directory, is_first=beside is None)


def finish(berth: Berth, directory: FillDir, last: Shown) -> None:
    """The run is over: what it leaves is what is shown of it."""
    with contextlib.suppress(OSError):
        Pointer.of(berth.run_dir, berth.node).point(None, replace(last, pid=0, steps_ahead=0.0).to_json())
    directory.remove()
