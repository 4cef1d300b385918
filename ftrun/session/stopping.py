"""Being asked to stop or to save: by a signal, by the script, by another rank. Nothing happens before a step boundary.

SIGTERM, SIGINT     save at the next boundary and leave; a second one, some time later, ends the process at once
SIGUSR2             save and leave: the warning that a batch system sends some time before the end
SIGUSR1             save and go on

A handler notes what was asked, and no more: nothing is saved inside it. SIGTERM and SIGINT are taken from the first
step on; before it there is nothing to keep, and they end the process. SIGUSR1 and SIGUSR2 are taken as soon as there is
a Session, since their default would end a process that is only starting, and only where nobody else has: a script that
installs its own handler for one of them keeps it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrun.session.agreement import Agreement

_ENDING = (signal.SIGTERM, signal.SIGINT)
_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)

_SAME_REQUEST = 2.0
"""Seconds in which signals count as one request."""
_PASSED_ON = 30.0
"""The same where a launcher passes them on, which a storage that doesn't answer may hold up. Asked twice, it ends the
ranks itself."""


class StopRequest:
    """What this rank has been asked, and what all ranks have agreed on. Training thread only, but for signals.

    Args:
        rank: this process's.
        launched: by a launcher of ftrun's.

    Attributes:
        agreed: why all ranks stop now, or None.
    """

    def __init__(self, rank: int, *, launched: bool) -> None:
        self._rank = rank
        self._repeated_after = _PASSED_ON if launched else _SAME_REQUEST
        self._asked: str | None = None
        self._save_asked = False
        self._granted_at = -_SAME_REQUEST
        self._passed_on = False
        self._heard_at: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self.agreed: str | None = None

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; rank 0 hears of it at the end of this step."""
        self._asked = reason

    def listen_for_requests(self) -> None:
        """Have SIGUSR1 ask for a checkpoint and SIGUSR2 for a stop, where the script has no handler of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        caught = _caught()
        for number in _REQUESTS:
            if signal.getsignal(number) is signal.SIG_DFL and number not in caught:
                self._take(number)
        os.register_at_fork(after_in_child=_Undo(self))

    def listen(self) -> None:
        """Have SIGTERM and SIGINT ask for a stop; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _ENDING:
            self._take(number)

    def _take(self, number: signal.Signals) -> None:
        self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            self._save_asked = True
            return
        if number in _ENDING:
            self._end_if_repeated(number)
        self._asked = signal.Signals(number).name

    def _end_if_repeated(self, number: int) -> None:
        now = time.monotonic()
        if self._heard_at is not None and now - self._heard_at >= self._repeated_after:
            for each in _ENDING:
                signal.signal(each, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # A batch system that signals every process, and the launcher that passes it on, mean one and the same request.
        self._heard_at = self._heard_at or now

    def unlisten(self) -> None:
        """Put the handlers back that were there before, but for those that the script has replaced since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler or signal.SIG_DFL)
        self._handlers.clear()

    def pass_on(self, agreement: Agreement) -> None:
        """Tell rank 0 what this rank was asked, from any other rank: a stop once, and each wish for a checkpoint."""
        if self._rank == 0:
            return
        if self._asked is not None and not self._passed_on:
            agreement.ask_to_stop(self._asked)
            self._passed_on = True
        if self._save_asked:
            self._save_asked = False
            agreement.ask_to_save()

    def heard(self, agreement: Agreement) -> str | None:
        """Rank 0, at a point: why it or another rank was asked to stop."""
        return self._asked or agreement.asked_to_stop()

    def save_wanted(self, agreement: Agreement) -> bool:
        """Rank 0, at a point: whether it or another rank was asked for a checkpoint.

        A signal to all ranks reaches them one after the other and is one wish all the same: what follows a wish that
        was granted at once is met by it.
        """
        asked = agreement.asked_to_save() or self._save_asked
        self._save_asked = False
        now = time.monotonic()
        if not asked or now - self._granted_at < _SAME_REQUEST:
            return False
        self._granted_at = now
        return True


class _Undo:
    """Gives a forked child its own handlers back: a pool of the script's must still end when it is told to.

    A hook at fork can't be taken away again. This one holds nothing alive, and does nothing once its Session is over.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = weakref.ref(request)

    def __call__(self) -> None:
        request = self._request()
        if request is not None:
            request.unlisten()


def _caught() -> frozenset[int]:
    """Signals with a handler, in C too: Python knows only of its own."""
    try:
        status = Path("/proc/self/status").read_text()
        mask = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16)
    except (OSError, ValueError, IndexError):
        return frozenset()
    return frozenset(bit + 1 for bit in range(64) if mask >> bit & 1)
