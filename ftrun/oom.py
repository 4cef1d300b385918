"""Whom the kernel ends first where memory runs out: a worker, and not the keeper of what the workers have saved.

Snapshots lie in shared memory that the keeper has mapped, all of a node's, so that it looks like the largest process
of all. Its end frees none of it, and costs what it was about to commit a start; that of a worker costs nothing that was
staged. The launcher's own score is what both come from. To lower one takes a privilege, to raise one's own none.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

NEVER, MOST = -1000, 1000
"""The least and the greatest score that the kernel knows; with the least a process is never chosen."""
SPARED = -900
"""A keeper's: it is chosen once nothing else is left."""
GAP = 500
"""Between a keeper and its workers, at least: more than the half of memory that shared memory takes by default."""

_PROC = Path("/proc")


def shared_out(launcher: int, *, may_lower: bool) -> tuple[int, int]:
    """Scores of a keeper and of a worker.

    Args:
        launcher: the score of their launcher.
        may_lower: this user may lower scores.
    """
    keeper = min(launcher, SPARED) if may_lower else launcher
    return keeper, launcher if launcher == NEVER else min(MOST, max(launcher, keeper + GAP))


def spare_keeper() -> None:
    """Have this process, a keeper, be chosen late; where that isn't allowed its workers see to be chosen before it."""
    own = _score("self")
    if own is not None and own > SPARED:
        _set(SPARED)


def come_before_keeper(launcher: int) -> None:
    """Have this process, a worker, be chosen before its node's keeper. What it starts from now on is, too.

    Args:
        launcher: process id of the launcher, whose keeper that is.
    """
    inherited, own = _score(launcher), _score("self")
    if inherited is None or own is None:
        return
    _, wanted = shared_out(inherited, may_lower=_may_lower(own))
    if wanted > own:
        _set(wanted)


def _may_lower(own: int) -> bool:
    """Whether this user may spare a keeper. Found out by trying: a privilege within a container may not count."""
    if own <= SPARED or not _set(SPARED):
        return False
    _set(own)
    return True


def _score(process: int | str) -> int | None:
    try:
        return int((_PROC / str(process) / "oom_score_adj").read_text())
    except (OSError, ValueError):
        return None


def _set(score: int) -> bool:
    with contextlib.suppress(OSError):
        (_PROC / "self" / "oom_score_adj").write_text(str(score))
        return True
    return False
