"""The filler process's main thread: it reads plans and pages, tells the filler, and shows how it is doing."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ftrun.data.cache.files import CachedFiles
from ftrun.data.filler import orders, page
from ftrun.data.filler.chains import shard_course
from ftrun.data.filler.course import Course, Way
from ftrun.data.filler.filler import THREADS, Filler
from ftrun.data.filler.lane import Bounds, Lane
from ftrun.data.filler.plans import FillPlan, Resume, resumed
from ftrun.data.filler.shown import Shown, baseline
from ftrun.data.filler.urls import MappedUrls
from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.data.filler.life import Life
    from ftrun.data.filler.orders import EpochOrder
    from ftrun.data.filler.places import FillDir
    from ftrun.data.position import Position

_log = logging.getLogger(__name__)

_LOOK, _IDLE = 0.1, 0.25
_STILL = 2.0
_PLANS = 0.25
_SHOW = 1.0
_PATIENCE = 30.0
"""Seconds without a plan after which there is nothing to do."""
_MANY_THREADS = 300
"""More than that are left behind in remotes that hang: another process has none of them."""


class Loop:
    """Fetches ahead for one run on one node, until its life is over.

    Args:
        directory: of the run.
        life: says when to end.
        bounds: how far ahead to go.
        threads: how many files are fetched at a time.
    """

    def __init__(self, directory: FillDir, life: Life, bounds: Bounds | None = None, threads: int = THREADS) -> None:
        self._directory = directory
        self._life = life
        self._bounds = bounds or Bounds()
        self._filler = Filler(threads, thorough=True)
        self._baseline = baseline(directory)
        self._lanes: dict[Path, tuple[FillPlan, Lane]] = {}
        self._files: dict[str, CachedFiles] = {}
        self._paces: dict[Path, _Pace] = {}
        self._told: dict[Path, tuple[Lane, Position, int | None]] = {}
        self._state: object = None
        self._moved = self._planned = time.monotonic()
        self._show_due = self._plans_due = 0.0

    def run(self) -> None:
        """Go on until it is over, or nothing is left to do."""
        while not self._life.over:
            now = time.monotonic()
            if now >= self._plans_due:
                self._plans_due = now + _PLANS
                self._load(now)
            self._look(now)
            if now >= self._show_due:
                self._show_due = now + _SHOW
                self._show()
            if not self._lanes and now - self._planned > _PATIENCE:
                return
            if threading.active_count() > _MANY_THREADS:
                _log.warning("too many requests hang at the remote: starting again without them")
                return
            self._life.wait(_LOOK if now - self._moved < _STILL else _IDLE)

    def close(self) -> None:
        """Leave behind what has been done."""
        self._show(last=True)

    # Plans

    def _load(self, now: float) -> None:
        state = self._changes()
        if state == self._state:
            return
        self._state = state
        resume = Resume.read(self._directory.resume)
        found: dict[Path, tuple[FillPlan, Lane]] = {}
        for path in sorted(self._directory.plans.glob("*.json")):
            written = FillPlan.read(path)
            if written is None:
                continue
            plan = resumed(written, resume)
            known = self._lanes.get(path)
            if known is not None and known[0] == plan:
                found[path] = known
                continue
            with contextlib.suppress(OSError, ValueError, FtrunError, TypeError, KeyError):
                found[path] = plan, self._lane(plan, written, known)
                _log.info("%s, attempt %d: fetching from %s", plan.loader, plan.attempt, plan.position)
        self._lanes = found
        self._look(now)  # before anything is fetched: the ranks may have got further, or be near the end
        self._filler.follow([lane for _, lane in found.values()])
        self._planned = now if found else self._planned

    def _changes(self) -> object:
        """What differs when somebody has written a plan or where to resume. Names say that a plan is new, too."""
        found = []
        for path in (*sorted(self._directory.plans.glob("*.json")), self._directory.resume):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((path.name, stat.st_ino, stat.st_mtime_ns))
        return found

    def _lane(self, plan: FillPlan, written: FillPlan, known: tuple[FillPlan, Lane] | None) -> Lane:
        """The lane of a plan.

        Args:
            plan: as the attempt reads that is starting.
            written: as the last attempt has written it.
            known: plan and lane until now.
        """
        # Until the new ranks say when the run ends, it ends where the old ones have said.
        if known is not None and _is_further(plan, known[0]):
            self._filler.moved(known[1], plan.position, None)
            return known[1]
        lane = self._made(plan, known)
        before = known[1] if known is not None else self._as_it_was(written, lane)
        lane.steps_left = before.steps_left_from(plan.position) if before is not None else None
        return lane

    def _as_it_was(self, written: FillPlan, lane: Lane) -> Lane | None:
        """The lane of an attempt that is over, as far as its page says where it was."""
        told = page.read(self._directory.page(written.loader, written.attempt))
        if told is None:
            return None
        self._filler.learned(lane, told.mean)
        was = Lane(written.loader, self._course(written), lane.urls, lane.files, self._bounds, told.position)
        was.steps_left = told.steps_left
        return was

    def _made(self, plan: FillPlan, known: tuple[FillPlan, Lane] | None) -> Lane:
        same = known is not None and known[0].urls == plan.urls
        urls = known[1].urls if known and same else MappedUrls(self._directory.pool.urls(plan.urls))
        needed = plan.needed_urls
        if len(urls) < needed:
            raise ValueError(f"{len(urls)} URLs are too few where {needed} are needed")
        files = self._cache(plan)
        return Lane(plan.loader, self._course(plan), urls, files, self._bounds_of(files), plan.position)

    def _cache(self, plan: FillPlan) -> CachedFiles:
        """One for each way of reaching a cache. It tries once: ranks try again, and the filler has time."""
        key = repr(sorted(plan.files.items()))
        if key not in self._files:
            made = CachedFiles.from_spec(plan.files)
            spec = made.spec()
            spec["patience"] = {**spec["patience"], "attempts": 1}
            self._files[key] = CachedFiles.from_spec(spec)
        return self._files[key]

    def _bounds_of(self, files: CachedFiles) -> Bounds:
        limit = files.limit
        return (
            self._bounds if limit is None else replace(self._bounds, bytes=min(self._bounds.bytes, max(1, limit // 2)))
        )

    def _course(self, plan: FillPlan) -> Way:
        if plan.shards is not None:
            return shard_course(plan.recipe, plan.shards, plan.world_size, plan.ranks)

        @lru_cache(maxsize=4)
        def computed(epoch: int) -> EpochOrder | None:
            return orders.computed(plan.recipe, epoch)

        written: dict[int, EpochOrder] = {}

        def read(epoch: int) -> EpochOrder | None:
            if epoch not in written:
                found = orders.read(self._directory.order(plan.loader, epoch), plan.recipe)
                if found is None:
                    return None
                written[epoch] = found
                for old in [each for each in written if each < epoch - 2]:
                    del written[old]
            return written[epoch]

        return Course(plan.recipe.global_batch, plan.world_size, plan.ranks, read if plan.written else computed)

    # Positions

    def _look(self, now: float) -> None:
        for path, (plan, lane) in self._lanes.items():
            told = page.read(self._directory.page(plan.loader, plan.attempt))
            if told is not None:
                self._filler.learned(lane, told.mean)
            if told is None or self._told.get(path) == (lane, told.position, told.steps_left):
                continue
            self._told[path] = lane, told.position, told.steps_left
            pace = self._paces.setdefault(path, _Pace())
            lane.pace = (
                pace.measured(lane.course.distance(told.position, lane.position), now) / lane.course.global_batch
            )
            self._filler.moved(lane, told.position, told.steps_left)
            self._moved = now

    # What others see

    def _show(self, *, last: bool = False) -> None:
        with contextlib.suppress(OSError):
            shown = self._shown()
            if shown is not None:
                shown = replace(shown, pid=0, steps_ahead=0.0, waits_for="") if last else shown
                shown.write(self._directory)

    def _shown(self) -> Shown | None:
        files = next(iter(self._files.values()), None)
        if files is None:
            return None
        tally = self._filler.tally
        return Shown(
            root=str(files.root),
            limit=files.limit,
            errors=tally.errors,
            missing=tally.missing,
            steps_ahead=round(self._filler.ahead, 1),
            waits_for=self._filler.waits_for,
            pid=os.getpid(),
            at=time.time(),
        ).counted(files.counters(node=True), self._baseline)

    def last_words(self) -> str:
        """What was done, for the log."""
        return ", ".join(f"{name} {value}" for name, value in asdict(self._filler.tally).items() if value)


class _Pace:
    """Samples per second, smoothed over a few seconds."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._pace = 0.0

    def measured(self, samples: float, now: float) -> float:
        if self._at is not None and now > self._at and samples > 0:
            latest = samples / (now - self._at)
            self._pace = latest if not self._pace else 0.9 * self._pace + 0.1 * latest
        self._at = now
        return self._pace


def _is_further(plan: FillPlan, before: FillPlan) -> bool:
    """Whether it is the same plan, of a later attempt."""
    return replace(plan, attempt=0, position=before.position) == replace(before, attempt=0)
