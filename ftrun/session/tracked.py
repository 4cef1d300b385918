"""Tracked objects: what a checkpoint holds besides positions and random states, and how it comes back."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.dtensors import is_dtensor
from ftrun.errors import StateMismatch, UsageError
from ftrun.session import module_names, optimizer_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Optimizer states that have the shape of their parameter, in torch's own optimizers.
_PARAMETER_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum", "ax"}
)

# What learning rate schedulers add to the options of a group.
_SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})

_MOST_NAMED = 5


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state that can be taken and put back."""

    def state_dict(self) -> dict[str, Any]:
        """The state: nested dicts, lists and tuples of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state back."""
        ...


def unwrapped(value: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile, so that states fit with and without them."""
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return unwrapped(value.module)
    compiled = getattr(value, "_orig_mod", None) if isinstance(value, torch.nn.Module) else None
    return value if compiled is None else unwrapped(compiled)


def require_stateful(name: str, value: Any) -> None:
    """Refuse what has no state.

    Raises:
        UsageError: ``value`` lacks ``state_dict`` or ``load_state_dict``, or is a class.
    """
    if isinstance(value, type):
        raise UsageError(f"ft.track({name}=...): {value.__name__} is a class. Track the object made from it.")
    if not isinstance(value, Stateful):
        raise UsageError(
            f"ft.track({name}=...): a value of type {type(value).__name__} has no state_dict and load_state_dict. "
            'Track an object that has both, or add plain values to the checkpoint with @ftrun.on("save").'
        )


def modules_of(objects: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """The modules among tracked objects, without their wrappers."""
    found = {name: unwrapped(value) for name, value in objects.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.nn.Module)}


def state_of(name: str, value: Any, objects: Mapping[str, Any]) -> Any:
    """What a checkpoint holds of a tracked object: for a model and an optimizer the same whatever wraps it.

    Tensors are those of the object, not copies. Optimizers have names for the numbers of parameters.

    Args:
        name: under which the object is tracked.
        value: the object, wrapped or not.
        objects: everything that is tracked, by name.

    Raises:
        UsageError: the object returns no state.
    """
    value = unwrapped(value)
    if isinstance(value, torch.nn.Module):
        return module_names.module_state(value)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_names.by_name(value.state_dict(), value, modules_of(objects))
    state = value.state_dict()
    if state is None:
        raise UsageError(f"ft.track({name}=...): {type(value).__name__}.state_dict() returned None; return the state.")
    return state


def restore(
    name: str,
    value: Stateful,
    state: dict[str, Any],
    checkpoint: str,
    start_over: str,
    objects: Mapping[str, Any] | None = None,
) -> None:
    """Put a stored state back into a tracked object.

    Args:
        name: under which it is tracked.
        value: the object, without wrappers.
        state: what :func:`state_of` made; tensors may have become plain ones, DTensors too.
        checkpoint: name of the checkpoint, for the message.
        start_over: what to do to start without it, for the message.
        objects: everything that is tracked by now, by name: an optimizer's parameters are found in its modules.

    Raises:
        StateMismatch: shapes or names don't fit; the message names the first few. Nothing has changed then.
    """
    fitting = _fitting(value, state, objects or {})
    found = differences(value, fitting, objects or {})
    if not found:
        try:
            value.load_state_dict(fitting)
        except (RuntimeError, ValueError, KeyError) as error:
            found = [str(error)]
    if isinstance(value, torch.optim.Optimizer) and not found:
        _keep_types(value, fitting)
        _lay_out(value)
    if found:
        raise mismatch(name, found, checkpoint, start_over)


def mismatch(name: str, found: Sequence[str], checkpoint: str, start_over: str) -> StateMismatch:
    """The error that says how a tracked object differs from what a checkpoint holds under its name."""
    shown = "\n".join(f"  {problem}" for problem in found[:_MOST_NAMED])
    more = f"\n  and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return StateMismatch(
        f"the tracked {name!r} doesn't fit checkpoint {checkpoint}:\n{shown}{more}\n"
        f"Build it as it was when the checkpoint was taken, or {start_over}."
    )


def _fitting(value: Stateful, state: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """A state in the terms of the object as it is now: its names, its numbers, its sharding."""
    if isinstance(value, torch.nn.Module):
        return _for_module(value, state)
    if isinstance(value, torch.optim.Optimizer):
        return _for_optimizer(value, optimizer_names.by_index(state, value, modules_of(objects)))
    return state


def _for_module(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    if type(module).state_dict is not torch.nn.Module.state_dict:
        return state
    mine = module.state_dict(keep_vars=True)
    names = {cleaned: name for name, cleaned in module_names.clean_names(module, mine).items()}
    fitting = OrderedDict((names.get(name, name), item) for name, item in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        fitting._metadata = metadata  # type: ignore[attr-defined]
    for name, item in fitting.items():
        if name in mine:
            fitting[name] = placed(item, mine[name])
    return fitting


def _for_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(map(is_dtensor, parameters)) or not isinstance(state.get("state"), dict):
        return state
    spread = {}
    for index, values in state["state"].items():
        like = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        spread[index] = {key: placed(item, like) for key, item in values.items()} if like is not None else values
    return {**state, "state": spread}


def placed(value: Any, like: Any) -> Any:
    """A plain tensor as a DTensor, spread like another one of the same shape; anything else as it is."""
    if not isinstance(value, torch.Tensor) or is_dtensor(value) or not is_dtensor(like) or value.shape != like.shape:
        return value
    made: Any = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    for box, part in dtensors.holding(made).blocks:
        ranges = zip(box.offset, box.shape, strict=True)
        part.copy_(value[tuple(slice(first, first + extent) for first, extent in ranges)])
    return made


def _keep_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put back what torch has rounded: its ``load_state_dict`` casts floating state to the type of its parameter.

    Weights in bfloat16 with a master copy of each in float32 would go on from the rounded copy. What torch's own
    optimizers keep is of their parameter's type, and follows it when that has changed.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    follows = _PARAMETER_SHAPED if type(optimizer).__module__.startswith("torch.optim") else frozenset()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, values in state.get("state", {}).items():
        parameter = parameters[index] if isinstance(index, int) else index
        mine = optimizer.state.get(parameter, {})
        for key, stored in values.items():
            loaded = mine.get(key)
            if key in follows or not isinstance(stored, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                continue
            if stored.dtype != loaded.dtype:
                mine[key] = stored.to(loaded.device)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give each state the strides of its parameter, channels_last for one, where it hasn't them.

    Fused optimizers walk parameters and states side by side in memory, and would mix up their elements.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if is_dtensor(parameter) or parameter.is_contiguous():
            continue
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if like and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def is_misplaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether states that follow their parameter are of another type or on another device than it is now."""
    for parameter, values in optimizer.state.items():
        for key, tensor in values.items():
            follows = key in _PARAMETER_SHAPED and isinstance(tensor, torch.Tensor)
            if follows and (tensor.dtype, tensor.device) != (parameter.dtype, parameter.device):
                return True
    return False


def differences(value: Stateful, state: dict[str, Any], objects: Mapping[str, Any]) -> list[str]:
    """How a state differs from a tracked object in names and shapes; its tensors may be on the meta device.

    Args:
        value: the object, without wrappers.
        state: stored, with numbers for the names of an optimizer's parameters where they fit.
        objects: everything that is tracked by now, by name.
    """
    if isinstance(value, torch.nn.Module):
        return _module_problems(value.state_dict(), state)
    if isinstance(value, torch.optim.Optimizer):
        modules = modules_of(objects)
        return optimizer_names.problems(state, value, modules) or _optimizer_problems(value, state, modules)
    return []


def _module_problems(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    problems = [f"{key}: only in the script" for key in now if key not in then]
    problems += [f"{key}: only in the checkpoint" for key in then if key not in now]
    for key, mine in now.items():
        theirs = then.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape != theirs.shape:
            problems.append(f"{key}: {list(mine.shape)} in the script, {list(theirs.shape)} in the checkpoint")
    return problems


def _optimizer_problems(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], modules: Mapping[str, torch.nn.Module]
) -> list[str]:
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state.get("param_groups", [])]
    if mine != theirs:
        return [f"parameter groups of {mine} parameters in the script, {theirs} in the checkpoint"]
    problems = _option_problems(set(optimizer.param_groups[0]), set(state["param_groups"][0]))
    shapes = [each.shape for group in optimizer.param_groups for each in group["params"]]
    names = list(itertools.chain(*(optimizer_names.names_of(optimizer, modules) or ()))) or range(len(shapes))
    for index, values in state.get("state", {}).items():
        known = isinstance(index, int) and index < len(shapes)
        for key, tensor in values.items() if isinstance(values, dict) else ():
            expected = shapes[index] if known else None
            if key in _PARAMETER_SHAPED and isinstance(tensor, torch.Tensor) and tensor.shape != expected:
                problems.append(
                    f"parameter {names[index] if known else index}, {key}: {list(expected or [])} in the script, "
                    f"{list(tensor.shape)} in the checkpoint"
                )
    return problems


def _option_problems(mine: set[str], theirs: set[str]) -> list[str]:
    """Options on both sides that the other lacks: another class. On one side only, another version of torch."""
    only_mine, only_theirs = mine - theirs - _SCHEDULED, theirs - mine - _SCHEDULED
    if not only_mine or not only_theirs:
        return []
    names = [", ".join(sorted(each)) for each in (only_mine, only_theirs)]
    return [f"another optimizer: options {names[0]} only in the script, {names[1]} only in the checkpoint"]
