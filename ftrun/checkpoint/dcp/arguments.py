"""What a writer may be given: saves that nobody could read, or that would be taken for a run's own, are never begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.checkpoint import retention
from ftrun.checkpoint.manifest import is_count, is_text
from ftrun.errors import UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from ftrun.checkpoint.layout import Root


def check(root: Root, run_id: object, keep_last: object) -> None:
    """Look at what the user gave.

    Raises:
        UsageError: it can't be used.
    """
    if not is_text(run_id):
        raise UsageError(f"run_id={run_id!r}: give a text that names the run, or leave it out")
    if keep_last is not None and not (is_count(keep_last) and keep_last >= retention.MIN_KEEP):  # type: ignore[operator]
        raise UsageError(
            f"keep_last={keep_last!r}: the bytes of a single checkpoint may turn out damaged; keep "
            f"{retention.MIN_KEEP} or more, or leave it out"
        )
    path = root.open_local("")
    if path is not None and RunDir(path).resolved.is_file():
        raise UsageError(f"{path} is a run directory, whose checkpoints are that run's to write: choose another root")
