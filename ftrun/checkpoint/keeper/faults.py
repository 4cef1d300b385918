"""Scripted faults at each step of a keeper, for tests: ``FTRUN_KEEPER_FAULT="root.file@2:kill"``.

``POINT[@N]:ACTION[*COUNT]``, several with commas: at the N-th passage of a point (the first, unless said), and at the
following ones until it has happened COUNT times (once, unless said).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "FTRUN_KEEPER_FAULT"

POINTS = (
    "draining",  # a set of slots is marked
    "local.file",  # before each file of the local tier
    "local.filed",  # after it
    "local.record",  # before the local tier's record of the attempt
    "local.recorded",  # after it
    "drained",  # before the slots are given back
    "freed",  # after it
    "root.file",  # before each file
    "root.middle",  # in the middle of its bytes
    "root.filed",  # after it
    "done",  # before the node's done record
    "done.written",  # after it
    "pending",  # after the note that the attempt waits for its commit
    "manifest",  # before the manifest
    "manifest.written",  # after it
    "latest.written",  # after LATEST
    "outcome",  # before the outcome is said
    "outcome.said",  # after it
    "retention",  # before old checkpoints go
    "failed",  # before the node's word that it gave up
)
"""Every step of a save, in order."""

_FAULT = re.compile(r"(?P<point>[a-z.]+)(@(?P<at>\d+))?:(?P<action>kill|raise|hang|stop|enospc)(\*(?P<count>\d+))?")


@dataclass(frozen=True)
class Fault:
    """One scripted fault."""

    point: str
    at: int
    action: str
    count: int


class Faults:
    """The faults of one process. Any thread passes points.

    Args:
        faults: what is to happen.
    """

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self._faults = faults
        self._passed: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Faults:
        """Read them.

        Raises:
            UsageError: one of them names no point or action.
        """
        return cls(tuple(map(_parse, filter(None, environment.get(VARIABLE, "").split(",")))))

    def hit(self, point: str) -> None:
        """Pass a point.

        Raises:
            OSError: that is the fault.
        """
        if not self._faults:
            return
        with self._lock:
            number = self._passed[point] = self._passed.get(point, 0) + 1
            due = [each for each in self._faults if each.point == point and each.at <= number < each.at + each.count]
            # To this very thread, which would run on until another one woke up to stop the process; and under the
            # lock: while it is preempted here, no other one passes for good.
            if any(fault.action == "stop" for fault in due):
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        for fault in due:
            _perform(fault)


def _perform(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "stop":
        return  # done already
    while fault.action == "hang":
        time.sleep(3600)
    number = errno.ENOSPC if fault.action == "enospc" else errno.EIO
    raise OSError(number, f"{os.strerror(number)} (scripted at {fault.point})")


def _parse(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None or match["point"] not in POINTS:
        raise UsageError(
            f"{VARIABLE}: {text!r} is no fault; it takes POINT[@N]:ACTION[*COUNT] with a point of {POINTS}"
        )
    return Fault(match["point"], int(match["at"] or 1), match["action"], int(match["count"] or 1))
