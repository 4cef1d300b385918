"""Calls to a store that end in time.

Torch's client of a store waits for an answer as long as TCP does: a host that has vanished holds the caller for a
quarter of an hour, one that is stopped holds it for ever, and the timeout that the store was made with counts for
neither. Here each client has a thread on which its calls run, one after the other; the caller waits at a condition. A
call that is overdue has its socket shut, which frees the thread whatever it waits for.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import DistNetworkError, TCPStore

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.wire import Deserted, LineDown, Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_SLICE = 0.1
"""A wait is counted in slices: one that a stopped process slept through counts for little."""

_JOIN_SECONDS = 0.25
"""A thread that is longer in a call than this, after its socket was shut, is left to :func:`settle`."""
_SETTLE_SLICE = 0.05
_RETRY_FOR = dt.timedelta(seconds=0.5)
"""Torch tries again where a connection is refused or takes its time, for about a second more than it is told. That one
waits longer for an answer is up to the caller: torch has no limit for that."""

_CONNECTING: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)


def connecting(address: str, port: int) -> threading.Lock:
    """To be held by whoever connects to a store: what is new among the process's sockets to that one is its own then.

    One lock for each store: a host that stands still holds nobody up who connects to another one.
    """
    return _CONNECTING[address, port]


_STRAGGLERS: list[Line | Straggler] = []
"""Closed lines and others whose threads are still in a call."""


@dataclass(eq=False)
class Straggler:
    """A thread in a call to a store that nobody waits for any more."""

    thread: threading.Thread

    def ends(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        self.thread.join(seconds)
        return not self.thread.is_alive()


def leave_behind(thread: threading.Thread) -> None:
    """Leave a thread that is in a call to a store to :func:`settle`."""
    _STRAGGLERS.append(Straggler(thread))


def settle(seconds: float) -> bool:
    """Wait for the threads of lines that are closed. Returns whether they have all ended.

    Where a connection is refused, torch sleeps and tries again, in a call that nothing ends before its time; and a
    connection that is shut it may make anew. Nobody has to wait for that but a process that is about to end: a thread
    that is inside such a call then aborts it.

    Args:
        seconds: how long at most; 0 to look only.
    """
    deadline = time.monotonic() + seconds
    while True:
        for each in list(_STRAGGLERS):
            if each.ends(_SETTLE_SLICE if seconds else 0.0):
                with contextlib.suppress(ValueError):  # another thread was faster
                    _STRAGGLERS.remove(each)
        if not _STRAGGLERS or time.monotonic() >= deadline:
            return not _STRAGGLERS


@dataclass
class _Call:
    act: Callable[[], object]
    done: threading.Event = field(default_factory=threading.Event)
    result: object = None
    error: BaseException | None = None


class Line:
    """One client of one store, with its thread. Used by one thread at a time.

    Args:
        address: numeric address of the store.
        port: its port.
        name: of the thread.
        patience: seconds within which a call is answered by a host that is well; may be changed.
    """

    def __init__(self, address: str, port: int, name: str, patience: float) -> None:
        self._address = address
        self._port = port
        self.patience = patience
        self._store: TCPStore | None = None
        self._others: set[int] | None = None  # sockets to the same store that were there before, by inode
        self._mine: set[int] = set()
        self._shutting = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._open = False

    def open(self, until: Callable[[], object] | None = None, *, look: bool = True) -> None:
        """Connect.

        Args:
            until: asked now and then; it is waited for no longer once this says something true.
            look: see first whether somebody listens; otherwise that is known.

        Raises:
            LineDown: nobody who speaks the store's language answers there in time.
        """
        settle(0.0)
        self._open = True
        self._thread.start()
        try:
            # Torch tries again and again where a connection is refused, and says so; a look beforehand knows at once.
            # (It costs the server the time to look up a name.)
            if look:
                self._do(lambda: endpoint.probe(self._address, self._port, self.patience), 2 * self.patience, until)
            self._do(self._connect, self.patience, until)
        except BaseException:
            self.close()
            raise

    def call(self, act: Callable[[TCPStore], T], seconds: float = 0.0, until: Callable[[], object] | None = None) -> T:
        """Have the store do something.

        Args:
            act: what, as a function of the store. It runs on the line's thread.
            seconds: how long it may wait in the store, beyond the patience that every call has.
            until: asked now and then; it is waited for no longer once this says something true.

        Raises:
            LineDown: no answer. The line is closed then.
            Exception: what ``act`` raises while the connection is well: a wait that was in vain, above all.
        """
        store = self._store
        if store is None or not self._open:
            raise LineDown(f"{self._address}:{self._port}: not connected")
        return self._do(lambda: act(store), self.patience + seconds, until)

    def close(self) -> None:
        """Hang up and end the thread, here or in :func:`settle`. Safe to call twice, and from any thread."""
        if not self._open and not self._thread.is_alive():
            return
        self._open = False
        self._calls.put(None)
        if not self.ends(_JOIN_SECONDS) and self not in _STRAGGLERS:
            _STRAGGLERS.append(self)

    def ends(self, seconds: float) -> bool:
        """Shut the connection of a line that is closed. Returns whether its thread ends within so many seconds."""
        self._shut()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # On the caller's thread

    def _do(self, act: Callable[[], T], seconds: float, until: Callable[[], object] | None = None) -> T:
        call = _Call(act)
        self._calls.put(call)
        if not self._wait(call.done, seconds, until):
            self.close()
            raise Silent(f"{self._address}:{self._port}: no answer within {seconds:g} s")
        if call.error is not None:
            if _is_connection(call.error):
                self.close()
                reason = getattr(call.error, "strerror", None) or "the connection is lost"
                kind = Deserted if isinstance(call.error, ConnectionRefusedError) else LineDown
                raise kind(f"{self._address}:{self._port}: {reason}") from call.error
            raise call.error
        return call.result  # type: ignore[return-value]

    @staticmethod
    def _wait(done: threading.Event, seconds: float, until: Callable[[], object] | None) -> bool:
        waited = 0.0
        while waited < seconds and not (until and until()):
            began = time.monotonic()
            if done.wait(min(_SLICE, seconds - waited)):
                return True
            waited += min(time.monotonic() - began, 2 * _SLICE)
        return False

    def _shut(self) -> None:
        with self._shutting:
            others = self._others
            if others is None:
                return  # it hasn't begun to connect, or has in vain
            for inode, connection in self._sockets():
                if inode in self._mine or (not self._mine and inode not in others):
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def _sockets(self) -> Iterator[tuple[int, socket.socket]]:
        """Connections of this process to the store, by inode; closed when the next one is asked for.

        Each is a copy of its own: the number that it was found at may be another's a moment later.
        """
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError), _copy(name) as connection:
                address, port = connection.getpeername()[:2]
                if port == self._port and address.removeprefix("::ffff:") == self._address:
                    yield os.fstat(connection.fileno()).st_ino, connection

    # On the line's thread

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.act()
            except BaseException as error:
                call.error = error
            call.done.set()
            del call
        self._store = None

    def _connect(self) -> None:
        with connecting(self._address, self._port):
            if not self._open:
                return  # it was waited for in vain
            others = self._others = {inode for inode, _ in self._sockets()}
            mine: set[int] | None = None
            try:
                store = TCPStore(self._address, self._port, is_master=False, wait_for_workers=False, timeout=_RETRY_FOR)
                store.set_timeout(dt.timedelta(seconds=self.patience))
                self._store = store
                mine = {inode for inode, _ in self._sockets()} - others
            finally:
                with self._shutting:  # before anybody else connects: from here on what is new there is another's
                    self._mine, self._others = mine or set(), others if mine is not None else None


def _copy(name: str) -> socket.socket:
    """A socket of this process, by the name of its descriptor.

    Raises:
        OSError: it is none, or gone.
    """
    if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:["):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copy = os.dup(int(name))
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_connection(error: BaseException) -> bool:
    """Whether an error means that the connection is of no more use; a wait in vain doesn't."""
    return isinstance(error, DistNetworkError | OSError) or type(error) is RuntimeError
