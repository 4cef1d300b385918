"""The tensors of a state as a rank sees them: plain memory, and where it belongs in the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.plan.pieces import Box
from ftrun.checkpoint.words import dtype_name
from ftrun.errors import NotStorable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftrun.checkpoint.state import Encoded


@dataclass(frozen=True)
class Source:
    """A block of a tensor on this rank.

    Attributes:
        name: of the tensor.
        tensor: what this rank holds of it: plain, without gradient, of the shape of the block.
        dtype: ``float32``.
        shape: of the whole tensor.
        box: the block.
        ranks: ranks over which the tensor is spread; None for a plain tensor.
        replicas: ranks that hold the same block of it, as far as the tensor itself tells: this rank for a plain one.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    box: Box
    ranks: tuple[int, ...] | None
    replicas: tuple[int, ...]


def sources(encoded: Encoded, rank: int) -> list[Source]:
    """The blocks that this rank holds, in the order of the state. A DTensor has one, none, or (strided) several.

    Raises:
        NotStorable: a DTensor's local part is not what its placements say.
    """
    found: list[Source] = []
    geometry = dtensors.Geometry()
    for name, tensor in encoded.tensors.items():
        if dtensors.is_dtensor(tensor):
            found += _spread(name, tensor, geometry)
        else:
            shape = tuple(tensor.shape)
            found.append(Source(name, tensor, dtype_name(tensor.dtype), shape, Box.whole(shape), None, (rank,)))
    return found


def _spread(name: str, tensor: torch.Tensor, geometry: dtensors.Geometry) -> Iterator[Source]:
    try:
        held = geometry.holding(tensor)
    except ValueError as error:
        raise NotStorable(f"the DTensor {name!r} can't be stored: {error}; track x.full_tensor()") from error
    for box, part in held.blocks:
        yield Source(name, part, dtype_name(tensor.dtype), tuple(tensor.shape), box, held.ranks, held.replicas)


def structure(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """All that a plan depends on besides addresses. Equal for equal structures; fast, for it runs at every save."""
    values = list(tensors.values())
    spread = None if dtensors.all_plain(values) else [_spreading(each) for each in values]
    return (
        list(tensors),
        [each.dtype for each in values],
        [each.shape for each in values],
        list(map(torch.Tensor.is_contiguous, values)),
        spread,
    )


def _spreading(tensor: Any) -> Any:
    if not dtensors.is_dtensor(tensor):
        return None
    part = tensor._local_tensor
    return tensor.placements, tensor.device_mesh, part.shape, part.is_contiguous()
