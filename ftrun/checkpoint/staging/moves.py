"""Moving bytes of live tensors into a slot: pieces of work small enough to be shared, and to be waited for.

Contiguous memory is moved by address: one call for each slice, during which other threads run Python. torch's own
``copy_`` would start threads of its own beside the training step.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ftrun.checkpoint.memory.slot_memory import SlotMemory
    from ftrun.checkpoint.plan.planner import Copy

SLICE = 2 * 2**20
"""Bytes that are moved at a time: as long as a thread at the fence may have to wait for the other one."""
SMALL = 16 * 2**10
"""Tensors up to this size are moved at once: passing them to another thread costs more."""
LARGE = 2**20
"""Bytes from which a part of a tensor is a probe of it."""
DEVICE_SLICE = 16 * 2**20
"""The same on a device, where each copy costs more to begin."""
PROBES = 256
"""Of everything that is moved later, one part in so many is moved at once too, and compared at the end."""
PARTS = 64
"""The same of what isn't contiguous, or on a device, where each part costs more."""

_HEAD = 1024
_END = 512
"""Bytes at both ends of what was moved later that are compared with the copy."""
_STEP = 512 * 2**10
"""Bytes of one call. glibc's memmove has the processor copy up to about the size of its cache of level 2 by itself
(``rep movsb``), which doesn't fetch the lines that it overwrites; beyond that it does. A tenth of the time here."""

memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move(target: int, source: int, size: int) -> None:
    """Move bytes from one address to another. Other threads run Python meanwhile."""
    if size <= _STEP:
        ctypes.memmove(target, source, size)
        return
    for at in range(0, size, _STEP):
        ctypes.memmove(target + at, source + at, min(_STEP, size - at))


def move_all(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """:func:`move`, many times."""
    if max(sizes) <= _STEP:
        deque(map(ctypes.memmove, targets, sources, sizes), maxlen=0)  # in half the time of a loop
        return
    for target, source, size in zip(targets, sources, sizes, strict=True):
        move(target, source, size)


class Move(Protocol):
    """One movement of bytes.

    Attributes:
        name: of the tensor that they belong to.
        size: number of bytes.
    """

    name: str
    size: int

    def run(self) -> None:
        """Copy."""

    def is_same(self) -> bool:
        """Whether source and copy are equal, byte for byte."""


class Block:
    """Contiguous bytes."""

    __slots__ = ("name", "size", "source", "target")

    def __init__(self, name: str, target: int, source: int, size: int) -> None:
        self.name = name
        self.target = target
        self.source = source
        self.size = size

    def part(self, start: int, stop: int) -> Block:
        """Some of the bytes."""
        return Block(self.name, self.target + start, self.source + start, stop - start)

    def run(self) -> None:
        """Copy."""
        move(self.target, self.source, self.size)

    def is_same(self) -> bool:
        """Whether source and copy are equal."""
        return bool(memcmp(self.target, self.source, self.size) == 0)

    def is_same_at_ends(self) -> bool:
        """Whether source and copy are equal in the first bytes, and in the last ones."""
        size = min(self.size, _END)
        return self.part(0, size).is_same() and self.part(self.size - size, self.size).is_same()


class Strided:
    """Rows of a tensor that doesn't lie in memory in the order of its elements."""

    __slots__ = ("name", "size", "source", "target")

    def __init__(self, name: str, target: np.ndarray, source: np.ndarray) -> None:
        self.name = name
        self.target = target
        self.source = source
        self.size = target.nbytes

    def run(self) -> None:
        """Copy."""
        np.copyto(self.target, self.source, casting="no")

    def is_same(self) -> bool:
        """Whether source and copy are equal."""
        return np.array_equal(self.target, self.source)


class Whole:
    """A tensor that only torch can read: on a device, or with its conjugation pending."""

    __slots__ = ("name", "size", "source", "target")

    def __init__(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        self.name = name
        self.target = target
        self.source = source
        self.size = target.nbytes

    def run(self) -> None:
        """Copy."""
        self.target.copy_(self.source)

    def is_same(self) -> bool:
        """Whether source and copy are equal."""
        again = self.source.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        return torch.equal(again.reshape(-1).view(torch.uint8), self.target.reshape(-1).view(torch.uint8))


def moves(copy: Copy, memory: SlotMemory) -> list[Move]:
    """All of a tensor, in slices."""
    tensor, name, offset = copy.tensor, copy.name, copy.piece.offset
    size = tensor.nbytes
    if not is_plain(tensor):
        return list(_whole(copy, memory)) if size else []
    if not tensor.is_contiguous():
        return list(_strided(copy, memory, -(-size // SLICE)))
    source, target = tensor.data_ptr(), memory.address + offset
    if size <= SLICE:
        return [Block(name, target, source, size)] if size else []
    return [Block(name, target + at, source + at, min(SLICE, size - at)) for at in range(0, size, SLICE)]


def split(move: Move, number: int, turn: int) -> tuple[list[Move], list[Move]]:
    """What to move at once to know later whether the source changed meanwhile, and what is left.

    Over :data:`PROBES` saves, or :data:`PARTS`, every byte is moved at once in one of them. In each save a part of
    every tensor is, so that what changes a tensor as a whole is seen at once.

    Args:
        move: a movement.
        number: its number among all, the same in each save.
        turn: number of the save.
    """
    if isinstance(move, Block) and move.size >= LARGE:
        part = move.size // PROBES
        first = part * (turn % PROBES)
        last = move.size if turn % PROBES == PROBES - 1 else first + part
        rest = [move.part(0, first), move.part(last, move.size)]
        return [move.part(first, last)], [each for each in rest if each.size]
    if (number + turn) % (PROBES if isinstance(move, Block) else PARTS) == 0:
        return [move], []
    if isinstance(move, Block) and move.size > _HEAD:
        return [move.part(0, _HEAD)], [move.part(_HEAD, move.size)]
    return [], [move]


def batches(all_moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Movements in groups that are worth taking a lock for, none of much more than a slice."""
    batch: list[Move] = []
    size = 0
    for move in all_moves:
        if batch and size + move.size > SLICE:
            yield batch
            batch, size = [], 0
        batch.append(move)
        size += move.size
    if batch:
        yield batch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be read where they lie."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def _whole(copy: Copy, memory: SlotMemory) -> Iterator[Move]:
    tensor = copy.tensor
    target = memory.tensor(tensor.dtype, copy.piece.offset, tuple(tensor.shape))
    if tensor.nbytes <= DEVICE_SLICE or not tensor.is_contiguous():
        yield Whole(copy.name, target, tensor)
        return
    step = DEVICE_SLICE // tensor.dtype.itemsize
    for part, source in zip(torch.split(target.view(-1), step), torch.split(tensor.view(-1), step), strict=True):
        yield Whole(copy.name, part, source)


def _strided(copy: Copy, memory: SlotMemory, least: int) -> Iterator[Move]:
    tensor = copy.tensor
    source = _words(tensor)
    target = _words(memory.tensor(tensor.dtype, copy.piece.offset, tuple(tensor.shape)))
    parts = max(1, min(len(source), max(least, PARTS)))
    for part in range(parts):
        rows = slice(len(source) * part // parts, len(source) * (part + 1) // parts)
        yield Strided(copy.name, target[rows], source[rows])


def _words(tensor: torch.Tensor) -> np.ndarray:
    """Its memory as integers, in its own order: any type, and equal only where all bits are."""
    if tensor.dtype.itemsize > 8:  # complex128
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.dtype.itemsize]).numpy()
