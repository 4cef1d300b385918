"""Tensors that are spread over ranks (``DTensor``): what a rank holds of them, and who else holds the same.

The class itself is never imported here: that takes long, and plain jobs don't need it.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.plan.sharding import Split, boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftrun.checkpoint.plan.pieces import Box
    from ftrun.checkpoint.plan.sharding import Start


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a tensor that is spread over ranks.

    Attributes:
        blocks: each block of the whole tensor with the part of the local tensor that holds it; more than one where
            the sharding is strided, none where the local tensor is empty.
        ranks: global ranks over which the tensor is spread, ascending.
        replicas: those among them that hold the same blocks, this rank included where it holds any.
    """

    blocks: tuple[tuple[Box, torch.Tensor], ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]


def is_dtensor(tensor: object) -> bool:
    """Whether a value is a DTensor."""
    return type(tensor).__name__ == "DTensor"


def storable_classes() -> frozenset[type]:
    """The classes of tensors that can be stored; DTensor among them where it has been imported."""
    return _PLAIN | _spread_classes()


def _spread_classes() -> frozenset[type]:
    """DTensor where it has been imported."""
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return frozenset({spread} if isinstance(spread, type) else ())


def all_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of some tensors is a DTensor or of another class of its own. Fast, for it runs at every save."""
    return _PLAIN.issuperset(map(type, tensors))


def parts_of(tensors: Sequence[Any]) -> Sequence[torch.Tensor] | None:
    """What lies on this rank of some tensors: of DTensors their local parts, others as they are.

    None where a tensor is of another class, or a collective for a part is still under way. Fast, as :func:`all_plain`.
    """
    spread = _spread_classes()
    classes = set(map(type, tensors))
    if classes <= _PLAIN:
        return tensors
    if not classes <= _PLAIN | spread:
        return None
    parts = [each._local_tensor if type(each) in spread else each for each in tensors]
    return parts if all_plain(parts) else None


def parts_alike(tensors: Sequence[Any], types: Sequence[type]) -> Sequence[torch.Tensor] | None:
    """:func:`parts_of` for tensors that are of the same classes as once, in their order; None where they aren't.

    The classes of the local parts are the caller's to look at.
    """
    if [*map(type, tensors)] != types:
        return None
    kinds = set(types)
    if kinds <= _PLAIN:
        return tensors
    if kinds.isdisjoint(_PLAIN):
        return [each._local_tensor for each in tensors]
    return [each if kind in _PLAIN else each._local_tensor for each, kind in zip(tensors, types, strict=True)]


def specs_of(tensors: Sequence[Any]) -> list[Any] | None:
    """How DTensors among some tensors are spread, None for the others; None for all where there are none."""
    spread = _spread_classes()
    if spread.isdisjoint(map(type, tensors)):
        return None
    return [each._spec if type(each) in spread else None for each in tensors]


def versions_of(tensors: Sequence[Any], parts: Sequence[torch.Tensor]) -> list[int]:
    """How often torch has seen each tensor written to; of a DTensor both it and its local part, which count apart.

    Args:
        tensors: the tensors.
        parts: what lies on this rank of each.

    Raises:
        RuntimeError: one of them was made in inference mode, and doesn't count.
    """
    versions = [each._version for each in parts]
    if tensors is parts:
        return versions
    wholes = [0 if each is part else each._version for each, part in zip(tensors, parts, strict=True)]
    return [*map(operator.add, versions, wholes)]


def local(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that is on this rank, sharing its memory, without gradient.

    A collective that is still under way is waited for.
    """
    part = tensor._local_tensor
    if type(part) is not torch.Tensor:
        part = part.wait() if hasattr(part, "wait") else part
    plain: torch.Tensor = part.detach() if part.requires_grad else part
    return plain


def ties(tensors: Sequence[Any]) -> dict[int, int]:
    """Of DTensors that are the same view of the same memory, by their numbers, the first for all others."""
    memory = [each._local_tensor.data_ptr() if _has_memory(each) else id(each) for each in tensors]
    if len(set(memory)) == len(memory):
        return {}
    counts = Counter(memory)
    seen: dict[tuple[Any, ...], int] = {}
    found = {}
    for number, tensor in enumerate(tensors):
        if counts[memory[number]] > 1:
            first = seen.setdefault(_identity(tensor), number)
            if first != number:
                found[number] = first
    return found


def _has_memory(tensor: Any) -> bool:
    part = tensor._local_tensor
    return type(part) is torch.Tensor and part.numel() > 0


def _identity(tensor: Any) -> tuple[Any, ...]:
    if not _has_memory(tensor):
        return (id(tensor),)
    part = tensor._local_tensor
    where = (part.data_ptr(), part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg())
    # Meshes by their value: torch caches what operations return, and so hands out equal meshes of another time.
    return (*where, tensor.shape, tensor.placements, tensor.device_mesh)


class Geometry:
    """Where ranks hold what, computed once for all DTensors that are spread alike."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._places: dict[tuple[Any, ...], _Place] = {}

    def ranks(self, tensor: Any) -> tuple[int, ...]:
        """The global ranks over which a DTensor is spread, ascending."""
        mesh = tensor.device_mesh
        if id(mesh) not in self._ranks:
            self._ranks[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
        return self._ranks[id(mesh)]

    def holding(self, tensor: Any) -> Holding:
        """What this rank holds of a DTensor.

        Raises:
            ValueError: its local part is not what its placements say.
        """
        part = local(tensor)
        key = (id(tensor.device_mesh), tensor.placements, tensor.shape, part.shape)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _place(tensor, part)
        blocks = tuple((box, _narrowed(part, start, box.shape)) for box, start in place.blocks)
        return Holding(blocks, self.ranks(tensor), place.replicas)


def holding(tensor: Any) -> Holding:
    """What this rank holds of one DTensor.

    Raises:
        ValueError: its local part is not what its placements say.
    """
    return Geometry().holding(tensor)


@dataclass(frozen=True)
class _Place:
    """A rank's place: its blocks, each with its beginning in the local tensor, and who else has them."""

    blocks: Sequence[tuple[Box, Start]]
    replicas: tuple[int, ...]


def _place(tensor: Any, part: torch.Tensor) -> _Place:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _Place((), ())
    splits = [_split(each, mesh.size(number), coordinate[number]) for number, each in enumerate(tensor.placements)]
    blocks = boxes(tuple(tensor.shape), tuple(part.shape), splits)
    return _Place(blocks, _replicas(mesh, coordinate, splits) if blocks else ())


def _split(placement: Any, count: int, index: int) -> Split | None:
    """How one dimension of a mesh splits a tensor; None where it does not."""
    if placement.is_replicate():
        return None
    return Split(placement.dim, count, index, int(getattr(placement, "split_factor", 1)))


def _narrowed(part: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dimension, (first, extent) in enumerate(zip(start, shape, strict=True)):
        if extent != part.shape[dimension]:
            part = part.narrow(dimension, first, extent)
    return part


def _replicas(mesh: Any, coordinate: Sequence[int], splits: Sequence[Split | None]) -> tuple[int, ...]:
    place = tuple(slice(None) if each is None else coordinate[number] for number, each in enumerate(splits))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))
