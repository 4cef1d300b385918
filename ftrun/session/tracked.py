"""Tracked objects: what a checkpoint holds besides positions and random states, and how it comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def restore(name: str, value: Stateful, state: dict[str, Any], checkpoint: str, start_over: str) -> None:
    """Put a stored state back into a tracked object.

    Raises:
        StateMismatch: shapes or names don't fit; the message names the first few.
    """
    problems = _shape_problems(value, state)
    if not problems:
        try:
            value.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            problems = [str(error)]
    if isinstance(value, torch.optim.Optimizer) and not problems:
        _lay_out(value)
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_MOST_NAMED])
        more = f"\n  and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise StateMismatch(
            f"the tracked {name!r} doesn't fit checkpoint {checkpoint}:\n{shown}{more}\n"
            f"Build it as it was when the checkpoint was taken, or {start_over}."
        )


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give each state the strides of its parameter, channels_last for one: a checkpoint stores all contiguous.

    Fused optimizers walk parameters and states side by side in memory, and would mix up their elements.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.is_contiguous():
            continue
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def is_misplaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether states that follow their parameter are of another type or on another device than it is now."""
    for parameter, values in optimizer.state.items():
        for key, tensor in values.items():
            follows = key in _PARAMETER_SHAPED and isinstance(tensor, torch.Tensor)
            if follows and (tensor.dtype, tensor.device) != (parameter.dtype, parameter.device):
                return True
    return False


def _shape_problems(value: Stateful, state: dict[str, Any]) -> list[str]:
    if isinstance(value, torch.nn.Module):
        return _differences(value.state_dict(), state)
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer_problems(value, state)
    return []


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    problems = [f"{key}: only in the script" for key in now if key not in then]
    problems += [f"{key}: only in the checkpoint" for key in then if key not in now]
    for key, mine in now.items():
        theirs = then.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape != theirs.shape:
            problems.append(f"{key}: {list(mine.shape)} in the script, {list(theirs.shape)} in the checkpoint")
    return problems


def _optimizer_problems(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[str]:
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state.get("param_groups", [])]
    if mine != theirs:
        return [f"parameter groups of {mine} parameters in the script, {theirs} in the checkpoint"]
    problems = _option_problems(set(optimizer.param_groups[0]), set(state["param_groups"][0]))
    shapes = [each.shape for group in optimizer.param_groups for each in group["params"]]
    for index, values in state.get("state", {}).items():
        for key, tensor in values.items():
            expected = shapes[index] if index < len(shapes) else None
            if key in _PARAMETER_SHAPED and isinstance(tensor, torch.Tensor) and tensor.shape != expected:
                problems.append(
                    f"parameter {index}, {key}: {list(expected or [])} in the script, "
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
