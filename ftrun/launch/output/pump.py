"""The thread that carries what all workers of an attempt write: to their log files, and to the console."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.launch.output import source as output_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.launch.output.files import LogFile
    from ftrun.launch.output.lines import View
    from ftrun.launch.output.outlets import Outlet
    from ftrun.launch.output.source import Source

_PAUSE = 0.01
"""Between two rounds while workers write: a worker that writes a thousand lines costs a few rounds, not a thousand."""

_IN_A_HURRY = 32 * 1024
"""More than this in one round, and the next follows at once: the pipes are filling."""

_HOLD = 0.2
"""How long a line that has begun is held back for its end, in seconds."""

_LOOK_AT_SIZE = 0.5
_LAST_WORDS = 1.0


@dataclass
class Stream:
    """One stream of a worker.

    Attributes:
        source: where it comes from.
        log: its log file.
        view: what the console shows of it.
        outlet: the console, or None.
        filtered: the file for filtered lines, or None.
        held: since when a line that has begun is held back; 0.0 when there is none.
    """

    source: Source
    log: LogFile
    view: View
    outlet: Outlet | None = None
    filtered: LogFile | None = None
    held: float = 0.0

    def carry(self) -> int:
        """Carry what is there; how much it was."""
        data = self.source.read()
        if data:
            self.log.write(data)
            self._show(self.view.feed(data) if self.outlet is not None else b"")
        return len(data)

    def flush(self, *, final: bool = False) -> None:
        """Show what is held back."""
        if self.outlet is not None:
            self._show(self.view.flush(final=final))

    def _show(self, data: bytes) -> None:
        if self.outlet is not None:
            self.outlet.put(data)
        if self.filtered is not None:
            self.filtered.write(self.view.matches())
        if not self.view.pending:
            self.held = 0.0
        elif data or not self.held:
            self.held = time.monotonic()

    def close(self) -> None:
        """All has been carried."""
        self.flush(final=True)
        self.source.close()
        self.log.close()


class Pump:
    """Carries streams until :meth:`stop`. All methods are for the main thread.

    Args:
        streams: what is carried.
        say: told of what should never happen.
    """

    def __init__(self, streams: list[Stream], say: Callable[[str], None]) -> None:
        self._streams = streams
        self._say = say
        self._by_fd = {stream.source.reader: stream for stream in streams}
        self._poll = select.poll()
        self._wake, self._waker = os.pipe()
        self._rung = select.poll()
        self._rung.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="ftrun-output", daemon=True)
        self._asked = 0
        self._answered = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._size = b""
        self._told: set[str] = set()

    def start(self) -> None:
        """Begin."""
        for descriptor in (self._wake, *self._by_fd):
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)
        self._thread.start()

    def settle(self, patience: float) -> bool:
        """Carry all that has been written until now; whether that was done in time."""
        with self._changed:
            self._asked += 1
            mine = self._asked
        self._ring()
        with self._changed:
            return self._changed.wait_for(lambda: self._answered >= mine, patience)

    def stop(self, patience: float) -> bool:
        """Carry all that has been written, and end; whether that was done in time.

        A thread that is held up (by a file system that doesn't answer) is left behind with what it has open.
        """
        self._stopping = True
        self._ring()
        self._thread.join(patience)
        if self._thread.is_alive():
            return False
        os.close(self._wake)
        os.close(self._waker)
        return True

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread has enough to wake up for
            os.write(self._waker, b"!")

    def _run(self) -> None:
        # Signals are for the main thread, whose system calls they shall interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._stopping:
            ready = self._poll.poll(self._timeout())
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            with self._changed:
                asked = self._asked
            answering = asked > self._answered
            carried = self._round([fd for fd, _ in ready] if not answering else list(self._by_fd))
            self._flush_held(now=answering)
            self._follow_size()
            if answering:
                with self._changed:
                    self._answered = asked
                    self._changed.notify_all()
            elif 0 < carried < _IN_A_HURRY:
                self._rest()
        self._finish()

    def _timeout(self) -> float | None:
        """Milliseconds until there is something to do without anything being written."""
        waits = [_HOLD] if any(stream.held for stream in self._by_fd.values()) else []
        if any(stream.source.terminal for stream in self._by_fd.values()):
            waits.append(_LOOK_AT_SIZE)
        return min(waits) * 1000 if waits else None

    def _rest(self) -> None:
        """Let the workers write some more, unless somebody waits."""
        self._rung.poll(_PAUSE * 1000)

    def _round(self, ready: list[int]) -> int:
        carried = 0
        for descriptor in ready:
            stream = self._by_fd.get(descriptor)
            if stream is None:
                continue
            carried += self._guarded(stream.carry)
            if stream.source.ended:
                self._poll.unregister(descriptor)
                del self._by_fd[descriptor]
                self._guarded(stream.close)
        return carried

    def _guarded(self, action: Callable[[], int | None]) -> int:
        try:
            return action() or 0
        except Exception as error:  # the thread must survive: without it all workers would stand still, writing
            text = f"output: {type(error).__name__}: {error}"
            if text not in self._told:
                self._told.add(text)
                self._say(text)
            return 1

    def _flush_held(self, *, now: bool) -> None:
        before = time.monotonic() - _HOLD
        for stream in self._by_fd.values():
            if stream.held and (now or stream.held <= before):
                stream.flush()

    def _follow_size(self) -> None:
        """Give the workers' terminals the size of the launcher's. Its signal is left to whoever handles it."""
        terminals = [each for each in self._by_fd.values() if each.source.terminal and each.outlet is not None]
        if not terminals or terminals[0].outlet is None:
            return
        size = output_source.size(terminals[0].outlet.fd)
        if size != self._size:
            self._size = size
            for stream in terminals:
                output_source.set_size(stream.source.reader, size)

    def _finish(self) -> None:
        # What a worker left behind may write on and on: it is heard for a moment.
        until = time.monotonic() + _LAST_WORDS
        for stream in self._by_fd.values():
            while self._guarded(stream.carry) and not stream.source.ended and time.monotonic() < until:
                pass
            self._guarded(stream.close)
        self._by_fd.clear()
