"""What the checkpoint root says of a run, for ``ftrun status``: asked for some seconds only, for it may be away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ftrun.errors import FtrunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftrun.checkpoint.layout import Root
    from ftrun.rundir import RunDir

T = TypeVar("T")

_SECONDS = 5.0  # for one request of a remote storage; a directory that doesn't answer has twice that


@dataclass(frozen=True)
class Found:
    """What a start would resume from now.

    Attributes:
        commit: its step and name; None where there is none, and where that is not known.
        problem: why it is not known; empty where it is.
    """

    commit: dict[str, Any] | None
    problem: str = ""


def usable_commit(run_dir: RunDir) -> Found:
    """The commit that a start would resume from now, looked up in the checkpoint root."""
    from ftrun.checkpoint import reader

    try:
        identity = run_dir.identity()
        run_id = identity["run_id"]
        commit = _ask(run_dir, identity, lambda root: reader.resume_point(root, run_id).commit)
    except (UsageError, KeyError):
        return Found(None)  # there is none that can be used; `ftrun ckpt ls` says why
    except (FtrunError, OSError) as error:
        return Found(None, str(error))
    return Found({"step": commit.name.step, "name": str(commit.name)} if commit is not None else None)


def is_finished(run_dir: RunDir) -> bool:
    """Whether the root says so, for a node with a run directory of its own. It is believed where the root is silent."""
    from ftrun.checkpoint import common

    try:
        identity = run_dir.identity()
        return _ask(run_dir, identity, lambda root: common.is_finished(root, str(identity.get("run_id"))))
    except (FtrunError, OSError):
        return True


def _ask(run_dir: RunDir, identity: Mapping[str, Any], call: Callable[[Root], T]) -> T:
    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.storage.retry import Patience, persist

    patience = Patience(deadline=_SECONDS, hang=_SECONDS)
    where = run_dir.root(identity)
    root = Root.open(where, identity.get("storage_options") or {}, patience)
    # Once: a remote storage is asked several times as it is.
    return persist(lambda life: call(root), Patience(deadline=0.0, hang=2 * _SECONDS), f"looking into {where}")
