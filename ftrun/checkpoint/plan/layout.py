"""Where in a rank's file each part lies. Pure, and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint import safetensors_file
from ftrun.checkpoint.plan.pieces import Box, Piece
from ftrun.checkpoint.safetensors_file import Content

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Part:
    """What a rank stores of a tensor: a run of a block's elements.

    Attributes:
        tensor: its name.
        dtype: ``float32``.
        itemsize: bytes of an element.
        shape: of the whole tensor.
        box: the block.
        start: first element of the run within the block.
        stop: first element behind it.
    """

    tensor: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int

    @property
    def is_block(self) -> bool:
        """Whether it is all of the block."""
        return self.stop - self.start == self.box.numel


@dataclass(frozen=True)
class Layout:
    """A file.

    Attributes:
        order: numbers of the parts, as they follow each other.
        names: of their tensors, in that order.
        pieces: what lies where, in that order.
        header: what stands before them; empty for no parts, which make no file.
        size: of the file, in bytes.
    """

    order: tuple[int, ...]
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    header: bytes
    size: int


def lay_out(parts: Sequence[Part], file: str) -> Layout:
    """Put parts into a safetensors file, widest elements first: each begins at a multiple of its element's size.

    Raises:
        CheckpointError: more parts than a header can name.
    """
    if not parts:
        return Layout((), (), (), b"", 0)
    order = sorted(range(len(parts)), key=lambda each: (-parts[each].itemsize, each))
    keys = _keys([parts[each] for each in order])
    contents = [_content(parts[each], key) for each, key in zip(order, keys, strict=True)]
    header = safetensors_file.header(contents)
    pieces = []
    offset = len(header)
    for number, content in zip(order, contents, strict=True):
        part = parts[number]
        pieces.append(Piece(part.tensor, part.box, part.start, part.stop, file, offset))
        offset += content.size
    return Layout(tuple(order), tuple(parts[each].tensor for each in order), tuple(pieces), header, offset)


def _content(part: Part, key: str) -> Content:
    count = part.stop - part.start
    return Content(key, part.dtype, part.box.shape if part.is_block else (count,), count * part.itemsize)


def _keys(parts: Sequence[Part]) -> list[str]:
    """Names for other tools: what a part is, and unique, whatever tensors are called."""
    taken: set[str] = {part.tensor for part in parts if _is_whole(part)}
    keys = []
    for part in parts:
        wanted = key = _key(part)
        count = 0
        while key in taken and not _is_whole(part):
            count += 1
            key = f"{wanted}~{count}"
        taken.add(key)
        keys.append(key)
    return keys


def _is_whole(part: Part) -> bool:
    return part.is_block and part.box.shape == part.shape


def _key(part: Part) -> str:
    ranges = zip(part.box.offset, part.box.shape, strict=True)
    box = ",".join(f"{first}:{first + extent}" for first, extent in ranges) if part.box.shape != part.shape else ""
    run = "" if part.is_block else f"[{part.start}:{part.stop}]"
    return part.tensor + (f"[{box}]" if box else "") + run
