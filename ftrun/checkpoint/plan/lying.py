"""How the tensors of a state lie in memory, looked at in one go: touching thousands costs more than the look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint.dtensors import specs_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Look:
    """What was seen of some tensors.

    Attributes:
        starts: addresses.
        kinds: dtypes, shapes and strides, conjugation, whether one is negated, and how they are spread over ranks;
            equal for the same.
        negated: one of them has its negation pending.
        versions: how often each was written to; None where one doesn't count that.
    """

    starts: Any
    kinds: tuple[Any, ...]
    negated: bool
    versions: list[int] | None


def look(given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Look:
    """Look at tensors.

    Args:
        given: the tensors.
        parts: what lies on this rank of each; plain tensors.

    Raises:
        RuntimeError: one of them has no address, or no strides.
    """
    try:
        return _look(given, parts, count=True)
    except RuntimeError:  # of one that was made in inference mode, and doesn't count
        return _look(given, parts, count=False)


def _look(given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, count: bool) -> Look:
    starts: list[int] = []
    dtypes: list[torch.dtype] = []
    shapes: list[torch.Size] = []
    contiguous: list[bool] = []
    versions: list[int] = []
    negated = False
    for each in parts:
        starts.append(each.data_ptr())
        dtypes.append(each.dtype)
        shapes.append(each.shape)
        contiguous.append(each.is_contiguous())
        negated = negated or each.is_neg()
        if count:
            versions.append(each._version)
    # Of a contiguous tensor the shape says how its bytes lie.
    strides = None
    if False in contiguous:
        strides = [None if flat else each.stride() for flat, each in zip(contiguous, parts, strict=True)]
    conj = [each.is_conj() for each in parts] if not _REAL.issuperset(dtypes) else None
    kinds = (dtypes, shapes, strides, conj, negated, specs_of(given))
    return Look(np.array(starts, dtype=np.uint64), kinds, negated, versions if count else None)


@dataclass(frozen=True)
class Layout:
    """How the tensors of a state lie.

    Attributes:
        kinds: see :class:`Look`.
        starts: addresses.
        ends: addresses behind them.
        on_host: whether each is in the memory of the host.
        empty: which of those without elements are one object; nothing else tells them apart.
    """

    kinds: tuple[Any, ...]
    starts: Any
    ends: Any
    on_host: list[bool]
    empty: list[int]

    @classmethod
    def of(cls, given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], seen: Look) -> Layout:
        """The layout of tensors that were looked at."""
        ends = seen.starts + np.array([_extent(each) for each in parts], dtype=np.uint64)
        return cls(seen.kinds, seen.starts, ends, [each.is_cpu for each in parts], same_empty(given, seen.starts, ends))


def same_empty(given: Sequence[torch.Tensor], starts: Any, ends: Any) -> list[int]:
    """For each tensor without elements the number of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(given[each]), each) for each in np.flatnonzero(starts == ends).tolist()]


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
