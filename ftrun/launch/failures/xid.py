"""What an Xid in the kernel log says: an explicit table by code, never "any Xid is bad hardware".

Most Xids that a training job sees are the application's own (an illegal access, a channel that was reset for it), and
some are cascades of another. Classes follow NVIDIA's public catalog, read with what launchers and monitors have
learnt since; where those disagree, the reading that blames the device less wins.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = "2025-10"
"""The catalog that the table was made from. Codes that came later are ambiguous."""


class XidClass(enum.Enum):
    """What an Xid is evidence of."""

    APP = "application"
    AMBIGUOUS = "ambiguous"
    HARDWARE = "hardware"
    CASCADE = "cascade"
    INFORMATIONAL = "informational"


@dataclass(frozen=True)
class XidCode:
    """One row: what the code is called, its class, and what to do with the device."""

    meaning: str
    family: XidClass
    advice: str = ""


_RESET = "the GPU needs a reset"
_SUSPECT = "suspect the node if it comes again"
_RESTART = "a restart is enough; suspect the GPU if it comes again on the same one"

TABLE = {
    13: XidCode("graphics engine exception", XidClass.APP, _RESTART),
    31: XidCode("memory page fault", XidClass.APP, _RESTART),
    43: XidCode("channel reset", XidClass.INFORMATIONAL),
    45: XidCode("preemptive removal of a channel", XidClass.CASCADE),
    46: XidCode("GPU stopped processing", XidClass.AMBIGUOUS, _SUSPECT),
    48: XidCode("double-bit ECC error", XidClass.HARDWARE, _RESET),
    61: XidCode("microcontroller breakpoint", XidClass.HARDWARE, _RESET),
    62: XidCode("microcontroller halt", XidClass.HARDWARE, _RESET),
    63: XidCode("row remapping recorded", XidClass.INFORMATIONAL, "takes effect at the next reset of the GPU"),
    64: XidCode("row remapping failed", XidClass.HARDWARE, "the GPU has no spare rows; take it out"),
    74: XidCode("NVLink error", XidClass.HARDWARE, "check both ends of the link"),
    79: XidCode("GPU has fallen off the bus", XidClass.HARDWARE, "the node needs a restart"),
    92: XidCode("high rate of corrected ECC errors", XidClass.INFORMATIONAL),
    94: XidCode("contained ECC error", XidClass.HARDWARE, "a restart is enough; count them"),
    95: XidCode("uncontained ECC error", XidClass.HARDWARE, _RESET),
    109: XidCode("context switch timeout", XidClass.AMBIGUOUS, _SUSPECT),
    110: XidCode("security fault", XidClass.AMBIGUOUS, _SUSPECT),
    119: XidCode("GPU system processor (GSP) timeout", XidClass.HARDWARE, _RESET),
    120: XidCode("GPU system processor (GSP) error", XidClass.HARDWARE, _RESET),
    121: XidCode("chip-to-chip link error, corrected", XidClass.INFORMATIONAL),
    136: XidCode("link training failed", XidClass.AMBIGUOUS, _SUSPECT),
    137: XidCode("NVLink privilege error", XidClass.APP, _RESTART),
    140: XidCode("unrecovered ECC error", XidClass.HARDWARE, _RESET),
    143: XidCode("GPU initialization failed", XidClass.HARDWARE, "take the GPU out"),
    154: XidCode("recovery action changed", XidClass.INFORMATIONAL),
    155: XidCode("NVLink software error", XidClass.AMBIGUOUS, _SUSPECT),
    156: XidCode("resource retirement", XidClass.AMBIGUOUS, _SUSPECT),
    158: XidCode("fatal timeout", XidClass.AMBIGUOUS, _SUSPECT),
    171: XidCode("uncorrectable DRAM error, detail of 48", XidClass.HARDWARE, _RESET),
    172: XidCode("uncorrectable SRAM error, detail of 48", XidClass.HARDWARE, _RESET),
    **{code: XidCode("NVLink 5 error", XidClass.AMBIGUOUS, _SUSPECT) for code in range(144, 151)},
}

_UNLISTED = XidCode("not in the table", XidClass.AMBIGUOUS, _SUSPECT)

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[^)]*)\): (?P<code>\d+)(?P<rest>.*)")
_PID = re.compile(r"\bpid='?(\d+)")
_NOT_FATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_FATAL = re.compile(r"\bfatal\b", re.IGNORECASE)


@dataclass(frozen=True)
class Xid:
    """One Xid that the kernel log shows.

    Attributes:
        code: its number.
        device: PCI address of the GPU.
        pid: of the process that used it, None where the driver names none. The host's number.
        row: what the table says.
        family: its class; the text of some codes says more than their number.
    """

    code: int
    device: str
    pid: int | None
    row: XidCode
    family: XidClass

    def __str__(self) -> str:
        advice = f"; {self.row.advice}" if self.row.advice else ""
        return f"Xid {self.code} on GPU {self.device}: {self.row.meaning} ({self.family.value}{advice})"


def find(lines: Iterable[str]) -> list[Xid]:
    """The Xids that the driver reports in these lines. A line that only speaks of Xids is none."""
    found = []
    for line in lines:
        if match := _LINE.search(line):
            code, row = int(match["code"]), TABLE.get(int(match["code"]), _UNLISTED)
            pid = _PID.search(match["rest"])
            family = _family(code, row, match["rest"])
            found.append(Xid(code, match["device"], int(pid[1]) if pid else None, row, family))
    return found


def _family(code: int, row: XidCode, text: str) -> XidClass:
    """NVLink 5 codes say in words whether an event was fatal."""
    if not 144 <= code <= 150:
        return row.family
    if _NOT_FATAL.search(text):
        return XidClass.INFORMATIONAL
    return XidClass.HARDWARE if _FATAL.search(text) else row.family
