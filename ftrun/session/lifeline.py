"""Dying with one's parent: a worker must not outlive the agent that started it, however the agent died."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(agent: int = 0) -> None:
    """Ask the kernel to kill this process when its parent dies. Linux; elsewhere nothing happens.

    Args:
        agent: process id of the agent, if it is known: it may have died while this interpreter was starting.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or (agent not in (0, parent) and _is_gone(agent)):
        # It went before the kernel knew. (An agent that is alive and not the parent started us through a wrapper.)
        os.kill(os.getpid(), signal.SIGKILL)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return state in ("Z", "X")  # dead, and not yet fetched by its own parent
