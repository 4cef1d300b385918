"""What a failure says of the node that it happened on. Pure.

An exception of the script says nothing of it, and neither does a collective that timed out: who waited is known, and
not whose link is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.health.marks import Mark, Sign
from ftrun.launch.failures import host_signs
from ftrun.launch.failures.kinds import Kind
from ftrun.launch.failures.xid import XidClass

if TYPE_CHECKING:
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.failures.xid import Xid

_SIGNS = {
    Kind.HOST_OUT_OF_MEMORY: Sign.OUT_OF_MEMORY,
    Kind.SEGFAULT: Sign.SEGFAULT,
    Kind.STORAGE: Sign.STORAGE,
    Kind.KILLED: Sign.KILLED,
    Kind.HANG: Sign.HANG,
}
_CONTAINED = frozenset({94})
"""Xids of the hardware that a restart mends."""
_SURE = ("the processor or the memory", "the memory", "a GPU")
"""What the kernel reports trouble with that doesn't come from elsewhere, as a link's may."""


def read(what: Failure, evidence: Evidence, attempt: int) -> Mark | None:
    """The mark that a failure leaves on its node; None where it leaves none.

    Args:
        what: the failure, with its cause on this node.
        evidence: what it was read from.
        attempt: number of the attempt.
    """
    sign = _hardware(what, evidence) if what.kind is Kind.HARDWARE else _SIGNS.get(what.kind)
    if sign is None:
        return None
    # Of the hardware, the evidence says more than what it did to the rank.
    line = what.why[0] if what.kind is Kind.HARDWARE and what.why else what.message.partition("\n")[0]
    return Mark(sign, line, attempt, what.rank, what.fingerprint)


def _hardware(what: Failure, evidence: Evidence) -> Sign:
    """What the verdict quotes first is the sign that it was made by."""
    quoted = what.why[0] if what.why else ""
    signs = host_signs.read(evidence.kernel)
    for each in signs.xids:
        if str(each) == quoted:
            return _of_xid(each)
    sure = any(part in _SURE and quoted.endswith(line) for part, line in signs.hardware)
    return Sign.DEVICE if sure else Sign.HOST


def _of_xid(each: Xid) -> Sign:
    if each.family is not XidClass.HARDWARE:
        return Sign.SUSPECT
    return Sign.CONTAINED if each.code in _CONTAINED else Sign.DEVICE
