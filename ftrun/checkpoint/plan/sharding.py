"""Which blocks of a tensor a rank holds, from how its mesh splits it. Pure, and without torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.plan.pieces import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Run = tuple[int, int]
"""First index along a dimension, and the first one behind."""

Start = tuple[int, ...]
"""Where a block begins within the local tensor."""


@dataclass(frozen=True)
class Split:
    """How one dimension of a mesh splits a tensor.

    Attributes:
        dim: dimension of the tensor.
        count: number of parts.
        index: which part is ours.
        strided: 1 for a plain shard. Above that, the tensor is first cut into that many parts, and of each of them
            the ``index``-th of ``count`` is ours: what FSDP makes of a tensor that tensor parallelism has split before.
    """

    dim: int
    count: int
    index: int
    strided: int = 1


def boxes(shape: tuple[int, ...], local: tuple[int, ...], splits: Sequence[Split | None]) -> list[tuple[Box, Start]]:
    """The blocks of the whole tensor that the local one holds, each with its place in the local one.

    Args:
        shape: of the whole tensor.
        local: shape of the local tensor.
        splits: of the dimensions of the mesh, in their order.

    Raises:
        ValueError: splitting so doesn't make a local tensor of that shape.
    """
    known = [each for each in splits if each is not None]
    for order in _orders(known):
        runs = [_runs(extent, [each for each in order if each.dim == dim]) for dim, extent in enumerate(shape)]
        if tuple(map(_total, runs)) == local:
            return _product(runs)
    raise ValueError(f"a local part of shape {list(local)} doesn't follow from how it is split")


def _orders(splits: Sequence[Split]) -> Iterator[Sequence[Split]]:
    """The splits as the mesh has them; and as they were made, where FSDP has split what was split before.

    Where extents aren't divisible the two differ by empty parts, and the local shapes tell which one it was.
    """
    yield splits
    if any(each.strided > 1 for each in splits):
        yield [Split(each.dim, each.count, each.index) for each in reversed(splits)]


def _runs(extent: int, splits: Iterable[Split]) -> list[Run]:
    runs = [(0, extent)] if extent else []
    for each in splits:
        parts = [_part(runs, each.strided, number) for number in range(each.strided)]
        taken = itertools.chain.from_iterable(_part(part, each.count, each.index) for part in parts)
        runs = _joined(taken)
    return runs


def _part(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """One of ``count`` parts of what some runs cover: as torch cuts, all as large as the first, the last ones less."""
    size = -(-_total(runs) // count)
    first, last = size * index, size * (index + 1)
    taken, done = [], 0
    for start, stop in runs:
        begin, end = max(first - done, 0), min(last - done, stop - start)
        if begin < end:
            taken.append((start + begin, start + end))
        done += stop - start
    return taken


def _joined(runs: Iterable[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _total(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _product(runs: Sequence[Sequence[Run]]) -> list[tuple[Box, Start]]:
    placed = []
    for each in runs:
        starts = itertools.accumulate((stop - start for start, stop in each), initial=0)
        placed.append(list(zip(each, starts, strict=False)))
    found = []
    for block in itertools.product(*placed):
        box = Box(tuple(start for (start, _), _ in block), tuple(stop - start for (start, stop), _ in block))
        found.append((box, tuple(at for _, at in block)))
    return found
