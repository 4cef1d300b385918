"""Names of parameters and buffers as the script's own classes give them, whatever wraps a part of the model.

A part that is compiled, checkpointed or wrapped in DistributedDataParallel has its names one level deeper. A checkpoint
must fit with and without such a wrapper, so the level is left out of what is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_SIGNS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def clean_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The names without the levels that wrappers add, by the names as they are."""
    names = list(names)
    if not may_have_levels(names):
        return dict(zip(names, names, strict=True))
    cleaned = {name: _clean(module, name) for name in names}
    return cleaned if len(set(cleaned.values())) == len(cleaned) else dict(zip(names, names, strict=True))


def may_have_levels(names: Iterable[str]) -> bool:
    """Whether one of some names looks as if a wrapper had put a level into it."""
    together = "\n".join(names)
    return any(sign in together for sign in _SIGNS)


def module_state(module: torch.nn.Module, known: list[str] | None = None) -> Any:
    """What a checkpoint holds of a module without its wrappers. Tensors are those of the module, parameters included.

    Args:
        module: the module.
        known: names that are known to hold no level of a wrapper; the module's own are put in their place if so.
    """
    if type(module).state_dict is not torch.nn.Module.state_dict:
        return module.state_dict()
    # Detaching each would take a while for DTensors, and be done once more where the state is taken apart.
    state = module.state_dict(keep_vars=True)
    if known and known == [*state]:
        return state
    names = clean_names(module, state)
    metadata = getattr(state, "_metadata", None)
    if all(name == cleaned for name, cleaned in names.items()):
        if known is not None and not may_have_levels(state):
            known[:] = state
        return state
    clean = OrderedDict((names[name], item) for name, item in state.items())
    if metadata is not None:
        clean._metadata = metadata  # type: ignore[attr-defined]
    return clean


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Name of each parameter by its identity; the first name of one that has several."""
    parameters = _parameters(module)
    names = list(parameters.values())
    cleaned = clean_names(module, names)
    return dict(zip(parameters, map(cleaned.__getitem__, names), strict=True))


def _parameters(module: nn.Module) -> dict[int, str]:
    """``named_parameters()`` the other way round. Asked at every save, so its own way is gone where there is none."""
    if type(module).named_parameters is not torch.nn.Module.named_parameters:
        return {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[int, str] = {}
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in found:
                found[id(parameter)] = start + name
    return found


def _clean(module: nn.Module | None, name: str) -> str:
    """Follow a name from a module down, and leave out the steps into what a wrapper wraps."""
    kept = []
    for step in name.split("."):
        inner = _inner(module)
        while module is not None and inner is not None and step != inner:  # some leave out their level themselves
            module = module._modules[inner]
            inner = _inner(module)
        if step != inner:
            kept.append(step)
        module = module._modules.get(step) if module is not None else None
    return ".".join(kept)


def _inner(module: nn.Module | None) -> str | None:
    """Under which name a wrapper has what it wraps; None for any other module."""
    if module is None:
        return None
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return "module"
    return next((name for name in ("_orig_mod", "_checkpoint_wrapped_module") if name in module._modules), None)
