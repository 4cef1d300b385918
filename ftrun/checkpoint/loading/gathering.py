"""What a script wants of a tracked object and its own rank did not store: looked for in what other ranks stored.

That is so where ranks track different parts under one name, as the stages of a pipeline do, and the parts are now dealt
out anew: what a rank stored is then neither all that it wants, nor is all of it still wanted here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.loading.in_place import empty_like, memory_like

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def gather(own: dict[Any, Any], wanted: Collection[Any], others: Iterable[dict[Any, Any]]) -> None:
    """Complete a dict with what other ranks have, and drop what isn't wanted, where ranks differ.

    Where all ranks stored the same keys nothing is done: the script has changed, and that is said elsewhere.

    Args:
        own: what this rank stored; changed in place.
        wanted: the keys that the script has.
        others: what other ranks stored, in the order of their ranks; looked at only where keys differ.
    """
    if not isinstance(own, dict) or own.keys() == set(wanted):
        return
    before = set(own)
    ranks_differ = False
    for other in others:
        ranks_differ = ranks_differ or set(other) != before
        own |= {key: item for key, item in other.items() if key in wanted and key not in own}
        _gather_versions(own, other)
    if ranks_differ:
        for key in before.difference(wanted):
            del own[key]


def _gather_versions(own: Any, other: Any) -> None:
    """What modules note about themselves beside their state."""
    versions = getattr(other, "_metadata", None)
    if versions and isinstance(getattr(own, "_metadata", None), dict):
        own._metadata = type(own._metadata)({**versions, **own._metadata})


def gather_optimizer(own: dict[str, Any], wanted: dict[str, Any], others: Iterable[dict[str, Any]]) -> None:
    """As :func:`gather`, for the state of an optimizer that names its parameters.

    Args:
        own: what this rank stored; changed in place.
        wanted: state of the script's optimizer in the same form.
        others: what other ranks stored.
    """
    here, stored = names_of(wanted), names_of(own)
    if here == stored or not here or not _are_texts(here) or not _are_texts(stored):
        return
    known = set().union(*stored)
    parts = list(others)
    if all(set().union(*names_of(part)) == known for part in parts):
        return  # all ranks had the same parameters: the script has changed
    for part in parts:
        own["state"] |= {name: item for name, item in part["state"].items() if name not in own["state"]}
        known.update(*names_of(part))
    if len(here) == len(stored) and known.issuperset(*here):
        for group, names in zip(own["param_groups"], here, strict=True):
            group["params"] = list(names)
        own["state"] = {name: item for name, item in own["state"].items() if any(name in names for names in here)}


def names_of(state: dict[str, Any]) -> list[list[Any]]:
    """The parameters of each group of an optimizer's state; none for a state of another make than torch's."""
    groups = state.get("param_groups") if isinstance(state, dict) and isinstance(state.get("state"), dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return [list(group.get("params", ())) for group in groups]


def _are_texts(groups: list[list[Any]]) -> bool:
    return all(isinstance(name, str) for names in groups for name in names)


def optimizer_template(optimizer: torch.optim.Optimizer, outline: dict[str, Any]) -> dict[str, Any]:
    """What to read an optimizer's state into: what has the shape of its parameter is laid out and spread as that is.

    Args:
        optimizer: the script's optimizer.
        outline: the stored state, its parameters by index.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    made: dict[Any, dict[str, torch.Tensor]] = {}
    for index, values in outline.get("state", {}).items():
        if not (type(index) is int and index < len(parameters) and isinstance(values, dict)):
            continue
        parameter = parameters[index]
        mine = optimizer.state.get(parameter)
        mine = mine if isinstance(mine, dict) else {}
        made[index] = {
            key: memory_like(parameter, value.dtype, mine.get(key))
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
        }
    return {"state": made}


def spread_template(value: Any) -> Any:
    """Fresh tensors where a value has DTensors, None where it has other things."""
    if dtensors.is_dtensor(value):
        return empty_like(value, value.dtype)
    if isinstance(value, dict):
        return {key: spread_template(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spread_template(item) for item in value]
    return None
