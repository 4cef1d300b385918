"""The kernel's locks on open files: whoever dies lets go of them, also under kill -9 and in another container."""

from __future__ import annotations

import fcntl
import os


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file where nobody has it locked otherwise; says whether it could.

    The lock is that of the open file: closing its last descriptor, in whatever process, gives it back.

    Raises:
        OSError: the filesystem knows no such locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def let_go(descriptor: int) -> None:
    """Unlock and close a file. Closing alone would leave the lock to a child that was forked in this moment."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
