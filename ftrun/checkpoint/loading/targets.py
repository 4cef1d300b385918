"""Where a tensor's bytes go: straight into memory that is laid out as the file is, else through a small buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.loading.assemble import blocks, is_run, parts, position
from ftrun.checkpoint.loading.chunks import Damaged, Into

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.checkpoint.loading.assemble import Part
    from ftrun.checkpoint.loading.chunks import Use
    from ftrun.checkpoint.plan.pieces import Box, Piece


def uses(
    pieces: Iterable[Piece], target: torch.Tensor, box: Box, dtype: torch.dtype
) -> tuple[list[tuple[str, Use]], int]:
    """What to read from which file, so that pieces fill a tensor, and how many elements of it they fill.

    Args:
        pieces: of the whole tensor.
        target: plain tensor of the block's shape, without gradient, on any device, of any strides and type.
        box: the block.
        dtype: type of the stored elements.
    """
    memory = memory_of(target) if target.dtype == dtype else None
    size = dtype.itemsize
    found: list[tuple[str, Use]] = []
    filled = 0
    for piece in pieces:
        if memory is not None and piece.box == box:  # as it is nearly always: the file has it as the memory has it
            found.append((piece.file, Into(piece.offset, memory[piece.start * size : piece.stop * size])))
            filled += piece.stop - piece.start
            continue
        for part in parts((piece,), size, box):
            found.append((part.file, _use(part, target, box, dtype, memory)))
            filled += part.common.numel
    return found, filled


def _use(part: Part, target: torch.Tensor, box: Box, dtype: torch.dtype, memory: memoryview | None) -> Use:
    if memory is not None and is_run(part.common, part.block) and is_run(part.common, box):
        first = position(part.common.offset, box) * part.itemsize
        return Into(part.start, memory[first : first + part.common.numel * part.itemsize])
    return Scattered(part, target, box, dtype)


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """A tensor's bytes, where they lie in this process's memory row by row; else None."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return None
    if tensor.dtype is torch.float32:  # the usual case, in half the time
        return tensor.numpy().data.cast("B")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Scattered:
    """A use: a part whose elements don't follow each other in the target, or are of another type or device there."""

    def __init__(self, part: Part, target: torch.Tensor, box: Box, dtype: torch.dtype) -> None:
        self.start, self.stop = part.start, part.stop
        self._part, self._target, self._box, self._dtype = part, target, box, dtype

    def memory(self, start: int, stop: int) -> memoryview | None:
        """Nowhere straight."""
        return None

    def take(self, start: int, data: memoryview) -> None:
        """Copy the elements to where they belong."""
        itemsize = self._part.itemsize
        first, odd = divmod(start - self._part.offset, itemsize)
        if odd or len(data) % itemsize:
            raise Damaged("holds tensors of different types that overlap")
        elements = torch.frombuffer(data, dtype=self._dtype)
        for number, block in blocks(self._part.block, first, first + len(elements)):
            common = block.common(self._box)
            if common is not None:
                source = elements[number - first : number - first + block.numel].view(block.shape)
                _within(self._target, common, self._box).copy_(_within(source, common, block))


def _within(tensor: torch.Tensor, inner: Box, outer: Box) -> torch.Tensor:
    """The part of a tensor that holds an inner block, for a tensor that holds the outer one."""
    for dim, (first, extent, base) in enumerate(zip(inner.offset, inner.shape, outer.offset, strict=True)):
        tensor = tensor.narrow(dim, first - base, extent)
    return tensor


def is_fillable(tensor: Any, shape: tuple[int, ...]) -> bool:
    """Whether a tensor's own memory can take elements: a plain one of that shape, each element with a place."""
    if type(tensor) not in _PLAIN or tensor.shape != shape or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if tensor.is_nested or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
        return False
    return tensor.is_contiguous() or not any(
        stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
    )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def extent_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Device and range of addresses of a tensor's elements, to tell whether two tensors overlap."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return tensor.device.type, first, first + tensor.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device.type, first, first + (last + 1) * tensor.element_size()
