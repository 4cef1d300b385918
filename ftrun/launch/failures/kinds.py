"""What kinds of failure there are, whose fault each is, and which of them may go away by themselves."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What kind of failure brought the worker group down. The values are for people."""

    CODE_ERROR = "code error"
    IMPORT_ERROR = "import error"
    HOST_OUT_OF_MEMORY = "host out of memory"
    GPU_OUT_OF_MEMORY = "GPU out of memory"
    SEGFAULT = "segfault"
    KILLED = "killed"
    COLLECTIVE_TIMEOUT = "collective timeout"
    HANG = "hang"
    LEFT_EARLY = "left early"
    HARDWARE = "hardware"
    STORAGE = "storage"
    DATA = "data"
    PREEMPTED = "preempted"
    EXIT = "exit"
    UNKNOWN = "unknown"
    USAGE = "usage"
    CORRUPT_CHECKPOINT = "corrupt checkpoint"
    LOST_SNAPSHOT = "lost snapshot"
    STOPPED = "stopped"

    @property
    def key(self) -> str:
        """Its name in the job file, under ``restart.budgets``."""
        return self.value.lower().replace(" ", "_")


@dataclass(frozen=True)
class Nature:
    """What a kind means for what follows.

    Attributes:
        blame: ``code``, ``data``, ``infrastructure``, ``hardware``, ``preemption`` or ``unknown``.
        retryable: the same start may end in another way.
        from_outside: it explains a failure before the first step without any fault of the job.
    """

    blame: str
    retryable: bool = True
    from_outside: bool = False


NATURES = {
    Kind.CODE_ERROR: Nature("code"),
    Kind.IMPORT_ERROR: Nature("code"),
    Kind.HOST_OUT_OF_MEMORY: Nature("code"),
    Kind.GPU_OUT_OF_MEMORY: Nature("code"),
    Kind.SEGFAULT: Nature("code"),
    Kind.KILLED: Nature("infrastructure", from_outside=True),
    Kind.COLLECTIVE_TIMEOUT: Nature("unknown"),
    Kind.HANG: Nature("unknown"),
    Kind.LEFT_EARLY: Nature("code"),
    Kind.HARDWARE: Nature("hardware", from_outside=True),
    Kind.STORAGE: Nature("infrastructure", from_outside=True),
    Kind.DATA: Nature("data"),
    Kind.PREEMPTED: Nature("preemption", from_outside=True),
    Kind.EXIT: Nature("code"),
    Kind.UNKNOWN: Nature("unknown", from_outside=True),
    Kind.USAGE: Nature("code", retryable=False),
    Kind.CORRUPT_CHECKPOINT: Nature("data"),
    Kind.LOST_SNAPSHOT: Nature("infrastructure", from_outside=True),
    Kind.STOPPED: Nature("unknown", retryable=False),
}
