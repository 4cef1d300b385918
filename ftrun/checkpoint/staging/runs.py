"""Runs of memory, thousands of them side by side in arrays: moved, and looked at again, without an object for each."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ftrun.checkpoint.staging.moves import SLICE, memcmp, move_all

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = 2
"""Words of 8 bytes of each tensor that are looked at twice: a write to all of it changes them. Each costs a cache miss
of its own, which training waits for; so they are few, and others at each save."""

_GOLDEN = 0.6180339887498949
"""By which they move on, so that they come by everywhere soon."""

_Memory = ctypes.c_uint64 * 2**44
_Bytes = ctypes.c_uint8 * 2**47
_FEW = np.arange(8, dtype=np.uint64)


class Picked(Sequence[str]):
    """Some of many names, looked up when they are asked for: mostly they never are.

    Args:
        names: all.
        numbers: which of them.
    """

    def __init__(self, names: Sequence[str], numbers: Any) -> None:
        self._names, self._numbers = names, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Picked: ...
    def __getitem__(self, at: int | slice) -> str | Picked:
        return Picked(self._names, self._numbers[at]) if isinstance(at, slice) else self._names[self._numbers[at]]


class Runs:
    """Runs of bytes to be moved, none of much more than a slice.

    Args:
        names: of the tensors that they belong to.
        targets: addresses to move them to.
        sources: their addresses.
        sizes: their sizes.
        groups: of them, see :func:`grouped`, where that is known.
    """

    def __init__(
        self, names: Sequence[str], targets: Any, sources: Any, sizes: Any, groups: Sequence[slice] | None = None
    ) -> None:
        self._names = names
        self._targets, self._sources, self._sizes = targets, sources, sizes
        self._groups = groups

    def tasks(self) -> list[Callable[[], None]]:
        """Work worth passing to another thread, none of much more than a slice."""
        groups = grouped(self._sizes) if self._groups is None else self._groups
        return [partial(self._move, group) for group in groups]

    def changed(self) -> set[str]:
        """Names of those of which source and copy differ."""
        found = enumerate(zip(*self._lists(slice(None)), strict=True))
        return {self._names[number] for number, (target, source, size) in found if memcmp(target, source, size) != 0}

    def changed_somewhere(self, turn: int) -> set[str]:
        """Names of those of which a few bytes differ in source and copy, others at each save.

        Whoever gives tensors other values for a while, past torch's counters, and theirs again by now, has been copied
        with those: so it shows in spite of all that is as it was.

        Args:
            turn: number of the save.
        """
        which = np.flatnonzero(self._sizes >= len(_FEW))
        if not len(which):
            return set()
        steps = (np.arange(_WORDS)[None, :] / _WORDS + turn * _GOLDEN) % 1.0
        within = ((self._sizes[which] - len(_FEW))[:, None] * steps).astype(np.uint64)[:, :, None] + _FEW
        sources, targets = self._sources[which], self._targets[which]
        base = min(int(sources.min()), int(targets.min()))
        memory = np.ctypeslib.as_array(_Bytes.from_address(base))
        live, copied = (memory.take(_within(each, within, base)) for each in (sources, targets))
        return {self._names[number] for number in which[(live != copied).any(axis=(1, 2))].tolist()}

    def _move(self, part: slice) -> None:
        move_all(*self._lists(part))

    def _lists(self, part: slice) -> tuple[list[int], list[int], list[int]]:
        return self._targets[part].tolist(), self._sources[part].tolist(), self._sizes[part].tolist()


def _within(addresses: Any, within: Any, base: int) -> Any:
    """Places of bytes of runs that begin at these addresses, counted from another one."""
    return (addresses[:, None, None] + within - np.uint64(base)).astype(np.int64)


def grouped(sizes: Any) -> list[slice]:
    """Groups of runs that are worth passing to another thread, none of much more than a slice."""
    if not len(sizes):
        return []
    ends = np.cumsum(sizes)
    slices = (ends - sizes) // SLICE  # by where a run begins
    bounds = [0, *(np.flatnonzero(np.diff(slices)) + 1).tolist(), len(ends)]
    return [slice(*bound) for bound in itertools.pairwise(bounds)]


class Words:
    """Some words of some runs as they are now, to be looked at again. The memory stays alive meanwhile.

    Args:
        names: of the tensors that they belong to.
        starts: their addresses.
        sizes: their sizes, each more than two words.
        turn: number of the save.
    """

    def __init__(self, names: Sequence[str], starts: Any, sizes: Any, turn: int) -> None:
        self._names = names
        base = int(starts.min()) // 8 * 8 if len(starts) else 8
        first = (starts + 7) // 8
        last = (starts + sizes) // 8 - 1
        steps = (np.arange(_WORDS)[None, :] / _WORDS + turn * _GOLDEN) % 1.0
        within = ((last - first + 1)[:, None] * steps).astype(np.uint64)
        self._places = (first[:, None] + within - base // 8).astype(np.int64)
        # All memory from there on as an array, of which no other words are read.
        self._memory = np.ctypeslib.as_array(_Memory.from_address(base))
        self._then = self._memory.take(self._places)

    def changed(self) -> set[str]:
        """Names of those that are not the same any more."""
        differ = (self._memory.take(self._places) != self._then).any(axis=1)
        return {self._names[number] for number in np.flatnonzero(differ).tolist()}
