"""``python -m ftrun.data.filler DIRECTORY PARENT``: the filler of one run on one node. It imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.data.filler.life import Life
from ftrun.data.filler.loop import Loop
from ftrun.data.filler.places import FillDir

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

DONE, LOCKED_OUT = 0, 3
_PATIENCE = 15.0


def main(arguments: Sequence[str]) -> int:
    """Be the filler of a directory until the parent is gone; an exit code."""
    directory, life = FillDir(Path(arguments[0])), Life(int(arguments[1]))
    life.listen()
    _give_way()
    try:
        descriptor = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return DONE  # the directory is gone, and with it the run
    if not _locked(descriptor, life):
        _log.warning("another filler holds %s", directory.lock)
        return LOCKED_OUT
    directory.pool.sweep(directory.path)
    loop = Loop(directory, life)
    loop.run()
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


def _give_way() -> None:
    """Training comes first for the processor; who starts this process has seen to the disks."""
    with contextlib.suppress(OSError):
        os.nice(5)
    # A session of its own is a scheduling group of its own where the kernel groups by sessions.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("5")


def _run() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    code = main(sys.argv[1:])
    logging.shutdown()
    # Threads that hang in a driver or in the kernel must not keep the process.
    os._exit(code)


if __name__ == "__main__":
    _run()
