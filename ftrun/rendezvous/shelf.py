"""Texts by name, and the thread that lets other processes write and read them."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.wire import HELLO, LENGTH, LONGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

Write = tuple[str, str, str]
"""How, which and what: ``set``; ``append``, to what is there; ``first``, where nothing or an empty text is there;
``delete``."""

_JOIN_SECONDS = 5.0
_READ = 2**16
_IDLE_SECONDS = 60


class Shelf:
    """Texts by name. Any thread."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def exchange(self, writes: Sequence[Write], reads: Sequence[str]) -> list[str | None]:
        """Write some texts, then read some, with nobody in between.

        Returns:
            The texts that were asked for, in that order; None where there is none. :attr:`Keys.CLOCK` is always there.
        """
        texts = self._texts
        with self._lock:
            for how, key, text in writes:
                if how == "set" or (how == "first" and not texts.get(key)):
                    texts[key] = text
                elif how == "append":
                    texts[key] = texts.get(key, "") + text
                elif how == "delete":
                    texts.pop(key, None)
            return [repr(time.time()) if key == Keys.CLOCK else texts.get(key) for key in reads]

    def set(self, key: str, text: str) -> None:
        """Write one."""
        self.exchange((("set", key, text),), ())


class Server:
    """A shelf that this process serves: at the endpoint, or anywhere, for the day on which the endpoint's host is lost.

    Args:
        listener: listens where it is to be; it is taken over.

    Attributes:
        port: where it is.
        shelf: what is served.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.port = int(listener.getsockname()[1])
        self.shelf = Shelf()
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="ftrun-store", daemon=True)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def close(self) -> None:
        """Serve no longer, and hang up on everybody."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join(_JOIN_SECONDS)
        self._wake.close()

    # The server's thread

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._serve(key.data, events)
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone already, or there are too many: the others are served
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A node that vanished never hangs up: it would keep its connection for as long as the run lasts.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, _Visitor(connection, self.shelf))

    def _serve(self, visitor: _Visitor, events: int) -> None:
        try:
            stays = visitor.read() if events & selectors.EVENT_READ else True
            stays = stays and visitor.write()
        except BlockingIOError:
            stays = True
        except Exception:  # it is gone, or says what nobody understands: the others are served
            stays = False
        if not stays:
            self._selector.unregister(visitor.connection)
            visitor.connection.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if visitor.pending else 0)
        if self._selector.get_key(visitor.connection).events != wanted:
            self._selector.modify(visitor.connection, wanted, visitor)


class _Visitor:
    """One connection to a server."""

    def __init__(self, connection: socket.socket, shelf: Shelf) -> None:
        self.connection = connection
        self._shelf = shelf
        self._greeted = False
        self._in = bytearray()
        self.pending = bytearray()

    def read(self) -> bool:
        """Take what has come, and answer what is complete. Returns whether there may be more to come."""
        data = self.connection.recv(_READ)
        if not data:
            return False
        self._in += data
        if not self._greeted:
            if not HELLO.startswith(bytes(self._in[: len(HELLO)])):
                return False
            if len(self._in) < len(HELLO):
                return True
            del self._in[: len(HELLO)]
            self._greeted = True
            self.pending += HELLO
        while len(self._in) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in)
            if length > LONGEST:
                return False
            end = LENGTH.size + length
            if len(self._in) < end:
                break
            writes, reads = json.loads(self._in[LENGTH.size : end])
            del self._in[:end]
            answer = json.dumps(self._shelf.exchange(writes, reads)).encode()
            self.pending += LENGTH.pack(len(answer)) + answer
            if len(self.pending) > LONGEST:
                return False  # it asks and asks, and reads nothing
        return True

    def write(self) -> bool:
        """Send as much of the answers as can be sent. Returns True."""
        if self.pending:
            with contextlib.suppress(BlockingIOError):
                del self.pending[: self.connection.send(self.pending)]
        return True
