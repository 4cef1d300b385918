"""Who stores which part of what several ranks hold alike. Pure, and without torch.

All ranks compute it for themselves from what all of them know, so nothing here may depend on anything else.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMALL = 64 * 2**10
"""Bytes below which a tensor is stored whole by one rank."""

GRANULE = 4096
"""Bytes of whose multiples the parts of a larger tensor consist."""


@dataclass(frozen=True)
class Described:
    """What a rank says of a tensor that others may hold too.

    Attributes:
        name: of the tensor in the rank's tree.
        dtype: ``float32``.
        shape: its shape.
        contiguous: whether a part of it can be cut out.
        known: ranks that are known to hold the same, as :func:`ranks_text` writes them; empty where nothing is known.
        digest: of its content; of samples of it where ``known`` says something.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    known: str
    digest: str


@dataclass(frozen=True)
class Item:
    """A tensor, or a block of one, to be shared out.

    Attributes:
        numel: number of its elements.
        itemsize: bytes of each.
        splittable: whether a part of it can be cut out.
    """

    numel: int
    itemsize: int
    splittable: bool

    @property
    def size(self) -> int:
        """In bytes."""
        return self.numel * self.itemsize

    @property
    def is_solid(self) -> bool:
        """Whether one rank stores all of it."""
        return not self.splittable or self.size < SMALL


@dataclass(frozen=True)
class Share:
    """A run of an item's elements.

    Attributes:
        item: number of the item.
        start: first element.
        stop: first element behind.
    """

    item: int
    start: int
    stop: int


def agree(
    said: Mapping[tuple[int, ...], Sequence[Described]],
) -> dict[tuple[int, ...], dict[tuple[int, ...], list[int]]]:
    """Which ranks hold the same.

    Args:
        said: for each set of ranks that say the same, what they say.

    Returns:
        For each of those sets, the groups that its ranks are in, each with the numbers of the tensors, within what
        the set says, that the group's ranks hold alike. A tensor that nobody else holds is in no group.
    """
    holders: dict[Described, list[int]] = defaultdict(list)
    for ranks, tensors in said.items():
        for tensor in tensors:
            holders[tensor] += ranks
    groups = {tensor: tuple(sorted(ranks)) for tensor, ranks in holders.items()}
    found: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for ranks, tensors in said.items():
        numbers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            if len(groups[tensor]) > 1:
                numbers[groups[tensor]].append(number)
        found[ranks] = dict(numbers)
    return found


def divide(items: Sequence[Item], members: int) -> list[list[Share]]:
    """Share items out so that each member stores about as many bytes.

    What one member must store whole goes, the largest first, to whom has least; what can be cut is laid end to end
    and cut where it levels the members out. So a member has at most two parts of tensors, and else whole ones.

    Args:
        items: in an order that all members know; each with elements.
        members: number of members.

    Returns:
        For each member its shares, in the order of the items. They cover every element once.
    """
    shares: list[list[Share]] = [[] for _ in range(members)]
    loads = [0] * members
    solid = [number for number, item in enumerate(items) if item.is_solid]
    least = [(0, member) for member in range(members)]
    for number in sorted(solid, key=lambda each: (-items[each].size, each)):
        load, member = heapq.heappop(least)
        shares[member].append(Share(number, 0, items[number].numel))
        loads[member] = load + items[number].size
        heapq.heappush(least, (loads[member], member))
    loose = [number for number, item in enumerate(items) if not item.is_solid]
    for member, cut in enumerate(_cut(items, loose, _room(loads, sum(items[each].size for each in loose)))):
        shares[member] += cut
    return [sorted(each, key=lambda share: share.item) for each in shares]


def _room(loads: Sequence[int], total: int) -> list[int]:
    """Bytes for each member, ``total`` in all, that make their loads as level as can be."""
    level, below = 0, 0
    for count, load in enumerate(sorted(loads), start=1):
        below += load
        level = -(-(total + below) // count)
        if count == len(loads) or level <= sorted(loads)[count]:
            break
    return [max(0, level - load) for load in loads]


def _cut(items: Sequence[Item], order: Sequence[int], room: Sequence[int]) -> list[list[Share]]:
    ends = list(itertools.accumulate(items[each].size for each in order))
    cuts = [(0, 0)]
    number = 0
    for bound in itertools.accumulate(room[:-1]):
        while number < len(order) and ends[number] <= bound:
            number += 1
        cuts.append((number, _element(items[order[number]], bound, ends[number]) if number < len(order) else 0))
    cuts.append((len(order), 0))
    return [list(_between(items, order, *pair)) for pair in itertools.pairwise(cuts)]


def _element(item: Item, bound: int, end: int) -> int:
    """The element of an item, at a multiple of the granule, that is nearest to a byte of all items laid end to end."""
    granule = max(1, GRANULE // item.itemsize)
    return min(item.numel, round((bound - (end - item.size)) / item.itemsize / granule) * granule)


def _between(items: Sequence[Item], order: Sequence[int], first: tuple[int, int], last: tuple[int, int]) -> list[Share]:
    shares = []
    for number in range(first[0], min(last[0] + 1, len(order))):
        start = first[1] if number == first[0] else 0
        stop = last[1] if number == last[0] else items[order[number]].numel
        if start < stop:
            shares.append(Share(order[number], start, stop))
    return shares
