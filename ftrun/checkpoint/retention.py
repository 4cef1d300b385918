"""Which checkpoints go when a new one has come. Anything damaged, foreign or not understood is left alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint import reader
from ftrun.checkpoint.layout import MANIFEST, AttemptName, attempt_key, is_done
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.reader import AttemptInfo

MIN_KEEP = 2
"""One checkpoint is none: its bytes may turn out damaged."""


@dataclass(frozen=True)
class KeepPolicy:
    """What is kept, besides pinned checkpoints and the one that the run was resumed from.

    Attributes:
        last: how many of the newest ones; at least 2 are kept whatever it says.
        every: keep, for good, the first one in each span of so many steps; None for none of them.
    """

    last: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise UsageError(f"keep the last {self.last}, and one every {self.every} steps: both count from 1")


def doomed(
    infos: Sequence[AttemptInfo],
    policy: KeepPolicy,
    *,
    run_id: str,
    since: int,
    spared: Collection[str] = frozenset(),
) -> list[AttemptInfo]:
    """Choose what may be deleted, oldest first. Pure.

    Args:
        infos: the root's attempts, newest first.
        policy: what is kept.
        run_id: identity of the run; other runs' commits stay.
        since: epoch at which the lineage began; earlier commits stay.
        spared: names that stay: pins, and what the run was resumed from.
    """
    ours = [
        info
        for info in infos
        if info.status == "committed"
        and info.name.epoch >= since
        and info.manifest is not None
        and info.manifest.run_id == run_id
    ]
    kept = {info.name for info in ours[: max(MIN_KEEP, policy.last)]}
    if policy.every is not None:
        kept |= set(_milestones(ours, policy.every))
    return [info for info in reversed(ours) if info.name not in kept and str(info.name) not in spared]


def apply(root: Root, policy: KeepPolicy, *, run_id: str, since: int, parent: str | None) -> list[AttemptName]:
    """Delete what is superfluous; the names of what was deleted. Only the newest epoch's leader calls this.

    Args:
        root: the checkpoint root.
        policy: what is kept.
        run_id: identity of the run.
        since: epoch at which the lineage began.
        parent: the checkpoint that the run was resumed from; it stays.

    Raises:
        OSError: a deletion failed; what was not deleted is whole or has no manifest.
    """
    chosen = doomed(
        reader.attempts(root),
        policy,
        run_id=run_id,
        since=since,
        spared=spared(root, parent),
    )
    for info in chosen:
        delete(root, info)
    return [info.name for info in chosen]


def spared(root: Root, *names: str | None) -> set[str]:
    """Names that nobody may delete: those given, and the pinned ones.

    Raises:
        CheckpointError: the pins can't be listed.
    """
    return {name for name in names if name} | set(map(str, root.pins()))


def delete(root: Root, info: AttemptInfo) -> None:
    """Delete a committed checkpoint. Files in it that aren't a checkpoint's stay, and so does its directory.

    Raises:
        OSError: a deletion failed.
    """
    # The manifest goes first, and durably: there is never a manifest whose files are half gone.
    root.delete(attempt_key(info.name, MANIFEST))
    try:
        root.sync_attempt(info.name)
    except FileNotFoundError:
        return  # somebody else deletes too, a keeper or another `ftrun ckpt prune`, and has finished with this one
    known = set(info.manifest.files) if info.manifest else set()
    root.delete_files(info.name, [file for file in root.files(info.name) if file in known or is_leftover(file)])
    root.remove_attempt(info.name)


def is_leftover(file: str) -> bool:
    """Whether a file of an attempt is one that no manifest lists, and of no use without one."""
    base = file.rpartition("/")[2]
    return is_done(file) or (base.startswith(".") and base.endswith(".tmp"))


def _milestones(ours: Sequence[AttemptInfo], every: int) -> Iterator[AttemptName]:
    """The first checkpoint of each span of steps. Those that come later never take its place."""
    spans: dict[int, AttemptName] = {}
    for name in _main_line(ours):  # newest first, so the first of a span is the last one seen
        spans[name.step // every] = name
    yield from spans.values()


def _main_line(ours: Sequence[AttemptInfo]) -> Iterator[AttemptName]:
    """Those that led to the newest one, newest first: what lies behind a point that was gone back to is left out."""
    limit = below = math.inf
    epoch = None
    for info in ours:
        name, manifest = info.name, info.manifest
        if name.epoch != epoch:
            limit, epoch = below, name.epoch
        if name.step > limit:
            continue
        yield name
        parent = AttemptName.parse(manifest.parent or "") if manifest else None
        below = min(below, name.step if parent is None else parent.step)
