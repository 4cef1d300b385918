"""Names of parameters and buffers as the script's own classes give them, whatever wraps a part of the model.

A part that is compiled, checkpointed or wrapped in DistributedDataParallel has its names one level deeper. A checkpoint
must fit with and without such a wrapper, so the level is left out of what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_SIGNS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def clean_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The names without the levels that wrappers add, by the names as they are."""
    names = list(names)
    together = "\n".join(names)
    if not any(sign in together for sign in _SIGNS):
        return dict(zip(names, names, strict=True))
    cleaned = {name: _clean(module, name) for name in names}
    return cleaned if len(set(cleaned.values())) == len(cleaned) else dict(zip(names, names, strict=True))


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
