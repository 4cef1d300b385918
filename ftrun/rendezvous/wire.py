"""Calls to the leader's store that end in time.

Torch's own store isn't used for what nodes and leader tell each other: its server looks up the *name* of whoever
connects, in the thread that serves everybody, so a name server that is slow or away stops the store for seconds with
every new connection; its clients do the same, wait for an answer as long as TCP does (a quarter of an hour where a
host has vanished), and abort a process that ends while they wait. Here a call is one message each way, on a socket of
its own, and is given up when the answer is late.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.rendezvous.shelf import Write

HELLO = b"ftrun rendezvous 1\n"
"""The first thing that each side says; whoever says something else is hung up on."""
LENGTH = struct.Struct("!I")
LONGEST = 2**26
_SLICE = 0.1
"""A wait is counted in slices: one that a stopped process slept through counts for little."""


class LineDown(ConnectionError):
    """The store can't be reached, or didn't answer in time. The line is closed; another one may succeed."""


class Deserted(LineDown):
    """The machine answers that nobody is there."""


class Silent(LineDown):
    """The store didn't answer in time: its host has vanished, stands still, or is cut off from here."""


class Wire:
    """One client of one store. Used by one thread.

    Args:
        address: numeric address of the store.
        port: its port.
        patience: seconds within which a call is answered by a host that is well; may be changed.
    """

    def __init__(self, address: str, port: int, patience: float) -> None:
        self._where = f"{address}:{port}"
        self._place = (address, port)
        self.patience = patience
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Connect.

        Raises:
            LineDown: nobody who speaks this language answers there in time.
        """
        try:
            self._socket = socket.create_connection(self._place, self.patience)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(_SLICE)
            self._send(HELLO)
            if self._receive(len(HELLO)) != HELLO:
                raise LineDown(f"{self._where}: something else than a rendezvous of ftrun listens there")
        except TimeoutError as error:
            self.close()
            raise Silent(f"{self._where}: no answer within {self.patience:g} s") from error
        except ConnectionRefusedError as error:
            self.close()
            raise Deserted(f"{self._where}: {error.strerror}") from error
        except LineDown:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise LineDown(f"{self._where}: {error.strerror or error}") from error

    def exchange(self, writes: Sequence[Write], reads: Sequence[str]) -> list[str | None]:
        """Write some texts, then read some, in one go; see :meth:`ftrun.rendezvous.shelf.Shelf.exchange`.

        Raises:
            LineDown: no answer. The line is closed then.
        """
        request = json.dumps([writes, reads]).encode()
        try:
            self._send(LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(self._receive(LENGTH.size))
            if length > LONGEST:
                raise LineDown(f"{self._where}: an answer of {length} bytes")
            answer: list[str | None] = json.loads(self._receive(length))
        except LineDown:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise LineDown(f"{self._where}: {error.strerror or 'the connection is lost'}") from error
        return answer

    def get(self, key: str) -> str:
        """One text; empty where there is none."""
        return self.exchange((), (key,))[0] or ""

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None

    def _send(self, data: bytes) -> None:
        connection, waited = self._connected(), 0.0
        while data:
            began = time.monotonic()
            try:
                data = data[connection.send(data) :]
            except TimeoutError:
                waited = self._later(waited, began)

    def _receive(self, size: int) -> bytes:
        connection, waited, data = self._connected(), 0.0, b""
        while len(data) < size:
            began = time.monotonic()
            try:
                more = connection.recv(size - len(data))
            except TimeoutError:
                waited = self._later(waited, began)
                continue
            if not more:
                raise LineDown(f"{self._where}: the connection is lost")
            data += more
        return data

    def _later(self, waited: float, began: float) -> float:
        waited += min(time.monotonic() - began, 2 * _SLICE)
        if waited >= self.patience:
            raise Silent(f"{self._where}: no answer within {self.patience:g} s")
        return waited

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise LineDown(f"{self._where}: not connected")
        return self._socket
