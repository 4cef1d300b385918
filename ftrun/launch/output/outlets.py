"""The launcher's own streams, written to by a thread each, so that a console that stands still holds up nobody.

Whoever reads them may stop for a while (a pager, Ctrl-S): what it hasn't taken waits in memory, then in a temporary
file. It may go away (``| head``, a closed terminal): then nothing more is written to it. Under torchrun the workers
themselves write there, and stand still or die; here training goes on, and the log files have everything.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING

from ftrun.launch.output.backlog import Backlog
from ftrun.launch.output.routes import ERR, OUT, Launcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENXIO)


class Outlet:
    """One stream of the launcher's own. :meth:`put` never waits and never raises; a thread does the writing.

    Args:
        fd: the descriptor; it stays open.
        directory: where what waits may be kept.
        lost: told, once, why nothing can be written there any more.
    """

    def __init__(self, fd: int, directory: Path, lost: Callable[[str], None]) -> None:
        self.fd = fd
        self._lost = lost
        self.terminal = os.isatty(fd)
        self.broken = ""
        self._backlog = Backlog(directory)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._writable = select.poll()
        self._writable.register(fd, select.POLLOUT)
        self._closing = False
        self._come = 0
        self._writing = 0
        self.at_line_start = True

    def put(self, data: bytes) -> None:
        """Show bytes when those before have been shown."""
        if not data:
            return
        with self._changed:
            if self.broken or self._closing:
                return
            self._backlog.put(data)
            self._come += len(data)
            self.at_line_start = data.endswith(b"\n")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ftrun-console", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, patience: float) -> bool:
        """Wait until what was put before is shown, so many seconds at most; whether it is."""
        with self._changed:
            before = self._come
            self._changed.wait_for(lambda: self.broken or self._shown >= before, patience)
            return not self.broken and self._shown >= before

    @property
    def _shown(self) -> int:
        return self._come - len(self._backlog) - self._writing

    def close(self, patience: float) -> bool:
        """Wait until everything is shown, or the reader takes nothing for so many seconds, and let the thread go."""
        seen, shown = -1, False
        while not shown and not self.broken and seen < self._shown:
            seen = self._shown
            shown = self.flush(patience)
        with self._changed:
            self._closing = True
            self._backlog.close()
            self._changed.notify_all()
        if self._thread is not None and shown:
            self._thread.join(1.0)
        return shown

    def as_text(self) -> io.TextIOBase:
        """A text file that writes here, for what the launcher says itself: in order with what workers say."""
        return _Text(self)

    def _work(self) -> None:
        # Signals are for the main thread, whose system calls they shall interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                while not self._backlog and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                data = self._backlog.take()
                self._writing = len(data)
            reason = self._write(data)
            with self._changed:
                self._writing = 0
                if reason:
                    self.broken = reason
                    self._backlog.close()
                self._changed.notify_all()
            if reason:
                self._lost(reason)
                return

    def _write(self, data: bytes) -> str:
        """Write, however long it takes; why it will never work again, or nothing."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.fd, rest) :]
            except BlockingIOError:  # somebody who shares the stream made it so
                self._writable.poll(1000)
            except OSError as error:
                if error.errno in _GONE:
                    return error.strerror or "gone"
                return ""  # a full disk, most likely: these bytes are lost, the next ones may not be
        return ""


class _Text(io.TextIOBase):
    """See :meth:`Outlet.as_text`."""

    encoding = "utf-8"

    def __init__(self, outlet: Outlet) -> None:
        super().__init__()
        self._outlet = outlet

    def write(self, text: str) -> int:
        if text and not self._outlet.at_line_start:
            self._outlet.put(b"\n")  # a progress bar, or a prompt, stays as it is
        self._outlet.put(text.encode(errors="replace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._outlet.terminal

    def fileno(self) -> int:
        return self._outlet.fd


class Outlets:
    """The launcher's standard output and standard error, for as long as a run lives.

    Args:
        out: descriptor of standard output; None if it is closed.
        err: likewise.
        directory: where what a slow reader hasn't taken may be kept.
    """

    def __init__(self, out: int | None, err: int | None, directory: Path) -> None:
        self._one = out is not None and err is not None and _same_file(out, err)
        self.out = Outlet(out, directory, self._out_lost) if out is not None else None
        self.err = self.out
        if not self._one:
            self.err = Outlet(err, directory, lambda _reason: None) if err is not None else None

    @classmethod
    def of_this_process(cls, directory: Path) -> Outlets:
        """Those that the launcher was started with. Nothing is opened, and no thread runs before something is put."""
        return cls(_descriptor(sys.__stdout__), _descriptor(sys.__stderr__), directory)

    @property
    def launcher(self) -> Launcher:
        """What they are, for :func:`ftrun.launch.output.routes.settle`."""
        null = self.out is not None and os.fstat(self.out.fd).st_rdev == os.stat(os.devnull).st_rdev
        return Launcher(
            out_terminal=self.out is not None and self.out.terminal,
            err_terminal=self.err is not None and self.err.terminal,
            one=self._one and not null,
        )

    def get(self, stream: str | None) -> Outlet | None:
        """By name."""
        return {OUT: self.out, ERR: self.err}.get(stream or "")

    def say(self, text: str) -> None:
        """One line on standard error, in order with the rest, without waiting."""
        if self.err is not None:
            self.err.put(f"ftrun  ! {text}\n".encode(errors="replace"))

    def _out_lost(self, reason: str) -> None:
        self.say(f"nobody reads standard output ({reason}). Training goes on; the log files have all of it.")

    def flush(self, patience: float) -> bool:
        """Wait until all is shown; see :meth:`Outlet.flush`."""
        return all([outlet.flush(patience) for outlet in self._all()])  # noqa: C419 - wait for all of them

    def close(self, patience: float = 30.0) -> None:
        """Show the rest, at the end of the run; give up when a reader takes nothing for so many seconds."""
        for outlet in self._all():
            outlet.close(patience)

    def _all(self) -> list[Outlet]:
        return [outlet for outlet in (self.out, None if self._one else self.err) if outlet is not None]


def _same_file(one: int, other: int) -> bool:
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _descriptor(file: object) -> int | None:
    """The descriptor of a standard stream; None where the process was started without it."""
    number: Callable[[], int] | None = getattr(file, "fileno", None)
    try:
        return number() if number is not None else None
    except (OSError, ValueError):
        return None
