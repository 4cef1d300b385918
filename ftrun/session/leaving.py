"""Who leaves a node's memory tier last, where no launcher does: its first rank, which owns the keeper.

The tier goes with that rank, and the others read there what became of their last saves. One that is a moment late
would otherwise wait for an answer that has been removed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime as dt

    from torch.distributed import Store

    from ftrun.session.place import Place


def leave(place: Place, store: Store | None) -> None:
    """Say that this rank needs the node's memory tier no more. Called on all but a node's first rank."""
    if store is not None:
        with contextlib.suppress(RuntimeError):  # it went with rank 0
            store.set(_key(place.rank), "1")


def let_others_leave(place: Place, store: Store | None, patience: dt.timedelta) -> bool:
    """Wait until the other ranks of this node have left, on its first rank; whether they have.

    Only for an end that is in order: after an error they may be gone, or wait for this rank themselves.
    """
    others = range(place.rank + 1, place.rank + place.local_world_size)
    if store is None or not others:
        return True
    try:
        store.wait([_key(rank) for rank in others], patience)
    except RuntimeError:
        return False
    return True


def _key(rank: int) -> str:
    return f"left/{rank}"
