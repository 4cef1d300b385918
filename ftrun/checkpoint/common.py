"""What nodes leave in a checkpoint root that is all they have in common: a mark, and word that the run has finished.

::

    nodes/mark.json                  the same for all who see the same root
    nodes/finished/00000007.json     the workers of this epoch have done all there was to do

Only runs of several nodes without a shared run directory have these; readers of checkpoints don't need them.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.sealed import UnsealedError, seal, unseal
from ftrun.checkpoint.storage.base import UnreachableError
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from ftrun.checkpoint.layout import Root

PLACE = "nodes"
MARK = f"{PLACE}/mark.json"

_TRIES, _PAUSE = 20, 0.1
"""Where a filesystem has no links, a file is seen while it is written."""
_SETTLES = 1.0
"""Nodes start together, and where a store can't create exclusively each believes that it was the first: the last one's
mark stays."""


def mark(root: Root) -> str:
    """A text that whoever came first has left in the root: the same for all that see the same one.

    Raises:
        OSError: it can't be read or written.
        CheckpointError: it is damaged; or a remote storage is away.
    """
    reason = ""
    for _ in range(_TRIES):
        try:
            return str(unseal(root.read(MARK))["mark"])
        except (FileNotFoundError, NotADirectoryError):
            try:
                root.create(MARK, seal({"mark": secrets.token_hex(4)}))
            except FileExistsError:  # and a mount with a cache may not show it yet
                time.sleep(_PAUSE)
            if root.remote:
                time.sleep(_SETTLES)
        except (UnsealedError, KeyError) as error:
            reason = str(error)
            time.sleep(_PAUSE)
    raise CheckpointError(f"{root.url}/{MARK} {reason or 'does not stay'}: delete it, and start again on all nodes")


def has_mark(root: Root, mark: str) -> bool:
    """Whether a root still has a mark: one that was emptied, or isn't mounted any more, has none.

    Raises:
        CheckpointError: a remote storage is away.
    """
    return _sealed(root, MARK).get("mark") == mark


def note_finished(root: Root, run_id: str, epoch: int) -> None:
    """The workers that were started with an epoch have done all there was to do. On the first node, once.

    Raises:
        OSError: the root can't be written.
    """
    root.write(_finished_key(epoch), seal({"run_id": run_id, "epoch": epoch}))


def is_finished(root: Root, run_id: str) -> bool:
    """Whether nothing was started since a run's workers had done all there was to do.

    Raises:
        CheckpointError: the root can't be listed; or a remote storage is away.
    """
    started = root.epochs()
    # Where the note can't be read, a run that begins once more finds that there is nothing left to do.
    return bool(started) and _sealed(root, _finished_key(started[-1])).get("run_id") == run_id


def _sealed(root: Root, key: str) -> dict[str, Any]:
    """A sealed document; an empty one where it is missing or damaged."""
    try:
        return unseal(root.read(key))
    except UnreachableError:
        raise
    except (OSError, UnsealedError):
        return {}


def _finished_key(epoch: int) -> str:
    return f"{PLACE}/finished/{epoch:08d}.json"
