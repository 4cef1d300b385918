"""For how long a node whose workers fell waits for the word of another node that is the reason. Pure."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ftrun.contract import ExitCode
from ftrun.launch.watching.culprit import waits_for_others

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_UNCLEAR = 2.0
"""A lost node is noticed within a second or two; its peers' connections may end before that."""
_ONLY_VICTIMS = 10.0
"""The cause is elsewhere: the node that has it takes evidence first, within a few seconds."""
_LEAVES = 30.0
"""For what a node that leaves does beside saving and committing; one that dies meanwhile is noticed within a second."""


def seconds(codes: Collection[int], *, explained: bool, victims: bool, leaving: bool, grace: float) -> float:
    """How long to wait.

    Args:
        codes: with which ranks of this node ended in error.
        explained: each of them has left an error file.
        victims: ... and all of these say only that a peer was gone.
        leaving: another node has said that its workers leave in order.
        grace: seconds that workers get for that, and each of the node's keepers afterwards for the commit.
    """
    if leaving:
        return to_leave(grace)
    if victims:
        return _ONLY_VICTIMS
    if set(codes) == {ExitCode.TRY_AGAIN}:
        return _UNCLEAR
    # What kills a process from outside has nothing to do with its peers; an abort may be NCCL's or gloo's.
    killed = any(code < 0 and code != -signal.SIGABRT for code in codes)
    return 0.0 if explained or killed else _UNCLEAR


def to_leave(grace: float) -> float:
    """How long a node may take to leave in order, with the grace period of its workers."""
    return 3 * grace + _LEAVES


def of_a_hang(stacks: Sequence[Sequence[str]]) -> float:
    """The same where this node's ranks stand still: while all of them wait for others, the cause is elsewhere.

    Args:
        stacks: of the ranks that live, innermost frame first.
    """
    return _ONLY_VICTIMS if stacks and all(map(waits_for_others, stacks)) else 0.0
