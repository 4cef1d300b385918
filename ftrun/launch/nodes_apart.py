"""Nodes that share no run directory (``run_dir.shared: false``): what they have in common is the checkpoint root.

Each node then keeps its own logs, events, evidence and memory of nodes. What all have to know lies in the root, where
the fencing epochs and the commits are anyway, or goes through the store of the round.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftrun import durable
from ftrun.checkpoint import common, layout
from ftrun.checkpoint.storage.base import why
from ftrun.errors import CheckpointError, RunDirError, UsageError
from ftrun.launch import nodes_choice
from ftrun.launch.slow_root import told_if_slow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ftrun.config.origins import Resolved
    from ftrun.launch.plan import LaunchPlan
    from ftrun.rundir import RunDir

_NEEDED = (
    "checkpoint.root must be a place that all nodes see: a URL such as s3://bucket/run, or a directory on storage that "
    "they share (--set checkpoint.root=...)."
)


def require_possible(launch: Mapping[str, Resolved], run_dir: RunDir, root: layout.Root | None, *, fresh: bool) -> None:
    """See that several nodes can do without a shared run directory.

    Args:
        launch: torchrun's options.
        run_dir: this node's.
        root: the checkpoint root; None where none was given.
        fresh: the run is to begin anew.

    Raises:
        UsageError: they can't; the message says what to change.
    """
    if not nodes_choice.is_ours(launch):
        raise UsageError(
            "run_dir.shared is false, which needs ftrun's own rendezvous: give --rdzv-endpoint, and leave out "
            "--rdzv-backend, --standalone, --node-rank, --master-addr and --master-port."
        )
    if root is None:
        raise UsageError(f"run_dir.shared is false: each node has a run directory of its own. So {_NEEDED}")
    if fresh:  # a node that is started again, and can't reach the others, would put their commits out of sight
        raise UsageError(
            f"--fresh: several nodes use the checkpoint root {root.url}, and one that starts later would begin anew "
            "beside the others. Choose another --name and another checkpoint.root."
        )
    if not root.remote and _is_inside(root.path, run_dir.path):
        raise UsageError(
            f"run_dir.shared is false, and the checkpoint root {root.url} lies in this node's own run directory "
            f"{run_dir.path}. {_NEEDED}"
        )


def _is_inside(path: Path, directory: Path) -> bool:
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([inner, outer]) == outer


def notes(plan: LaunchPlan) -> Path | None:
    """Where the rendezvous keeps its notes: in the root where that is a directory.

    An object store has no place for a file that is written every second; the list of endpoints has to do.
    """
    root = plan.open_root()
    return None if root.remote else root.path / common.PLACE


def mark(plan: LaunchPlan, say: Callable[[str], object]) -> str:
    """What all have to find in the checkpoint root; this node remembers it.

    Args:
        plan: this node's.
        say: takes a text, where the root keeps this start waiting.

    Raises:
        UsageError: the root can't be used, or isn't the one that this node has known.
        CheckpointError: a remote storage is away.
    """
    root = plan.open_root()
    try:
        with told_if_slow(say, root):
            found = common.mark(root)
    except CheckpointError:
        raise
    except OSError as error:
        raise UsageError(
            f"checkpoint root {root.url} can't be used ({why(error)}): make it writable, or choose another with "
            "checkpoint.root"
        ) from error
    _require_known(plan.run_dir, root, found)
    return found


def _require_known(run_dir: RunDir, root: layout.Root, found: str) -> None:
    """A root that was emptied, or isn't mounted, has another mark: a run would begin anew beside its commits."""
    file = run_dir.root_mark
    try:
        known = file.read_text() if file.exists() else ""
        if not known or not run_dir.attempt_numbers():  # who has never taken part may have been refused for its root
            known = found
            durable.make_dirs(file.parent)
            durable.write(file, found.encode())
    except OSError as error:
        raise RunDirError(f"{file} can't be used: {why(error)}. Choose another place with --run-dir.") from error
    if known != found:
        raise UsageError(
            f"{root.url} is not the checkpoint root that this node's part of the run has used so far: its mark is "
            f"{found}, and was {known}. Was it emptied, or is it not mounted? Put it back. If it was moved on purpose, "
            f"delete {file}; to begin anew, move {run_dir.path} away."
        )


def is_known(run_dir: RunDir, root: layout.Root) -> bool:
    """Whether a root is still the one that this node has found when it started.

    Raises:
        CheckpointError: a remote storage is away.
    """
    try:
        known = run_dir.root_mark.read_text()
    except OSError:
        return True  # which it was can't be told
    return common.has_mark(root, known)


def word(plan: LaunchPlan) -> str:
    """What the nodes do without, in one line."""
    alone = "," not in str(plan.launch["rdzv_endpoint"].value) and plan.open_root().remote
    found = "; a node that starts later finds the others by --rdzv-endpoint alone (name several)" if alone else ""
    return (
        "run_dir.shared is false: logs, events, reports, and what `ftrun status` and `ftrun nodes` know, are this "
        "node's own; `ftrun nodes exclude` counts on the node in question and on the one that leads; scripted faults "
        f"come once on each{found}"
    )
