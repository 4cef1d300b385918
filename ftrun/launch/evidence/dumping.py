"""Asking living workers for their stacks: send the dump signal, wait for what they write, never for long."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun import dump
from ftrun.launch.evidence import process_state, stacks
from ftrun.launch.evidence.tail import read_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ftrun.launch.evidence.process_state import ProcessState

# A hundred threads with a hundred frames each are about a megabyte.
_LARGEST = 2 << 20
_LINE = 4 << 10
_POLL_SECONDS = 0.002


@dataclass
class Dump:
    """A dump that was asked for.

    Attributes:
        pid: whom.
        path: the file that it is appended to.
        start: where in the file it begins.
        expected: whether it is worth waiting for; one that comes against expectation is read all the same.
        size: of the file, as last seen.
        grew: when that changed, on the monotonic clock.
    """

    pid: int
    path: Path
    start: int
    expected: bool
    size: int = 0
    grew: float = 0.0

    def has_come(self, settle: float) -> bool:
        """Look again. True once it is whole, or hasn't grown for ``settle`` seconds, for its end isn't always clear."""
        size = _size(self.path)
        if size != self.size:
            self.size, self.grew = size, time.monotonic()
            return size > self.start and stacks.is_whole(self._read(max(self.start, size - _LINE)))
        return size > self.start and time.monotonic() - self.grew > settle

    def main_thread(self) -> tuple[str, ...]:
        """What has come of the main thread's frames."""
        return stacks.main_thread(self._read(self.start)) if self.size > self.start else ()

    def _read(self, start: int) -> str:
        return read_at(self.path, start, _LARGEST).decode(errors="replace")


def ask(pid: int, directory: Path, state: ProcessState, over: Callable[[], bool] = lambda: False) -> Dump | None:
    """Send the signal to one worker, unless it can't take it.

    Where there is no handler the signal would end the process, so only those that have one get it. A stopped process
    is left alone. One that is stuck in the kernel is asked, since it may come free, and not waited for.

    Args:
        pid: a child that has not been waited for, so that the number can't have passed to somebody else.
        directory: the worker's own.
        state: a look at it from just now.
        over: it may have been waited for meanwhile: storage can take long to say how large a file is.

    Returns:
        The dump to come, or None where there will be none.
    """
    if dump.SIGNAL not in state.caught or not (state.answers or state.state == "D"):
        return None
    path = directory / dump.FILE
    try:
        size = os.stat(path).st_size
        if over():
            return None
        os.kill(pid, dump.SIGNAL)
    except OSError:
        return None
    return Dump(pid, path, size, state.answers, size)


def wait(dumps: Iterable[Dump], deadline: float, settle: float) -> None:
    """Wait until all expected dumps have come, or until the deadline on the monotonic clock."""
    pending = list(dumps)
    while pending := [each for each in pending if not each.has_come(settle) and _may_come(each)]:
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _may_come(asked: Dump) -> bool:
    return asked.expected and process_state.letter(asked.pid) not in ("", "Z", "X", "T", "t")
