"""One copy on its way to another node, and how it is broken off."""

from __future__ import annotations

import contextlib
import socket
import threading

from ftrun.errors import CheckpointError


class PeerError(CheckpointError):
    """A copy did not arrive; the text says why."""


class Call:
    """A copy that is sent, which another thread may break off: a node that is lost answers no more, and takes long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.broken_off = False

    def over(self, connection: socket.socket) -> None:
        """It goes over this connection.

        Raises:
            PeerError: it is broken off already.
        """
        with self._lock:
            self._connection = connection
            if self.broken_off:
                raise PeerError("it is not needed there any more")

    def break_off(self) -> None:
        """End it now, with an error where it is sent. Any thread."""
        with self._lock:
            self.broken_off = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # it is over
                    self._connection.shutdown(socket.SHUT_RDWR)
