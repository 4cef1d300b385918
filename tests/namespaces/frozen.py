"""A whole node that stands still, and goes on later."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from namespaces.net import Node
    from namespaces.processes import Process


def processes(node: Node) -> list[int]:
    """All that runs on a node, without its first process."""
    space = os.readlink(f"/proc/{node.holder}/ns/pid")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / "pid") == space and int(entry.name) != node.holder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def freeze(node: Node) -> list[int]:
    """Have everything there stand still. Returns what does."""
    frozen: list[int] = []
    while new := [pid for pid in processes(node) if pid not in frozen]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGSTOP)
        frozen += new
    return frozen


def thaw(launcher: Process, frozen: list[int]) -> None:
    """Have all that :func:`freeze` has stopped go on, the node's launcher among it."""
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):  # one that ended as it was stopped
            os.kill(pid, signal.SIGCONT)
    launcher.resume()  # what stands between it and this process has stopped, too
