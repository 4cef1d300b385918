"""The filler itself: threads that bring in what is read next, of all loaders of a node, and never get in the way."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftrun.data.cache.refusals import RemoteError, RemoteFileMissing
from ftrun.data.filler.chains import ChainCourse
from ftrun.data.filler.outage import Outage
from ftrun.data.filler.room import Room
from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ftrun.data.filler.lane import Due, Lane

_log = logging.getLogger(__name__)

THREADS = 16
_LOOK = 0.5
"""Seconds between looks of a thread that has nothing to do and isn't told that it has."""
_PAUSE = 0.1
_DISK = 5.0


@dataclass
class Tally:
    """What a filler has done.

    Attributes:
        fetched: files that it brought in.
        bytes: that they held.
        there: files that were there.
        errors: attempts that failed; ranks make their own, and say what is wrong.
        missing: files that aren't there any more.
        late: files that training got to first.
    """

    fetched: int = 0
    bytes: int = 0
    there: int = 0
    errors: int = 0
    missing: int = 0
    late: int = 0


class Filler:
    """Fetches ahead of some loaders. Its owner calls :meth:`follow` and :meth:`moved`; the threads do the rest.

    Args:
        threads: how many files are fetched at a time.
        thorough: large files that are there from before the run are read and compared with their checksums, as small
            ones are by whoever touches them first.
    """

    def __init__(self, threads: int = THREADS, *, thorough: bool = False) -> None:
        self._threads = threads
        self._thorough = thorough
        self._changed = threading.Condition()
        self._gate = threading.Lock()
        self._lanes: list[Lane] = []
        self._rooms: dict[str, Room] = {}
        self._outages: dict[str, Outage] = {}
        self._started: list[threading.Thread] = []
        self._stopped = False
        self.tally = Tally()

    def follow(self, lanes: Sequence[Lane]) -> None:
        """Fetch ahead of these loaders from now on, and of no others."""
        with self._changed:
            self._lanes = list(lanes)
            self._rooms = {
                str(lane.files.root): self._rooms.get(str(lane.files.root)) or self._room(lane) for lane in lanes
            }
            self._changed.notify_all()
        while len(self._started) < self._threads and lanes:
            thread = threading.Thread(target=self._work, daemon=True, name=f"ftrun-filler-{len(self._started)}")
            self._started.append(thread)
            thread.start()

    def moved(self, lane: Lane, position: Any, steps_left: int | None) -> None:
        """A loader is there now."""
        with self._changed:
            if lane.move(position, steps_left):
                self._changed.notify()

    def learned(self, lane: Lane, mean: float) -> None:
        """So many samples the loader's shards have, on the average, where nobody knows their lengths; 0 is no news."""
        course = lane.course
        if isinstance(course, ChainCourse) and course.is_news(mean):
            with self._changed:
                lane.take_course(course.with_mean(mean))
                self._changed.notify()

    def stop(self) -> None:
        """End the threads, each after the file that it is at."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def ahead(self) -> float:
        """Steps that the loader is ahead of which least is."""
        with self._changed:
            return min((lane.steps_ahead for lane in self._lanes), default=0.0)

    @property
    def waits_for(self) -> str:
        """What keeps it from its work, in words; empty where nothing does."""
        down = [f"{where}: {each.last}" for where, each in list(self._outages.items()) if each.is_down]
        if down:
            return down[0]
        return "room in the cache" if any(each.full for each in list(self._rooms.values())) else ""

    # One thread

    def _work(self) -> None:
        while True:
            # One at a time looks for what is due and takes room for it, so that what is read first has room first.
            with self._gate:
                due = self._take()
                if due is None:
                    return
                ready = self._is_wanted(due)
            if ready is not None:
                try:
                    self._bring(due, *ready)
                except Exception as error:  # whatever a driver raises: the other files must come all the same
                    _log.warning("ftrun: %s can't be fetched ahead: %s: %s", due.url, type(error).__name__, error)
                    self.tally.errors += 1

    def _of_lane(self, lane: Lane, now: float) -> Due | None:
        """What is due of a loader next; one whose order makes no sense is fetched ahead of no more."""
        try:
            due = lane.take(now)
            if due is not None:
                _ = due.url  # which it may not have
        except Exception as error:  # of a list that a user's sampler has made, say: the other loaders must not suffer
            _log.warning("ftrun: loader %r is not fetched ahead of: %s: %s", lane.name, type(error).__name__, error)
            self._lanes = [each for each in self._lanes if each is not lane]
            return None
        return due

    def _take(self) -> Due | None:
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                # Of the loaders that want something the one that has least ahead.
                for lane in sorted(self._lanes, key=lambda each: each.steps_ahead):
                    due = self._of_lane(lane, now)
                    if due is not None:
                        return due
                self._changed.wait(_PAUSE if any(now < each.paused for each in self._lanes) else _LOOK)
            return None

    def _is_wanted(self, due: Due) -> tuple[Outage, Room, float] | None:
        """What is needed to bring a file in, if that is to be done now."""
        lane, url = due.lane, due.url
        try:
            there = lane.files.has(url)
        except (FtrunError, OSError):  # of the cache's disk: ranks will say so
            there = True
        if there:
            self.tally.there += 1
            self._is_there(due)
            return None
        with self._changed:
            lane.is_missing(due)
        outage, room, mean = self._outage(url), self._rooms.get(str(lane.files.root)), lane.mean
        if room is None:
            return None
        if not room.take(mean, lane.steps_to(due)):
            self._put_back(due)
            return None
        if not outage.may_ask(time.monotonic()):
            room.correct(mean, 0)
            self._put_back(due)
            return None
        return outage, room, mean

    def _bring(self, due: Due, outage: Outage, room: Room, mean: float) -> None:
        lane, url = due.lane, due.url
        files = lane.files
        used = 0
        try:
            fetched = files.fetch(url, thorough=self._thorough)
        except RemoteFileMissing as error:
            self.tally.missing += 1
            outage.well()
            _log.info("%s", error)
            with self._changed:
                lane.gone(due)
        except (RemoteError, FtrunError, OSError) as error:
            self.tally.errors += 1
            again = outage.failed(str(error).partition("\n")[0][:300], time.monotonic())
            _log.info("%s", error)
            with self._changed:
                lane.later(due, again)
        else:
            outage.well()
            used = fetched.size if fetched.kind == "filled" else 0
            self._brought(due, fetched)
            if fetched.kind == "bypassed":
                room.wait(_DISK)
        finally:
            room.correct(mean, used)

    def _brought(self, due: Due, fetched: Any) -> None:
        lane = due.lane
        with self._changed:
            first = lane.mean == 0
            lane.note(fetched.size)
            if first:
                self._changed.notify_all()  # others waited to know how large files are
        if fetched.kind != "bypassed":
            self._is_there(due)
        if fetched.kind == "filled":
            self.tally.fetched += 1
            self.tally.bytes += fetched.size
        elif fetched.kind == "hit":
            self.tally.there += 1

    def _is_there(self, due: Due) -> None:
        lane, now = due.lane, time.monotonic()
        with self._changed:
            is_stale = lane.seen.is_stale(now)
        evictions = lane.files.counters(node=True).evictions if is_stale else 0
        with self._changed:
            if is_stale:
                lane.seen.evictions_are(evictions, now)
            lane.seen.is_there(due.sample)

    def _put_back(self, due: Due) -> None:
        with self._changed:
            due.lane.back(due, time.monotonic() + _PAUSE)

    def _outage(self, url: str) -> Outage:
        """By the remote: a scheme and host, or the file system."""
        scheme, there, rest = url.partition("://")
        where = f"{scheme}://{rest.partition('/')[0]}" if there else "files"
        return self._outages.setdefault(where, Outage())

    def _room(self, lane: Lane) -> Room:
        root = str(lane.files.root)

        def uses(urls: Sequence[str]) -> NDArray[np.float64]:
            found = np.full(len(urls), np.inf)
            for each in list(self._lanes):
                if str(each.files.root) == root:
                    found = np.minimum(found, each.next_use(urls))
            return found

        return Room(lane.files, uses, lambda: max((each.pace for each in list(self._lanes)), default=0.0))
