"""How far this node's wall clock is ahead of that of the round's first node: asked of its store, a few times.

One question and its answer say it to half the time that they took; of several the quickest counts. Asked now and then
for as long as a round lasts, because clocks drift, and are set. It puts a story in order, and nothing is decided by it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from ftrun.launch.evidence.model import ClockOffset
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.wire import LineDown, Wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.rendezvous.model import Who

_QUESTIONS = 8
_PAUSE = 0.01
_PATIENCE = 1.0
_EVERY_SECONDS = 60.0
_RETRY_SECONDS = 2.0
_JOIN_SECONDS = 2.5

Exchange = tuple[float, float, float]
"""When it was asked, by the own clock; what the other clock said; how long that took, by one that is never set."""


def estimate(exchanges: Iterable[Exchange]) -> ClockOffset:
    """How far the asking clock is ahead, from at least one question and its answer."""
    asked, told, took = min(exchanges, key=lambda each: each[2])
    return ClockOffset(asked + took / 2 - told, took / 2)


def ask(address: str, port: int) -> ClockOffset | None:
    """Ask once; None where nobody answers.

    Args:
        address: of the store.
        port: its port.
    """
    wire = Wire(address, port, _PATIENCE)
    exchanges = []
    with contextlib.suppress(LineDown, ValueError):
        wire.open()
        for _ in range(_QUESTIONS):
            began, asked = time.monotonic(), time.time()  # a pause between the two counts as unsure, too
            told = wire.get(Keys.CLOCK)
            exchanges.append((asked, float(told), time.monotonic() - began))
            time.sleep(_PAUSE)
    wire.close()
    return estimate(exchanges) if exchanges else None


class Clock:
    """Knows this node's clock. One thread asks; any thread may read."""

    def __init__(self) -> None:
        self._known: ClockOffset | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    @property
    def offset(self) -> ClockOffset | None:
        """What is known in the round that goes on; None for nothing."""
        return self._known

    def begin(self, first: Who, *, here: bool) -> None:
        """A round begins.

        Args:
            first: its first node.
            here: that is this node.
        """
        self._over.set()  # and no wait for who still asks a node that is lost, perhaps
        self._known = ClockOffset(0.0, 0.0) if here else None
        if here or not first.port:  # nobody stands by there (--rdzv-conf failover=0)
            return
        self._over = threading.Event()
        arguments = (self._over, first.address, first.port)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ftrun-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            self._thread = None

    def _run(self, over: threading.Event, address: str, port: int) -> None:
        while not over.is_set():
            found = ask(address, port)
            if found is not None and not over.is_set():
                self._known = found
            over.wait(_EVERY_SECONDS if found is not None else _RETRY_SECONDS)
