"""Reading straight into what the script holds: memory for what it lacks, and whether anything is left to be done."""

from __future__ import annotations

from typing import Any

import torch

from ftrun.checkpoint import dtensors

_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_SHARDING = "torch.distributed.fsdp._fully_shard."
"""Its hooks bring a module into its sharded form, as those have done that ran when its state was taken."""


def empty_like(like: Any, dtype: torch.dtype) -> Any:
    """Fresh memory for a tensor that is laid out, and spread over ranks, as another one; without gradient.

    torch's own, for a DTensor, works out how the result is spread, which takes milliseconds for every shape.
    """
    if not dtensors.is_dtensor(like) or any(each.is_partial() for each in like.placements):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    part = torch.empty_like(dtensors.local(like), dtype=dtype, requires_grad=False)
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def memory_like(like: Any, dtype: torch.dtype, mine: Any) -> Any:
    """As :func:`empty_like`, but the script's own tensor where that is laid out, and spread over ranks, as it must be.

    A state that is there already is not held twice then, and its pages need not be made.

    Args:
        like: what it has to be like.
        dtype: its type.
        mine: what the script has in its place: a tensor, or anything.
    """
    return mine if _is_like(mine, like, dtype) else empty_like(like, dtype)


def _is_like(mine: Any, like: Any, dtype: torch.dtype) -> bool:
    spread = dtensors.is_dtensor(like)
    if type(mine) is not (type(like) if spread else torch.Tensor) or mine.requires_grad:
        return False
    same = (mine.shape, mine.stride(), mine.dtype, mine.device) == (like.shape, like.stride(), dtype, like.device)
    return same and (not spread or _is_spread_like(mine, like))


def _is_spread_like(mine: Any, like: Any) -> bool:
    same = (mine.device_mesh, mine.placements) == (like.device_mesh, like.placements)
    return same and bool(dtensors.local(mine).stride() == dtensors.local(like).stride())


def is_loaded(module: torch.nn.Module, state: Any, template: Any) -> bool:
    """Whether ``module.load_state_dict(state)`` would do nothing but copy each of its tensors to itself.

    Args:
        module: the module.
        state: what was read.
        template: the module's own tensors, under the same names.
    """
    if not isinstance(state, dict) or not isinstance(template, dict) or state.keys() != template.keys():
        return False
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    if not all(each is state[key] and id(each) in own for key, each in template.items()):
        return False
    plain = "load_state_dict" not in vars(module) and type(module).load_state_dict is torch.nn.Module.load_state_dict
    return plain and all(map(_loads_plainly, module.modules()))


def _loads_plainly(module: torch.nn.Module) -> bool:
    for name in ("_load_from_state_dict", "set_extra_state"):
        if name in vars(module) or getattr(type(module), name) is not getattr(torch.nn.Module, name):
            return False
    return all(_is_of_sharding(hook) for name in _HOOKS for hook in getattr(module, name).values())


def _is_of_sharding(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps those that get the module
    return str(getattr(function, "__module__", "")).startswith(_SHARDING)
