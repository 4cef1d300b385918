"""From how processes ended to what went wrong: a pure function from evidence to a :class:`Failure`."""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.contract import RESERVED_CODES, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.error_file import ErrorRecord


class Kind(enum.Enum):
    """What kind of failure brought the worker group down."""

    CODE_ERROR = "code error"
    EXIT = "exit"
    KILLED = "killed"
    CRASHED = "crashed"
    USAGE = "usage"
    CORRUPT_CHECKPOINT = "corrupt checkpoint"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RankExit:
    """How one rank ended, as seen before anybody was killed by the agent.

    Attributes:
        rank: global rank.
        pid: process id.
        exit_code: as Python gives it: negative for a signal.
        error: its error file, if it left one.
    """

    rank: int
    pid: int
    exit_code: int
    error: ErrorRecord | None = None


@dataclass(frozen=True)
class Failure:
    """What went wrong.

    Attributes:
        kind: the kind.
        rank: the first rank at fault.
        exit_code: of that rank, negative for a signal.
        message: one line for people.
        victims: ranks that fell with it.
        attempt: name of the checkpoint that is corrupt, for that kind.
    """

    kind: Kind
    rank: int
    exit_code: int
    message: str
    victims: tuple[int, ...] = ()
    attempt: str = ""


# How the peers of a dead rank report its death: consequences, never causes.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|remote process (exited|has failed)"
    r"|ncclremoteerror|nccl.*(aborted|system error)|connectfullmesh|heard nothing from rank",
    re.IGNORECASE,
)

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}


def explain(exits: Sequence[RankExit]) -> Failure:
    """Name the first rank at fault among those that ended with an error, and why.

    Args:
        exits: ranks that ended with a code other than 0, at least one.
    """
    first = min(exits, key=_precedence)
    victims = tuple(sorted(each.rank for each in exits if each is not first))
    kind = _kind(first)
    attempt = first.error.attempt if first.error else ""
    return Failure(kind, first.rank, first.exit_code, _message(first), victims, attempt)


def _precedence(each: RankExit) -> tuple[int, float, int]:
    """Causes before consequences, then by time, then by rank."""
    if each.error is not None and _PEER_IS_GONE.search(each.error.message):
        order = 4
    elif each.exit_code == -signal.SIGABRT:
        order = 3
    elif each.exit_code == ExitCode.TRY_AGAIN:
        order = 2
    elif each.exit_code < 0 and each.exit_code != -signal.SIGTERM:
        order = 0
    else:
        order = 1
    known = each.error is not None and each.error.time > 0
    return order, each.error.time if each.error and known else float("inf"), each.rank


def _kind(each: RankExit) -> Kind:
    if each.exit_code == ExitCode.TRY_AGAIN:
        return Kind.STOPPED
    if each.error is not None and each.error.kind == "usage":
        return Kind.USAGE
    if each.error is not None and each.error.kind == "corrupt_checkpoint":
        return Kind.CORRUPT_CHECKPOINT
    if each.exit_code < 0:
        return Kind.CRASHED if -each.exit_code in _CRASHES else Kind.KILLED
    return Kind.CODE_ERROR if each.error is not None else Kind.EXIT


def _message(each: RankExit) -> str:
    if each.exit_code < 0:
        return f"rank {each.rank} was ended by {signal_name(-each.exit_code)}"
    if each.error is not None and each.error.message not in ("", f"SystemExit: {each.exit_code}"):
        # The names of ftrun's own errors mean nothing to the reader; their texts do.
        text = each.error.message if each.error.kind == "exception" else each.error.message.partition(": ")[2]
        return f"rank {each.rank}: {text.removeprefix('SystemExit: ')}"
    return f"rank {each.rank} exited with code {each.exit_code}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(failure: Failure) -> int:
    """The exit code that reports a failure: the worker's own, ``128 + n`` for a signal, never one of ftrun's."""
    if failure.kind is Kind.USAGE:
        return ExitCode.USAGE
    if failure.exit_code < 0:
        return 128 - failure.exit_code
    return ExitCode.FAILED if failure.exit_code in RESERVED_CODES else failure.exit_code
