"""What ends a filler: its parent's end, at once and however that came, or a request."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from ftrun import background


class Life:
    """Waits, and knows when it is over. Main thread.

    Args:
        parent: the process that this one must not outlive.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._poll = select.poll()
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._reading, select.POLLIN)
        self._asked = False
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: it is looked for now and then
            self._poll.register(os.pidfd_open(parent), select.POLLIN)

    def listen(self) -> None:
        """Take SIGTERM as a request to end; a terminal's signals are not meant for this process."""
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        background.take_sigterm(self._on_term)

    @property
    def over(self) -> bool:
        """Whether it is over."""
        return self._asked or os.getppid() != self._parent

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until it is over."""
        self._poll.poll(seconds * 1000)

    def _on_term(self, _number: int, _frame: object) -> None:
        self._asked = True
