"""Tensors that share memory: found before they are stored, so that no byte is stored twice, and made again.

A tensor that lies inside another one of the same dtype is a *view* of it: a slice, a transpose, a parameter that is
part of one flat buffer. What holds it, its *base*, must be contiguous, because that is how it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def bases(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """For each tensor that lies inside another one, by their numbers, the one that it lies in.

    Of tensors that are the same view of the same memory all but the first lie in the first. Tensors that overlap
    without one holding the other lie in none.
    """
    starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    ends = starts + np.array(
        [tensor.nbytes if tensor.is_contiguous() else _extent(tensor) for tensor in tensors], dtype=np.uint64
    )
    found: dict[int, int] = {}
    for cluster in _clusters(starts, ends):
        _within(cluster, tensors, found)
    return found | _same_empty(tensors, starts, ends)


def view(base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """A view of a tensor's memory.

    Raises:
        ValueError: it would reach beyond that tensor.
    """
    numbers = [*shape, *stride, offset]
    sound = all(type(each) is int and each >= 0 for each in numbers) and len(shape) == len(stride)
    if not sound or (0 not in shape and _last(shape, stride) + offset >= base.numel()):
        raise ValueError(f"a view of shape {list(shape)} reaches beyond its tensor of shape {list(base.shape)}")
    base = base.contiguous()
    return base.as_strided(tuple(shape), tuple(stride), base.storage_offset() + offset)


def offset_in(base: torch.Tensor, tensor: torch.Tensor) -> int:
    """Elements between the beginnings of a base and of a tensor in it."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.dtype.itemsize


def _last(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Distance of the last element from the first."""
    return sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes of memory from its first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    return (_last(tensor.shape, tensor.stride()) + 1) * tensor.dtype.itemsize


def _clusters(starts: Any, ends: Any) -> list[list[int]]:
    """Numbers of tensors whose memory hangs together by overlaps, each ordered from low and long to high and short."""
    order = np.lexsort((-ends.astype(np.int64), starts))
    order = order[starts[order] < ends[order]]
    overlaps = starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]
    if not overlaps.any():
        return []
    clusters: list[list[int]] = []
    for number, continues in zip(order.tolist(), [False, *overlaps.tolist()], strict=True):
        if continues:
            clusters[-1].append(number)
        else:
            clusters.append([number])
    return [cluster for cluster in clusters if len(cluster) > 1]


def _within(cluster: list[int], tensors: Sequence[torch.Tensor], found: dict[int, int]) -> None:
    holders: list[int] = []
    seen: dict[tuple[Any, ...], int] = {}
    for number in sorted(cluster, key=lambda each: _outer_first(tensors[each], each)):
        tensor = tensors[number]
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        holder = seen.get(key)
        if holder is None:
            holder = next((each for each in reversed(holders) if _holds(tensors[each], tensor)), None)
        if holder is not None:
            found[number] = holder
            continue
        seen[key] = number
        if tensor.is_contiguous():
            holders.append(number)


def _outer_first(tensor: torch.Tensor, number: int) -> tuple[int, int, bool, int]:
    return tensor.data_ptr(), -_extent(tensor), not tensor.is_contiguous(), number


def _holds(base: torch.Tensor, tensor: torch.Tensor) -> bool:
    distance = tensor.data_ptr() - base.data_ptr()
    alike = base.dtype == tensor.dtype and base.device == tensor.device and distance % tensor.dtype.itemsize == 0
    plain = not (base.is_conj() or base.is_neg() or tensor.is_conj() or tensor.is_neg())
    return alike and plain and distance + _extent(tensor) <= base.nbytes


def _same_empty(tensors: Sequence[torch.Tensor], starts: Any, ends: Any) -> dict[int, int]:
    """Tensors without elements have no memory; only the same object is the same."""
    seen: dict[int, int] = {}
    found = {}
    for number in np.flatnonzero(starts == ends).tolist():
        first = seen.setdefault(id(tensors[number]), number)
        if first != number:
            found[number] = first
    return found
