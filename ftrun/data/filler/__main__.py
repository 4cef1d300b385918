"""``python -m ftrun.data.filler DIRECTORY PARENT [spare]``: the filler of one run on one node. It imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import background
from ftrun.data.filler.filler import THREADS
from ftrun.data.filler.life import Life
from ftrun.data.filler.loop import Loop
from ftrun.data.filler.places import FillDir

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

DONE, LOCKED_OUT = 0, 3
_PATIENCE = 15.0
_NICE, _NICE_OF_A_SPARE = 5, 15
_THREADS_OF_A_SPARE = 2


def main(arguments: Sequence[str]) -> int:
    """Be the filler of a directory until the parent is gone; an exit code."""
    directory, life = FillDir(Path(arguments[0])), Life(int(arguments[1]))
    life.listen()
    spare = "spare" in arguments[2:]
    background.give_way(_NICE_OF_A_SPARE if spare else _NICE)
    try:
        descriptor = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return DONE  # the directory is gone, and with it the run
    if not _locked(descriptor, life):
        _log.warning("another filler holds %s", directory.lock)
        return LOCKED_OUT
    directory.pool.sweep(directory.path)
    loop = Loop(directory, life, threads=_THREADS_OF_A_SPARE if spare else THREADS)
    try:
        loop.run()
    finally:
        loop.close()
    _log.info("over: %s", loop.last_words() or "nothing was to do")
    return DONE


def _locked(descriptor: int, life: Life) -> bool:
    """Hold the kernel's lock, which goes with the process; an earlier launcher's filler is on its way out."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not life.over:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        life.wait(0.05)
    return False


if __name__ == "__main__":
    background.main(main)
