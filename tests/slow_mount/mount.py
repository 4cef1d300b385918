"""The side of a slow mount that tests and benchmarks use."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slow_mount.page import Page, Wanted

if TYPE_CHECKING:
    from slow_mount.page import Counts

_SERVER = Path(__file__).with_name("server.py")
_START = 60.0
_END = 60.0


@functools.cache
def why_not(python: Path = Path(sys.executable)) -> str:
    """Why there can be no mount here; empty where there can.

    Args:
        python: the interpreter that would serve it, which needs ``mfusepy``.
    """
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no FUSE here: /dev/fuse is missing or not for this user"
    if not shutil.which("fusermount3"):
        return "no FUSE here: install Debian's fuse3"
    # What would be started says what is missing, the library or the module, in its last line.
    tried = subprocess.run([python, _SERVER, "--check"], capture_output=True, text=True, timeout=60)
    return "" if tried.returncode == 0 else f"no FUSE here: {(tried.stderr.strip().splitlines() or ['no word'])[-1]}"


class SlowMount:
    """A directory behind a FUSE mount, for the length of a ``with`` block.

    Reads are never served from the page cache, so each is counted. Nothing can be written through it.

    Attributes:
        path: where it is mounted.
        pid: the process that serves it, for tests that stop or kill it.
    """

    def __init__(self, source: Path, path: Path, *, python: Path = Path(sys.executable), **wanted: Any) -> None:
        """Say what to mount; entering the ``with`` block mounts it.

        Args:
            source: the directory that shows there.
            path: the mount point; made if it isn't there, and removed at the end.
            python: the interpreter that serves it, which needs ``mfusepy``.
            **wanted: how it behaves at first, see :class:`~slow_mount.page.Wanted`.
        """
        self.path = path.absolute()
        self._source, self._python, self._first = source.absolute(), python, wanted
        self._state = Path()
        self._page: Page | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def __enter__(self) -> Self:
        self._state = Path(tempfile.mkdtemp(prefix="slow-mount-"))
        self._page = Page(self._state / "page")
        self._page.wanted = Wanted(**self._first)
        self.path.mkdir(parents=True, exist_ok=True)
        command = [self._python, _SERVER, self._source, self.path, self._state / "page", str(os.getpid())]
        with (self._state / "output.txt").open("wb") as output:
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
            )
        try:
            self._wait_until_mounted()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, **changes: Any) -> Wanted:
        """Let it behave otherwise from now on, also for requests that hang.

        Args:
            **changes: of :class:`~slow_mount.page.Wanted`: ``error=errno.EIO``, ``hang=True``, ``open_seconds=0.1`` ...

        Returns:
            How it behaves now.
        """
        assert self._page is not None
        self._page.wanted = replace(self._page.wanted, **changes)
        return self._page.wanted

    def counts(self) -> Counts:
        """What has gone through it since it was mounted."""
        assert self._page is not None
        return self._page.counts

    def opened(self) -> list[str]:
        """The files that were opened, each as often as it was, relative to the mount."""
        opened = self._state / "page.opened"
        return opened.read_text().splitlines() if opened.exists() else []

    def close(self) -> None:
        """Unmount it, whoever still waits for it: those get an error."""
        if self._server is not None:
            _unmount(self.path)
            self._end()
            _unmount(self.path)  # what a server that was killed has left behind
            self._server = None
        if self._page is not None:
            self._page.close()
            self._page = None
            shutil.rmtree(self._state, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _wait_until_mounted(self) -> None:
        assert self._server is not None
        deadline = time.monotonic() + _START
        while not os.path.ismount(self.path):
            if self._server.poll() is not None or time.monotonic() > deadline:
                told = (self._state / "output.txt").read_text(errors="replace").strip()
                raise RuntimeError(f"{self._source} was not mounted at {self.path}: {told or 'no word'}")
            time.sleep(0.01)

    def _end(self) -> None:
        assert self._server is not None
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._server.send_signal(number)
            if number != signal.SIGCONT:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._server.wait(_END if number == signal.SIGKILL else 1.0)
                    return


def _unmount(path: Path) -> None:
    # Lazily: the mount is gone from the tree at once, also while somebody waits in it.
    subprocess.run(["fusermount3", "-u", "-z", "-q", path], capture_output=True, timeout=_END, check=False)
