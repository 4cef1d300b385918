"""Fencing epochs: each start of the worker group takes the next number, exclusively, and outranks all before.

A record also says where its lineage began. ``--fresh`` begins a new one: older commits are then out of sight,
and out of danger.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import epoch_key
from ftrun.checkpoint.manifest import is_count, is_text
from ftrun.checkpoint.memory.files import put
from ftrun.checkpoint.memory.files import read as read_small
from ftrun.checkpoint.sealed import UnsealedError, seal, unseal
from ftrun.checkpoint.storage.base import UnreachableError, why
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.layout import Root

_TRIES = 1000
_TOLD = "epoch.json"


@dataclass(frozen=True)
class EpochRecord:
    """One start of the worker group.

    Attributes:
        epoch: its number, from 1.
        run_id: identity of the run.
        since: epoch at which this lineage began; commits of earlier epochs are never candidates.
        parent: name of the checkpoint that it resumed from, None for a fresh start.
        host: machine of the launcher.
        pid: process id of the launcher.
        written_at: UTC time, for people.
    """

    epoch: int
    run_id: str
    since: int
    parent: str | None
    host: str
    pid: int
    written_at: str


def claim(root: Root, run_id: str, *, fresh: bool, parent: str | None) -> EpochRecord:
    """Take the next epoch. The leading launcher calls this once for each start of the worker group.

    Args:
        root: the checkpoint root; created where it is missing.
        run_id: identity of the run.
        fresh: begin a new lineage, whatever the root holds.
        parent: name of the checkpoint that the group resumes from.

    Raises:
        UsageError: the root holds another run, or can't be written.
        CheckpointError: a remote storage is away, or no number could be had in a thousand tries.
    """
    try:
        for _ in range(_TRIES):
            record = _next(root, run_id, fresh=fresh, parent=parent)
            try:
                root.create(epoch_key(record.epoch), seal(dict(record.__dict__)))
            except FileExistsError:
                continue
            return record
    except (UsageError, UnreachableError):
        raise
    except OSError as error:
        # Of a listing that failed, the reason alone.
        inner = error.__cause__ if isinstance(error, CheckpointError) else None
        reason = why(inner or error)
        raise UsageError(
            f"checkpoint root {root.url} can't be written ({reason}): make it writable, "
            "or choose another with checkpoint.root"
        ) from error
    raise CheckpointError(f"no free epoch in {root.url} after {_TRIES} tries: are many launchers starting there?")


def current(root: Root) -> EpochRecord | None:
    """The newest record that can be read; None where there is none.

    Raises:
        CheckpointError: the root can't be listed.
    """
    for epoch in reversed(root.epochs()):
        record = read(root, epoch)
        if record is not None:
            return record
    return None


def newest(root: Root) -> int:
    """The highest number that was ever claimed, 0 where there is none.

    Unreadable records count, and so do attempts whose epoch has no record any more: a number is never used twice.
    """
    return max([*root.epochs(), *(name.epoch for name in root.attempts())], default=0)


def read(root: Root, epoch: int) -> EpochRecord | None:
    """One epoch's record; None where it is missing or damaged.

    Raises:
        CheckpointError: a remote storage is away: what it holds is not known.
    """
    try:
        document = unseal(root.read(epoch_key(epoch)))
        record = EpochRecord(**document)
    except UnreachableError:
        raise
    except (OSError, UnsealedError, TypeError):
        return None
    return record if _is_sound(record) and record.epoch == epoch else None


def _is_sound(record: EpochRecord) -> bool:
    numbers = is_count(record.epoch) and is_count(record.since) and 1 <= record.since <= record.epoch
    return numbers and is_text(record.run_id) and (record.parent is None or is_text(record.parent))


def is_noted(root: Root, start: EpochRecord, *, launcher: bool = True) -> bool:
    """Whether a root has the note of a start of workers. One that was emptied or replaced has none, or another's.

    Args:
        root: the checkpoint root.
        start: as the workers' node was told of it.
        launcher: it names the process that claimed the epoch, and not another node's.

    Raises:
        CheckpointError: a remote storage is away.
    """
    noted = read(root, start.epoch)
    if noted is None:
        return False
    same = (noted.run_id, noted.since, noted.parent) == (start.run_id, start.since, start.parent)
    return same and (not launcher or (noted.host, noted.pid) == (start.host, start.pid))


@dataclass(frozen=True)
class Told:
    """What a memory tier was told of the start that runs now.

    Attributes:
        record: the start.
        node: number of the node in it; None where nobody said.
    """

    record: EpochRecord
    node: int | None


def tell(tier: Path, record: EpochRecord, node: int | None = None) -> None:
    """Tell the keeper of a memory tier which start runs now, and which number its node has in it.

    Raises:
        OSError: the tier can't be written.
    """
    put(tier / _TOLD, seal({**record.__dict__, "node": node}))


def told(tier: Path) -> Told | None:
    """The start of which a memory tier was told; None where it can't be read."""
    try:
        document = unseal(read_small(tier / _TOLD))
        node = document.pop("node", None)
        return Told(EpochRecord(**document), node if is_count(node) else None)
    except (OSError, UnsealedError, TypeError):
        return None


def require_free_or_ours(root: Root, run_id: str) -> EpochRecord | None:
    """The newest record, if there is one, when the root is this run's to use.

    Raises:
        UsageError: it holds another run.
    """
    record = current(root)
    if record is not None and record.run_id != run_id:
        raise UsageError(
            f"checkpoint root {root.url} holds the run {record.run_id!r}; this is {run_id!r}: set another "
            f"checkpoint.root, name this run {record.run_id!r}, or start over there with --fresh"
        )
    return record


def _next(root: Root, run_id: str, *, fresh: bool, parent: str | None) -> EpochRecord:
    before = current(root) if fresh else require_free_or_ours(root, run_id)
    epoch = newest(root) + 1
    # Where every record is damaged, the lineage reaches back to the start: better an old commit than none.
    inherited = 1 if before is None else before.since
    return EpochRecord(
        epoch=epoch,
        run_id=run_id,
        since=epoch if fresh else inherited,
        parent=parent,
        host=socket.gethostname(),
        pid=os.getpid(),
        written_at=now(),
    )


def now() -> str:
    """The time in UTC, for people: nothing is ever decided by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
