"""What came out of a keeper's slow steps, as values."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.commit import Verdict
from ftrun.checkpoint.keeper.copying import SourceError
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.checkpoint.keeper.decide import Stage
    from ftrun.checkpoint.keeper.work import NodeWork

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Moved:
    """The attempt has come to another stage."""

    stage: Stage
    work: NodeWork


@dataclass(frozen=True)
class Waits:
    """Not yet; it is worth another try later.

    Attributes:
        reason: what it waits for.
        full: the storage is full, which waiting seldom heals.
        others: it waits for other nodes.
        stale: a later start runs, of which nobody has told this node.
    """

    reason: str
    full: bool = False
    others: bool = False
    stale: bool = False


@dataclass(frozen=True)
class Skipped:
    """The local tier can't take it."""

    reason: str


@dataclass(frozen=True)
class Over:
    """Nothing is left to do for the attempt."""


@dataclass(frozen=True)
class Swept:
    """What dead writers left was looked at."""


class Stale(Exception):
    """This node doesn't take part any more."""


Result = Moved | Waits | Skipped | Verdict | Over | Swept


def outcome_of(error: Exception) -> Result:
    """What an error in a lane means."""
    if isinstance(error, UsageError | SourceError):
        return Verdict(False, str(error))
    full = isinstance(error, OSError) and error.errno in _FULL
    said = str(error) if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: {error}"
    return Waits(said, full)
