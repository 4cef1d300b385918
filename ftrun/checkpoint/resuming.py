"""What a start resumes from: the newest whole commit, or a snapshot in memory that is newer. One process decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.loading import sealed
from ftrun.errors import NoValidCheckpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.memory.tier import Tier


@dataclass(frozen=True)
class ResumePoint:
    """What an attempt can resume from.

    Attributes:
        name: of the checkpoint.
        world_size: how many ranks wrote it.
        sealed: it is a snapshot in this node's memory that isn't committed yet.
    """

    name: AttemptName
    world_size: int
    sealed: bool


@dataclass(frozen=True)
class Choice:
    """What to resume from, and what not.

    Attributes:
        point: the newest that can be used, None where nothing was ever saved.
        skipped: name and reason of each newer commit or snapshot that can't be used, newest first.
    """

    point: ResumePoint | None
    skipped: tuple[tuple[str, str], ...] = ()


def choose(root: Root, run_id: str, tier: Tier | None, *, exclude: Collection[str] = frozenset()) -> Choice:
    """Choose what a start of this run resumes from.

    Args:
        root: the checkpoint root.
        run_id: identity of the run.
        tier: the memory tier of the only node; None where there are several, each of which holds a part at most.
        exclude: names that are not wanted.

    Raises:
        NoValidCheckpoint: there are commits, and nothing can be used.
        UsageError: the root belongs to another run, or a newer ftrun wrote the newest commit.
        CheckpointError: the root can't be listed.
    """
    snapshot, spoilt = _snapshot(root, run_id, tier, exclude) if tier is not None else (None, {})
    try:
        found = reader.resume_point(root, run_id, exclude=exclude)
    except NoValidCheckpoint:
        if snapshot is None:
            raise
        return _choice(snapshot, spoilt)
    commit = found.commit
    if snapshot is not None and (commit is None or snapshot.name > commit.name):
        return _choice(snapshot, spoilt, found.skipped)
    point = None if commit is None else ResumePoint(commit.name, commit.manifest.world_size, sealed=False)
    return _choice(point, spoilt, found.skipped)


def _choice(
    point: ResumePoint | None, spoilt: Mapping[AttemptName, str], skipped: Sequence[tuple[str, str]] = ()
) -> Choice:
    newer = {str(name): reason for name, reason in spoilt.items() if point is None or name > point.name}
    # A commit of the same name tells more than what memory still has of it.
    return Choice(point, tuple(sorted((newer | dict(skipped)).items(), key=lambda each: AttemptName.of(each[0])))[::-1])


def _snapshot(
    root: Root, run_id: str, tier: Tier, exclude: Collection[str]
) -> tuple[ResumePoint | None, dict[AttemptName, str]]:
    """The newest snapshot that can be used, and those that can't."""
    record = epochs.require_free_or_ours(root, run_id)
    start = epochs.told(tier.path)
    if record is None or start is None or not epochs.is_noted(root, start.record):
        # Of an earlier run in the same place, which was deleted, or for all we know it is; keepers drop it.
        return None, {}
    bad = set(root.bad())
    unwanted = {*exclude, *map(str, bad)}
    found = sealed.newest_sealed(tier, run_id, record.since, exclude=unwanted)
    spoilt = sealed.spoilt(tier, run_id, record.since)
    spoilt = {name: reason for name, reason in spoilt.items() if str(name) not in unwanted}
    return None if found is None else ResumePoint(AttemptName.of(found.name), found.world_size, sealed=True), spoilt
