"""What a stored value is read into: tensors of the script's own, matched by their place in it; DTensors too."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint import aliases, dtensors
from ftrun.checkpoint.loading.targets import extent_of, is_fillable
from ftrun.checkpoint.plan.pieces import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class Target:
    """Where a tensor is read to.

    Attributes:
        blocks: blocks of the whole tensor that this rank wants, each with a plain tensor of its shape to fill.
        result: what is handed out when they are filled.
    """

    blocks: tuple[tuple[Box, torch.Tensor], ...]
    result: torch.Tensor


def target(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    template: torch.Tensor | None,
    geometry: dtensors.Geometry | None = None,
) -> Target:
    """A target for a stored tensor: the template's own memory where it fits, else fresh memory of the host.

    Args:
        shape: of the whole tensor.
        dtype: as it is stored.
        template: the script's tensor at the same place, if there is one.
        geometry: what is known by now of where ranks hold what; saves time where there are many DTensors.
    """
    if template is not None and dtensors.is_dtensor(template) and tuple(template.shape) == shape:
        blocks = (geometry or dtensors.Geometry()).holding(template).blocks
        if all(is_fillable(local, box.shape) for box, local in blocks):
            return Target(blocks, template)
    if template is not None and is_fillable(template, shape):
        return Target(((Box.whole(shape), template.detach()),), template)
    return fresh(shape, dtype)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Target:
    """A target of its own."""
    tensor = torch.empty(shape, dtype=dtype)
    return Target(((Box.whole(shape), tensor),), tensor)


def matched(value: Any, template: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of tensors at the same place of a value and of a template."""
    if isinstance(value, torch.Tensor):
        if isinstance(template, torch.Tensor):
            yield value, template
    elif isinstance(value, dict) and isinstance(template, dict):
        for key, item in value.items():
            if key in template:
                yield from matched(item, template[key])
    elif isinstance(value, list | tuple | deque) and isinstance(template, list | tuple | deque):
        for item, other in zip(value, template, strict=False):
            yield from matched(item, other)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a value of dicts, lists and their like."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        for item in value:
            yield from tensors_in(item)


def replaced(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """A value with other tensors, by the identity of the old ones. Dicts and lists are changed in place.

    A view of an old one becomes the same view of the new one.
    """
    if isinstance(value, torch.Tensor):
        base = new.get(id(value._base)) if id(value) not in new else None
        if base is not None:
            return aliases.view(base.detach(), value.shape, value.stride(), int(value.storage_offset()))
        return new.get(id(value), value)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = replaced(item, new)
    elif isinstance(value, list | deque):
        for index, item in enumerate(value):
            value[index] = replaced(item, new)
    elif type(value) in (tuple, set, frozenset):
        return type(value)(replaced(item, new) for item in value)
    return value


def apart(targets: Mapping[int, Target]) -> dict[int, Target]:
    """Targets without those that lie in memory of another one: two tensors must not be read into the same memory."""
    extents = [(extent_of(tensor), key) for key, each in targets.items() for _, tensor in each.blocks if tensor.numel()]
    kept = dict(targets)
    device, end = "", 0
    for (where, first, last), key in sorted(extents):
        if where != device:
            device, end = where, 0
        if first < end:
            result = targets[key].result
            kept[key] = target(tuple(result.shape), result.dtype, torch.empty_like(result, requires_grad=False))
        end = max(end, last)
    return kept
