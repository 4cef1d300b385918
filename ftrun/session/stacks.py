"""Stacks on demand: what a worker installs so that its agent can see where it is, whatever it is doing.

The dump is written by a signal handler in C. It needs no lock of the interpreter, so it works while the main thread
waits in a collective, holds the GIL in a long call, or has deadlocked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
from typing import TYPE_CHECKING

from ftrun import dump

if TYPE_CHECKING:
    from pathlib import Path

# A script that closes every descriptor and opens its own gets the lowest free numbers. Ours is far from those, so that
# a dump never ends up in a file of the user's.
_LOWEST = 500


def install(directory: Path) -> None:
    """Make this process append its stacks to ``stacks.txt`` when the agent asks, and when it crashes.

    Where the file can't be opened (a full disk) nothing is installed: training matters more. A child made by
    ``fork`` inherits both; the agent asks ranks only, and a crash of the child adds its own stacks to the file, which
    every writer appends to.

    Args:
        directory: the worker's own.
    """
    with contextlib.suppress(OSError):
        descriptor = _open(directory / dump.FILE)
        # By number and not as a file object: it must work to the last moment of the interpreter's end.
        faulthandler.register(dump.SIGNAL, file=descriptor, all_threads=True, chain=False)
        if not faulthandler.is_enabled():  # by -X faulthandler or PYTHONFAULTHANDLER the user wants these on stderr
            faulthandler.enable(file=descriptor, all_threads=True)


def _open(path: Path) -> int:
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
    except OSError:  # the limit on open files lies below
        return os.dup(low)
    finally:
        os.close(low)
