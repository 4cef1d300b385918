"""What a keeper listens to: its workers' datagrams, its own lanes, signals, and the end of its launcher."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING

from ftrun import background
from ftrun.checkpoint.memory.tier import remove

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.tier import Tier

_LONGEST_PATH = 100  # of a socket's address


class Inbox:
    """Waits until something happens. One thread uses it; any thread may :meth:`wake` it.

    Args:
        tier: the memory tier, with the keeper's socket.
        parent: the launcher.
    """

    def __init__(self, tier: Tier, parent: int) -> None:
        self._tier, self._parent = tier, parent
        self._selector = selectors.DefaultSelector()
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._reading, selectors.EVENT_READ)
        self._socket: socket.socket | None = None
        self._parent_fd: int | None = None
        self.terminated = False
        self.orphaned = False

    def open(self) -> None:
        """Listen for signals and for the launcher's end; the main thread calls it, as early as can be."""
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        background.take_sigterm(self._on_term)
        self._watch_parent()

    def listen(self) -> None:
        """Take datagrams from now on; the keeper that holds the tier calls it."""
        address = os.fspath(self._tier.socket)
        if len(os.fsencode(address)) > _LONGEST_PATH:
            return  # nobody can address it; looking once a second does
        remove(self._tier.socket)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(address)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the wait."""
        with contextlib.suppress(OSError):
            os.write(self._writing, b"\0")

    def wait(self, timeout: float) -> None:
        """Wait until something happens, or for so many seconds."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj == self._reading:
                _empty(self._reading)
            elif key.fileobj is self._socket:
                self._drop_datagrams()
            else:
                self._lose_parent()
        if self._parent_fd is None and not self.orphaned and not _is_alive(self._parent):
            self.orphaned = True

    def _on_term(self, _number: int, _frame: object) -> None:
        self.terminated = True

    def _watch_parent(self) -> None:
        try:
            descriptor = os.pidfd_open(self._parent)
        except ProcessLookupError:
            self.orphaned = True
        except OSError:
            return  # an old kernel: its process is looked for now and then
        else:
            self._parent_fd = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _lose_parent(self) -> None:
        if self._parent_fd is not None:
            self._selector.unregister(self._parent_fd)
            os.close(self._parent_fd)
        self.orphaned = True

    def _drop_datagrams(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(64)


def _empty(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
