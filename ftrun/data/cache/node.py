"""The cache as one process has it open: everything that must not be shared with a forked child."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ftrun.data.cache import eviction, sweeping
from ftrun.data.cache.books import Books
from ftrun.data.cache.copying import Copying
from ftrun.data.cache.filling import Filling
from ftrun.data.cache.layout import Layout
from ftrun.data.cache.leases import Owner
from ftrun.data.cache.pages import Page
from ftrun.data.cache.refusals import DiskTrouble
from ftrun.data.cache.room import Room
from ftrun.data.cache.threads import Threads
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.data.cache.records import Patience
    from ftrun.data.cache.remote import Remote


@dataclass(frozen=True)
class Plan:
    """What a process is to open.

    Attributes:
        root: directory of the cache.
        limit: bytes that it may take; None for no limit but free space.
        reserve: free space that it leaves, ``10%`` or bytes.
        patience: how long what is waited for.
    """

    root: Path
    limit: int | None
    reserve: int | str
    patience: Patience


@dataclass
class Node:
    """What a process has open.

    Attributes:
        layout: where things lie.
        books: the lock and the sum.
        page: the counters.
        room: what fits.
        copying: from the remote.
        filling: into the cache.
        owner: of the leases.
        warned: trouble with the disk was said.
    """

    layout: Layout
    books: Books
    page: Page
    room: Room
    copying: Copying
    filling: Filling
    owner: Owner = field(default_factory=Owner)
    warned: bool = False

    def trouble(self, error: DiskTrouble) -> None:
        """Say once in a process that the cache can't be used."""
        if not self.warned:
            self.warned = True
            counted = "; counted as bypasses in `ftrun cache ls`" if self.page.is_shared else ""
            warnings.warn(
                f"data cache {self.layout.root}: {error}. Training goes on and reads such files past the cache, at the "
                f"remote's speed{counted}",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def boot(self) -> float:
        """When the machine started; what was written before that is read once more before it is trusted."""
        return self.filling.boot

    def mend(self, trouble: DiskTrouble) -> None:
        """After trouble with the disk: make space, make what is missing. The caller tries once more.

        Raises:
            DiskTrouble: that would be in vain.
        """
        if trouble.full:
            with contextlib.suppress(DiskTrouble), self.books.held() as account:
                self.room.shed(account)
        try:
            self.layout.make()
        except (OSError, UsageError) as error:  # UsageError: it is no place for a cache any more; no reason to fail
            raise DiskTrouble(str(error)) from error

    def before_fork(self) -> None:
        """A child will hold a copy of every descriptor."""
        self.owner.has_forked = True

    def in_child(self) -> None:
        """Let go of what belongs to the parent: its locks must not outlive it in us."""
        self.owner.is_copy = True
        self.page.forget()
        self.books.forget()
        for descriptor in self.filling.held:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.filling.held.clear()


def start(plan: Plan, remote: Remote) -> Node:
    """Open the cache: make its directories, take a page, remove what the dead have left.

    A disk that is full, read-only or broken is no error: everything is then read past the cache.

    Raises:
        UsageError: the root is no place for a cache.
    """
    layout = Layout(plan.root)
    with contextlib.suppress(OSError):
        layout.make()
    books = Books(layout.lock, lambda: eviction.count(layout), plan.patience.lock)
    page = Page(plan.limit)
    with contextlib.suppress(DiskTrouble), books.held() as account:
        page.share(layout.pages)
        sweeping.sweep(layout, account)
    room = Room(layout, plan.reserve, page)
    copying = Copying(remote, Threads(), plan.patience, lambda: page.add("retries"))
    filling = Filling(layout, books, room, copying, page, set(), _boot_time())
    return Node(layout, books, page, room, copying, filling)


class Forked(Protocol):
    """Who is told that it has become a copy."""

    def in_child(self) -> None: ...  # noqa: D102 - above


def watch_forks(node: Node, owner: Forked) -> None:
    """Have a node, and who uses it, told of forks for as long as they are there."""
    known, user = weakref.ref(node), weakref.ref(owner)

    def before() -> None:
        if (node := known()) is not None:
            node.before_fork()

    def in_child() -> None:
        if (node := known()) is not None:
            node.in_child()
            if (owner := user()) is not None:
                owner.in_child()

    os.register_at_fork(before=before, after_in_child=in_child)


def _boot_time() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
