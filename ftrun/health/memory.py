"""What a launcher has of the memory of nodes: it notes what happens, and is told who is left out.

A thread of its own reads and writes the file: a file system that hangs must not hold up the agent. Each change is made
on what the file holds at that moment, so several nodes may note things at once, and where a node stands is the same
for all of them. What can't be written is kept and tried again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.health import checking, policy
from ftrun.health.history import Book
from ftrun.health.nodes_file import Busy, NodesFileError
from ftrun.health.policy import Crowd
from ftrun.health.standing import Rules, Standing, State, standing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.health.history import Entry
    from ftrun.health.marks import Mark
    from ftrun.health.nodes_file import NodesFile

_SEEN_EVERY = 600.0
_CLOSE_SECONDS = 2.0

Change = Callable[[Book], Book]
Tell = Callable[[dict[str, str]], None]
Note = Callable[[str, "Entry"], None]


@dataclass(frozen=True)
class About:
    """What a launcher knows of itself.

    Attributes:
        host: name of this node.
        rules: of the job.
        min_nodes: how many nodes the run needs.
        look_every: seconds after which the file is read for what others have written.
        check_seconds: for how long a node that comes back is put under load.
    """

    host: str
    rules: Rules
    min_nodes: int = 1
    look_every: float = 2.0
    check_seconds: float = checking.SECONDS


class NodeMemory:
    """The memory of nodes of one launcher. Called on one thread; nothing here waits longer than it is told to.

    Args:
        file: where it is kept.
        about: the launcher and its job.
        report: is told in words who is left out, and why one isn't; on a thread of its own.
        note: is given the same as entries, each with the host that it is about; on that thread.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        file: NodesFile,
        about: About,
        report: Callable[[str], None],
        note: Note | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._about = about
        self._report = report
        self._note = note
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._present: frozenset[str] = frozenset()
        self._speaker = about.host
        self._tell: Tell | None = None
        self._told: dict[str, str] | None = None
        self._excluded: dict[str, str] = {}
        self._book = Book()
        self._trouble = ""
        self._thread: threading.Thread | None = None
        self._closed = False

    # Called by the launcher

    def start(self, tell: Tell | None = None) -> None:
        """Begin to look, and say who is left out: at once, and whenever that changes.

        Args:
            tell: is called with hosts and reasons, all of them each time, on the memory's thread.
        """
        self._tell = tell
        self._post(None)

    def close(self) -> None:
        """End the thread, once it has written what there is to write; or after two seconds."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def seen(self, hosts: Iterable[str]) -> None:
        """Those take part, or wait to. The first of them is the one that reports what happens to others."""
        names = tuple(hosts)
        self._present, self._speaker = frozenset(names), next(iter(names), self._about.host)
        self._post(self._note_seen)

    def mark(self, host: str, mark: Mark, within: float = 0.0) -> None:
        """Something happened that counts against a node.

        Args:
            host: its name.
            mark: what.
            within: seconds to wait until it is written down and the policy has decided.
        """
        self._post(lambda book: self._marked(book, host, mark), within)

    def checked(self, trouble: str, within: float) -> None:
        """This node was left out, and has been checked.

        Args:
            trouble: what was wrong; empty for nothing.
            within: seconds to wait until it is written down.
        """
        about = self._about
        self._post(lambda book: policy.after_check(book, about.host, trouble, about.rules, self._clock()), within)

    def excluded(self, within: float = 0.0) -> dict[str, str]:
        """Who is left out, and why.

        Args:
            within: seconds to wait for the file to be read anew; 0 for what is known.
        """
        if within:
            self._post(None, within)
        return dict(self._excluded)

    def own_standing(self, within: float) -> Standing:
        """Where this node stands; one that can't be looked up in time counts as fine."""
        self._post(None, within)
        host = self._book.hosts.get(self._about.host)
        return Standing(State.FINE) if host is None else standing(host, self._about.rules, self._clock())

    # Changes, on the memory's thread

    def _marked(self, book: Book, host: str, mark: Mark) -> Book:
        rules, now = self._about.rules, self._clock()
        return self._reviewed(policy.marked(book, host, mark, rules, now), now)

    def _note_seen(self, book: Book) -> Book:
        now = self._clock()
        known = book.hosts
        news = [each for each in self._present if each not in known or now - known[each].last_seen > _SEEN_EVERY]
        return self._reviewed(book.saw(news, now), now)

    def _reviewed(self, book: Book, now: float) -> Book:
        crowd = Crowd(self._present, self._about.min_nodes)
        return policy.review(policy.forget(book, self._about.rules, now), crowd, self._about.rules, now)

    # The thread

    def _post(self, change: Change | None, within: float = 0.0) -> None:
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftrun-nodes", daemon=True)
            self._thread.start()
        job = _Job(change, threading.Event())
        self._jobs.put(job)
        if within:
            job.done.wait(within)

    def _run(self) -> None:
        waiting = self._carry_out([])  # what is there already is no news
        while True:
            closing = self._take(waiting)
            waiting = self._carry_out(waiting)
            if closing:
                return

    def _take(self, waiting: list[_Job]) -> bool:
        """Wait for jobs, or until it is time to look; whether this is the end."""
        try:
            job = self._jobs.get(timeout=self._about.look_every)
            while job is not None:
                waiting.append(job)
                job = self._jobs.get_nowait()
        except queue.Empty:
            return False
        return True

    def _carry_out(self, jobs: list[_Job]) -> list[_Job]:
        """Do what there is to do, all of it at once; returns what has to be tried again."""
        changes = [job.change for job in jobs if job.change is not None]
        left = []
        try:
            self._learn(self._file.change(lambda book: _all(changes, book)))
            self._trouble = ""
        except NodesFileError as error:
            self._say_trouble(error)
        except (Busy, OSError) as error:
            self._say_trouble(error)
            left = [job for job in jobs if job.change is not None]
        except Exception as error:  # the thread has to live: without it nobody is left out any more, and callers wait
            self._say_trouble(error)
        for job in jobs:
            job.done.set()
        return left

    def _learn(self, book: Book) -> None:
        news = {name: _news(self._book, book, name) for name in book.hosts} if self._told is not None else {}
        self._book = book
        self._excluded = policy.excluded(book, self._about.rules, self._clock())
        for name, entries in news.items():
            for entry in entries:
                if (text := policy.news(name, entry)) and self._about.host in (name, self._speaker):
                    self._report(text)
                    if self._note is not None:
                        self._note(name, entry)
        if self._told != self._excluded:
            self._told = dict(self._excluded)
            if self._tell is not None:
                self._tell(dict(self._excluded))

    def _say_trouble(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._trouble:
            self._trouble = text
            self._report(f"the memory of nodes can't be used: {text}")


@dataclass(frozen=True)
class _Job:
    """Something to do; without a change the file is only read."""

    change: Change | None
    done: threading.Event


def _all(changes: list[Change], book: Book) -> Book:
    for change in changes:
        book = change(book)
    return book


def _news(before: Book, after: Book, name: str) -> tuple[Entry, ...]:
    """Entries that have come since."""
    known = before.hosts[name].entries if name in before.hosts else ()
    entries = after.hosts[name].entries
    return tuple(each for each in entries if each not in known)
