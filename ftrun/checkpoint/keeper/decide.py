"""What a keeper does next: a pure function of what it knows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ftrun.checkpoint.keeper.votes import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftrun.checkpoint.keeper.work import NodeWork

Do = Literal["drop", "copy", "upload", "settle", "tidy", "note", "roll", "sweep"]
Lane = Literal["local", "root", "commit"]

LANES: dict[Do, Lane] = {
    "copy": "local",
    "upload": "root",
    "settle": "commit",
    "tidy": "commit",
    "note": "commit",
    "roll": "commit",
    "sweep": "commit",
}
"""Each lane does one thing at a time, so that a slow root keeps nobody from freeing slots."""

FULL = 10.0
"""Seconds of patience with a full storage: the next snapshot, which is newer, has the same chance."""

STALE = 5.0
"""Seconds of patience with a launcher that hasn't said yet that another start runs."""

OTHERS = 5.0
"""Seconds at the end of a run for other nodes to finish a save of an earlier start: those that had it may be lost."""

GONE = 1.0
"""Seconds without its seals after which a snapshot counts as replaced: a worker may put a seal back."""


class Stage(enum.Enum):
    """How far an attempt has come on this node."""

    SEALED = "sealed"  # in memory
    LOCAL = "local"  # on the local tier
    DONE = "done"  # in the root, and said so
    COMMITTED = "committed"  # and said so; old checkpoints may go
    FAILED = "failed"  # and said so; the other nodes are to hear it


@dataclass(frozen=True)
class Known:
    """What the keeper knows of an attempt.

    Attributes:
        work: this node's part.
        stage: how far it has come.
        since: when its stage began; all times are those of ``time.monotonic()``.
        gone: since when its seals are no longer seen in memory.
        trouble: why its next step has not succeeded yet, or what it waits for.
        full: the trouble is that storage is full.
        others: it is that other nodes have not done their part.
        stale: it is that a later start runs, of which nobody has told this node.
        troubled: when that began.
        tries: how often it failed or waited.
        due: when it is worth another try.
        skip_local: the local tier could not take it.
        told: why it will never be committed, as somebody on this node has said.
    """

    work: NodeWork
    stage: Stage
    since: float
    gone: float | None = None
    trouble: str = ""
    full: bool = False
    others: bool = False
    stale: bool = False
    troubled: float | None = None
    tries: int = 0
    due: float = 0.0
    skip_local: bool = False
    told: str = ""

    @property
    def attempt(self) -> str:
        """Its name."""
        return str(self.work.name)


@dataclass(frozen=True)
class View:
    """What decides.

    Attributes:
        known: all attempts that are not over.
        now: the time.
        run_id: identity of the run that the keeper serves.
        epoch: the epoch that runs now.
        lineage: epoch at which the run's lineage began.
        idle: lanes that have nothing to do.
        busy: attempts that a lane works on.
        local: there is a local tier.
        closing: nobody will seal anything any more.
        closed_for: for how many seconds that has been so.
        timeout: seconds of patience with storage and other nodes.
        unrolled: nobody has looked yet whether an earlier epoch left something to commit.
        unswept: nobody has looked for a while for what dead writers left.
    """

    known: tuple[Known, ...]
    now: float
    run_id: str
    epoch: int
    lineage: int
    idle: frozenset[Lane]
    busy: frozenset[str]
    local: bool
    closing: bool
    timeout: float
    closed_for: float = 0.0
    unrolled: bool = False
    unswept: bool = False


@dataclass(frozen=True)
class Action:
    """Something to do now. ``drop`` needs no lane: it only says that an attempt will not be committed, and why."""

    do: Do
    attempt: str
    reason: str = ""


def decide(view: View) -> list[Action]:
    """What to do now; at most one thing a lane, the oldest attempt first."""
    free = [each for each in sorted(view.known, key=lambda each: each.work.name) if each.attempt not in view.busy]
    drops = [Action("drop", each.attempt, reason) for each in free if (reason := objection(each, view))]
    dropped = {action.attempt for action in drops}
    started: dict[Lane, Action] = {}
    for action in _wanted([each for each in free if each.attempt not in dropped], view):
        lane = LANES[action.do]
        if lane in view.idle:
            started.setdefault(lane, action)
    if view.unrolled and "commit" in view.idle:
        started.setdefault("commit", Action("roll", ""))
    elif view.unswept and not view.closing and "commit" in view.idle:
        started.setdefault("commit", Action("sweep", ""))
    return drops + list(started.values())


def objection(known: Known, view: View) -> str:
    """Why an attempt will never be committed; empty while it may be."""
    if known.stage in (Stage.COMMITTED, Stage.FAILED):
        return ""  # said already
    if known.told:
        return known.told
    if known.work.first.run_id != view.run_id:
        return f"it belongs to the run {known.work.first.run_id!r}"
    if known.work.name.epoch < view.lineage:
        return "the run was started over"
    if known.stage is Stage.SEALED and (reason := _not_whole(known, view)):
        return reason
    patience = min(_patience(known, view), view.timeout)
    if known.troubled is None or view.now - known.troubled <= patience:
        return ""
    return f"{known.trouble} (after {patience:g} s)"


def _patience(known: Known, view: View) -> float:
    """With what keeps it from its next step."""
    if known.full:
        return FULL
    if known.stale:
        return STALE
    if known.others and view.closed_for >= OTHERS and known.work.name.epoch < view.epoch:
        return OTHERS
    return view.timeout


def _not_whole(known: Known, view: View) -> str:
    if known.gone is not None and view.now - known.gone >= GONE:
        return "a newer snapshot took its place in memory"
    missing = known.work.missing
    if not missing:
        return ""
    if known.work.name.epoch < view.epoch or view.closing:
        return f"rank {some(missing)} ended before its part was copied"
    if known.work.superseded:
        return f"rank {some(known.work.superseded)} never completed its part"
    if view.now - known.since > view.timeout:
        return f"after {view.timeout:g} s rank {some(missing)} has not completed its part: look into its log"
    return ""


def _wanted(known: Iterable[Known], view: View) -> Iterator[Action]:
    """The next step of each attempt, the oldest first. In the lanes of bytes nobody overtakes."""
    waiting: set[Lane] = set()
    for each in known:
        do = _next(each, view)
        if do is None:
            continue
        lane = LANES[do]
        if each.due <= view.now and lane not in waiting:
            yield Action(do, each.attempt)
        elif lane != "commit":
            waiting.add(lane)


def _next(known: Known, view: View) -> Do | None:
    if known.stage is Stage.SEALED:
        if known.work.missing or known.gone is not None:
            return None
        return "copy" if view.local and not known.skip_local else "upload"
    steps: dict[Stage, Do] = {
        Stage.LOCAL: "upload",
        Stage.DONE: "settle",
        Stage.COMMITTED: "tidy",
        Stage.FAILED: "note",
    }
    return steps[known.stage]
