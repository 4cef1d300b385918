"""Taking the same state apart at every save, at the cost of what has changed in it.

Nothing of the state is kept from save to save, so nothing that the script lets go of stays in memory: only names, and
what tells how tensors lay. A tensor is taken for what it was when its place in the state, its dtype, shape, strides and
address are the same, whatever object it is. Few may lie elsewhere: values that are made anew for each save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint import state
from ftrun.checkpoint.dtensors import is_dtensor, parts_of, specs_of
from ftrun.checkpoint.refusals import Refused
from ftrun.checkpoint.state import Alike, Encoded, Walk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_MOVED = 64
"""Tensors that may lie elsewhere than in the save before; of more all is looked at anew."""


@dataclass(frozen=True)
class _Layout:
    """How the tensors of a state lie.

    Attributes:
        kinds: dtypes, shapes and strides, and how they are spread over ranks.
        starts: addresses.
        ends: addresses behind them.
        devices: where each is.
        empty: which of those without elements are one object; nothing else tells them apart.
    """

    kinds: tuple[Any, ...]
    starts: Any
    ends: Any
    devices: list[torch.device]
    empty: list[int]


class Encoding:
    """:func:`ftrun.checkpoint.state.encode` for one state again and again. Training thread only."""

    def __init__(self) -> None:
        self._walk: _Before | None = None

    def encode(self, value: object) -> Encoded:
        """Take a state apart.

        Raises:
            NotStorable: as :func:`ftrun.checkpoint.state.encode`.
        """
        again = self._again(value) if self._walk is not None else None
        return again or self._anew(value)

    def _anew(self, value: object) -> Encoded:
        self._walk = None
        walk = Walk()
        encoded = state.taken_apart(value, walk)
        parts = parts_of(walk.given)
        if parts is None:
            return encoded
        self._walk = before = _Before(walk, _layout(walk.given, parts), encoded.tensors)
        return Encoded(encoded.tree, encoded.tensors, before.alike(walk.given, before.layout.starts))

    def _again(self, value: object) -> Encoded | None:
        before = self._walk
        assert before is not None, "asked by the caller"
        walk = Walk(before=before.blocks)
        try:
            tree = walk.encode(value, "")
        except Refused:
            return None  # the walk anew says it, or says more
        parts = parts_of(walk.given)
        if parts is None or walk.names != before.names or not walk.finished(before.bases):
            return None
        try:
            starts = before.starts_of(walk.given, parts)
        except RuntimeError:  # of what has no memory, or no strides
            return None
        if starts is None:
            return None
        alike = before.alike(walk.given, starts)
        return Encoded(tree, _Plain(before.numbers, alike.given), alike)


class _Plain(Mapping[str, torch.Tensor]):
    """Tensors by name, without gradient when they are asked for: most of them never are."""

    def __init__(self, numbers: dict[str, int], given: list[torch.Tensor]) -> None:
        self._numbers = numbers
        self._given = given

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._given[self._numbers[name]]
        as_it_is = (type(tensor) is torch.Tensor and not tensor.requires_grad) or is_dtensor(tensor)
        return tensor if as_it_is else tensor.detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Before:
    """What is kept of a walk."""

    def __init__(self, walk: Walk, layout: _Layout, stored: Collection[str]) -> None:
        self.blocks = walk.blocks
        self.names = walk.names
        self.bases = walk.bases
        self.layout = layout
        self._kept = [number for number, name in enumerate(walk.names) if name in stored]
        self._places = np.array(self._kept, dtype=np.int64)
        self._all = len(self._kept) == len(walk.names)
        self.numbers = {walk.names[number]: at for at, number in enumerate(self._kept)}
        self._token = object()

    def _stored(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of all tensors that have bytes of their own."""
        return tensors if self._all else [tensors[number] for number in self._kept]

    def alike(self, given: list[torch.Tensor], starts: Any) -> Alike:
        """What tells others that nothing has changed since the walk."""
        return Alike(self._token, self._stored(given), starts if self._all else starts[self._places])

    def starts_of(self, given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Any | None:
        """Addresses of the tensors now; None where they lie differently.

        Args:
            given: the tensors.
            parts: what lies on this rank of each.

        Raises:
            RuntimeError: one of them has no address.
        """
        layout = self.layout
        if layout.kinds != _kinds(given, parts):
            return None
        starts = np.array([each.data_ptr() for each in parts], dtype=np.uint64)
        moved = np.flatnonzero(starts != layout.starts)
        if len(moved) > _MOVED or True in set(map(torch.Tensor.is_neg, parts)) or _empty(given, layout) != layout.empty:
            return None
        return starts if self._are_free(moved, starts, parts) else None

    def _are_free(self, moved: Any, starts: Any, held: Sequence[torch.Tensor]) -> bool:
        """Whether tensors that lie elsewhere now share memory with no other one, neither then nor now."""
        bound = {*self.bases, *self.bases.values()}
        ends = starts + (self.layout.ends - self.layout.starts)
        for number in moved.tolist():
            within = np.count_nonzero((starts < ends[number]) & (ends > starts[number]))
            elsewhere = not (held[number].is_cpu and self.layout.devices[number].type == "cpu")
            if number in bound or within > 1 or elsewhere or starts[number] == 0:
                return False
        return True


def _kinds(given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    dtypes = [each.dtype for each in parts]
    conj = [each.is_conj() for each in parts] if not _REAL.issuperset(dtypes) else None
    return dtypes, [each.shape for each in parts], [each.stride() for each in parts], conj, specs_of(given)


def _layout(given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> _Layout:
    starts = np.array([each.data_ptr() for each in parts], dtype=np.uint64)
    ends = starts + np.array([_extent(each) for each in parts], dtype=np.uint64)
    layout = _Layout(_kinds(given, parts), starts, ends, [each.device for each in parts], [])
    return replace(layout, empty=_empty(given, layout))


def _empty(given: Sequence[torch.Tensor], layout: _Layout) -> list[int]:
    """For each tensor without elements the number of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(given[each]), each) for each in np.flatnonzero(layout.starts == layout.ends).tolist()]


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.dtype.itemsize


_REAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
