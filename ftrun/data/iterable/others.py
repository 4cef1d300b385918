"""Loaders of other packages that a script tracks, torchdata's ``StatefulDataLoader`` for one: where they can't go on.

Their position is each rank's own, and fits the same number of ranks and workers only. Given to others, it is taken
without a word (ranks that are new get another rank's), or refused without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftrun.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

_INSTEAD = "Or use ft.loader(dataset, ...), whose position fits any number of ranks and workers"


def is_loader(value: Any) -> bool:
    """Whether a tracked object, no module and no optimizer, is what a rank gets its own batches from."""
    ours = any(each.__module__ == "ftrun.data.loader" for each in type(value).__mro__)
    return hasattr(value, "__iter__") and not ours


def check_loader(name: str, loader: Any, state: Any, ranks: tuple[int, int], start_over: str) -> None:
    """Refuse a stored state of a tracked loader that it could not go on from exactly.

    Args:
        name: under which it is tracked.
        loader: the tracked object.
        state: what its ``state_dict`` returned then.
        ranks: number of ranks then, and now.
        start_over: what to do to start without the checkpoint.

    Raises:
        StateMismatch: says what differs, and what works.
    """
    then, now = ranks
    kind = type(loader).__name__
    if then != now:
        raise StateMismatch(
            f"the tracked {name!r} is a {kind}, and its position is each rank's own: it was taken on {then} ranks, and "
            f"{now} can't divide it exactly. Resume with {then} ranks, or {start_over}. {_INSTEAD}."
        )
    workers = (_stored_workers(state), getattr(loader, "num_workers", None))
    if None not in workers and workers[0] != workers[1]:
        raise StateMismatch(
            f"the tracked {name!r} is a {kind}, whose position holds for its number of workers: that was {workers[0]}, "
            f"and is {workers[1]} now. Make it with num_workers={workers[0]}, or {start_over}. {_INSTEAD}."
        )


def _stored_workers(state: Any) -> int | None:
    """The number of workers in a state of ``StatefulDataLoader``; None for anything else."""
    try:
        if "_snapshot" in state:
            return int(_at(state, "_snapshot", "_main_snapshot", "_num_workers"))
        return 0 if "_sampler_iter_yielded" in state else None
    except (KeyError, TypeError, ValueError):
        return None


def _at(state: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        state = state[name]
    return state
