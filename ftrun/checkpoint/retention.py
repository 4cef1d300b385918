"""Which checkpoints go when a new one has come. Anything damaged, foreign or not understood is left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.checkpoint import reader
from ftrun.checkpoint.layout import MANIFEST, attempt_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.checkpoint.reader import AttemptInfo

MIN_KEEP = 2
"""One checkpoint is none: its bytes may turn out damaged."""


def superfluous(
    infos: Sequence[AttemptInfo], *, run_id: str, since: int, parent: str | None, keep_last: int
) -> list[AttemptInfo]:
    """Choose what may be deleted, oldest first.

    Args:
        infos: the root's attempts, newest first.
        run_id: identity of the run; other runs' commits stay.
        since: epoch at which the lineage began; earlier commits stay.
        parent: the commit that the run was resumed from; it stays.
        keep_last: how many of the newest commits stay; at least 2 do.
    """
    ours = [
        info
        for info in infos
        if info.status == "committed"
        and info.name.epoch >= since
        and info.manifest is not None
        and info.manifest.run_id == run_id
    ]
    return [info for info in reversed(ours[max(MIN_KEEP, keep_last) :]) if str(info.name) != parent]


def apply(root: Root, *, run_id: str, since: int, parent: str | None, keep_last: int) -> list[AttemptName]:
    """Delete what is superfluous; the names of what was deleted. Only the newest epoch's leader calls this.

    Raises:
        OSError: a deletion failed; what was not deleted is whole or has no manifest.
    """
    doomed = superfluous(reader.attempts(root), run_id=run_id, since=since, parent=parent, keep_last=keep_last)
    for info in doomed:
        delete(root, info)
    return [info.name for info in doomed]


def delete(root: Root, info: AttemptInfo) -> None:
    """Delete a committed checkpoint. Files in it that aren't a checkpoint's stay, and so does its directory.

    Raises:
        OSError: a deletion failed.
    """
    # The manifest goes first, and durably: there is never a manifest whose files are half gone.
    root.delete(attempt_key(info.name, MANIFEST))
    root.sync_attempt(info.name)
    known = set(info.manifest.files) if info.manifest else set()
    for file in root.files(info.name):
        if file in known or _is_leftover(file):
            root.delete(attempt_key(info.name, file))
    root.remove_attempt(info.name)


def _is_leftover(file: str) -> bool:
    base = file.rpartition("/")[2]
    return file.startswith("done/n") or (base.startswith(".") and base.endswith(".tmp"))
