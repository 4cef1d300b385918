"""The side of the mount that tests use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

_SERVER = Path(__file__).with_name("server.py")
_SECONDS = 20.0


class HungMount:
    """The mount, for the length of a ``with`` block.

    Args:
        source: the directory that shows there.
        path: the mount point, which is made.
    """

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        self._source = source
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.mkdir()
        command = [sys.executable, _SERVER, self._source, self.path, str(os.getpid())]
        nowhere = subprocess.DEVNULL
        self._server = subprocess.Popen(
            command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True, cwd="/"
        )
        deadline = time.monotonic() + _SECONDS
        while not os.path.ismount(self.path):
            if self._server.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{self._source} was not mounted at {self.path}")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hang(self) -> None:
        """Have it answer nothing. All its threads stand still then: whoever waits for an answer to what one of them has
        taken can't be killed, and waits on in vain."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _SECONDS
        while not self._stands_still():
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"the server of {self.path} doesn't stop")
            time.sleep(0.01)

    def _stands_still(self) -> bool:
        assert self._server is not None
        return all(map(_is_stopped, Path(f"/proc/{self._server.pid}/task").iterdir()))

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Unmount it, whoever still waits for it: those get an error."""
        self.go_on()
        unmount(self.path)
        self._signal(signal.SIGTERM)
        assert self._server is not None
        try:
            self._server.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(_SECONDS)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _signal(self, number: signal.Signals) -> None:
        assert self._server is not None
        self._server.send_signal(number)


def _is_stopped(thread: Path) -> bool:
    """Whether a thread stands still, or is gone."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def unmount(path: Path) -> None:
    subprocess.run(["fusermount3", "-u", "-z", "-q", path], capture_output=True, timeout=_SECONDS, check=False)
