"""A safetensors file that is written as a stream: its header first, and each tensor when its turn comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftrun.checkpoint.safetensors_file import Content, header
from ftrun.checkpoint.words import dtype_name, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SLICE = 4 * 2**20  # written while its checksum has left it in the processor's cache


@dataclass(frozen=True)
class Layout:
    """A file that is to be written.

    Attributes:
        header: its first bytes.
        contents: its tensors in the order of their bytes.
        offsets: byte of the file at which each begins.
        size: bytes of the whole file.
    """

    header: bytes
    contents: tuple[Content, ...]
    offsets: tuple[int, ...]
    size: int


def content(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Content:
    """A tensor that is to be written."""
    return Content(key, dtype_name(dtype), shape, math.prod(shape) * dtype.itemsize)


def lay_out(contents: Iterable[Content]) -> Layout:
    """Lay out a file. A type that the format has no word for is written as plain bytes.

    Raises:
        CheckpointError: more tensors than a header can name.
    """
    # Widest first, as the library does it: every tensor then lies at a multiple of its own element size.
    ordered = tuple(sorted(contents, key=lambda each: -dtype_of(each.dtype).itemsize))
    first = header(ordered)
    offsets, end = [], len(first)
    for each in ordered:
        offsets.append(end)
        end += each.size
    return Layout(first, ordered, tuple(offsets), end)


def slices(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, whatever its strides and device, in parts of a few MiB."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _SLICE):
        yield data[start : start + _SLICE]
