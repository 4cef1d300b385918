"""Being asked to stop: by a signal, by the script, by another rank. Nothing happens before a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrun.session.agreement import Agreement

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST = 2.0
"""Seconds in which signals count as one request."""


class StopRequest:
    """What this rank has been asked, and what all ranks have agreed on. Training thread only, but for signals.

    Attributes:
        agreed: why all ranks stop now, or None.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._asked: str | None = None
        self._passed_on = False
        self._heard_at: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self.agreed: str | None = None

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; rank 0 hears of it at the end of this step."""
        self._asked = reason

    def listen(self) -> None:
        """Have SIGTERM and SIGINT ask; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._heard_at is not None and now - self._heard_at >= _SAME_REQUEST:
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # A batch system that signals every process, and the launcher that passes it on, mean one and the same request.
        self._heard_at = self._heard_at or now
        self._asked = signal.Signals(number).name

    def unlisten(self) -> None:
        """Put the handlers back that were there before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._handlers.clear()

    def pass_on(self, agreement: Agreement) -> None:
        """Tell rank 0, once, from any other rank."""
        if self._asked is not None and not self._passed_on and self._rank != 0:
            agreement.ask_to_stop(self._asked)
            self._passed_on = True

    def heard(self, agreement: Agreement) -> str | None:
        """Rank 0, at a point: what it or another rank was asked."""
        return self._asked or agreement.asked_to_stop()
