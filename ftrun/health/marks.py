"""What can be held against a node. A table, one line for each sign.

A mark says that something happened on a node that a faulty node would explain. Whether it does is a matter of how often
(:class:`~ftrun.health.standing.Rules`) and, where a fault of the program looks the same, of whether it happens on this
node alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Sign(enum.StrEnum):
    """Kinds of mark, the surest first. The values are keys of the job file, under ``health.nodes.after``."""

    DEVICE = "device"
    CHECK = "check"
    HOST = "host"
    LOST = "lost"
    CONTAINED = "contained_error"
    SUSPECT = "suspect_device"
    OUT_OF_MEMORY = "host_out_of_memory"
    SEGFAULT = "segfault"
    STORAGE = "storage"
    KILLED = "killed"
    HANG = "hang"


@dataclass(frozen=True)
class Meaning:
    """What a sign stands for.

    Attributes:
        text: for people, one of them.
        alone: a fault of the program, or of what all nodes share, looks the same: it counts only on one node alone.
    """

    text: str
    alone: bool = False


TABLE = {
    Sign.DEVICE: Meaning("a device that needs a reset, or has to be replaced"),
    Sign.CHECK: Meaning("a wrong result under load"),
    Sign.HOST: Meaning("trouble with its hardware in the kernel log", alone=True),
    Sign.LOST: Meaning("loss of the node", alone=True),
    Sign.CONTAINED: Meaning("contained memory error of a device"),
    Sign.SUSPECT: Meaning("device error that the program may have caused", alone=True),
    Sign.OUT_OF_MEMORY: Meaning("process killed for memory", alone=True),
    Sign.SEGFAULT: Meaning("crash in native code", alone=True),
    Sign.STORAGE: Meaning("failure of a file system", alone=True),
    Sign.KILLED: Meaning("process killed from outside", alone=True),
    Sign.HANG: Meaning("hang", alone=True),
}


@dataclass(frozen=True)
class Mark:
    """One thing that is held against a node.

    Attributes:
        sign: its kind.
        evidence: one line for people.
        attempt: number of the attempt, 0 for none.
        rank: global rank that it happened to, None for the node as a whole.
        fingerprint: the same for the same failure on other nodes; empty where there is none.
    """

    sign: Sign
    evidence: str
    attempt: int = 0
    rank: int | None = None
    fingerprint: str = ""
