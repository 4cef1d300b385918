"""The two ends between a worker and the launcher: a pipe, or a terminal of its own where the launcher has one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import termios
from dataclasses import dataclass

_PIPE_BYTES = 256 * 1024
"""Room for what a worker writes while the launcher is busy: four times the usual, little enough for many ranks."""

_PIECE = 64 * 1024
_AT_ONCE = 1024 * 1024


@dataclass
class Source:
    """What a worker writes into and the launcher reads from.

    Attributes:
        reader: the launcher's end, which never blocks; -1 once it is closed.
        writer: the worker's end; -1 once the launcher has let go of it.
        terminal: it is a terminal.
        ended: nothing holds the worker's end any more, and all has been read.
    """

    reader: int
    writer: int
    terminal: bool = False
    ended: bool = False

    def read(self) -> bytes:
        """What is there now, up to a megabyte; empty if that is nothing."""
        pieces: list[bytes] = []
        size = 0
        with contextlib.suppress(BlockingIOError):
            while size < _AT_ONCE:
                piece = self._piece()
                if not piece:
                    self.ended = True
                    break
                pieces.append(piece)
                size += len(piece)
        return b"".join(pieces)

    def _piece(self) -> bytes:
        try:
            return os.read(self.reader, _PIECE)
        except OSError as error:
            if error.errno == errno.EIO:  # how a terminal says that all have left it
                return b""
            raise

    def release(self) -> None:
        """Let go of the worker's end: the worker has it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Let go of both ends. What still writes gets an error from now on."""
        self.release()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


def pipe() -> Source:
    """A pipe.

    Raises:
        OSError: no more descriptors.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with contextlib.suppress(OSError, AttributeError):  # the user's allowance for pipes is used up; not on Linux
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return Source(reader, writer)


def terminal(like: int) -> Source:
    """A terminal of the same size as another, that passes bytes on as they are.

    The worker's end is for writing alone: what reads the keyboard from there (a pager does, where it has no
    controlling terminal) gets an error, and doesn't wait for keys that nobody passes on.

    Args:
        like: descriptor of the launcher's terminal.

    Raises:
        OSError: no more descriptors, or no more terminals.
    """
    reader, both = os.openpty()
    try:
        os.set_blocking(reader, False)
        settings = termios.tcgetattr(both)
        settings[1] &= ~termios.OPOST  # the real terminal makes of line breaks what it is set to
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(both, termios.TCSANOW, settings)
        writer = os.open(os.ttyname(both), os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, termios.error) as error:
        os.close(reader)
        raise OSError(errno.ENOTTY, f"no terminal: {error}") from error
    finally:
        os.close(both)
    source = Source(reader, writer, terminal=True)
    set_size(source.reader, size(like))
    return source


def size(terminal: int) -> bytes:
    """Rows and columns, as the kernel gives them; empty where there is no terminal any more."""
    try:
        return fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8))
    except OSError:
        return b""


def set_size(terminal: int, value: bytes) -> None:
    """Set rows and columns."""
    if value:
        with contextlib.suppress(OSError):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, value)
