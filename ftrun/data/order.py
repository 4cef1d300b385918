"""The order of samples in an epoch, by a versioned name, and each rank's share of every step in it.

===================  =======================================================================================
``feistel6-v1``      a pseudo-random order that costs the same for any number of samples (``shuffle=True``)
``none``             the dataset's own
``torch-v1``         ``torch.randperm`` seeded with seed + epoch: what ``DistributedSampler`` makes
``block-v1:KxM``     blocks of K neighbours in a shuffled order, then shuffled within M blocks at a time
``sampler-v1``       what a sampler of the user's lists, see :mod:`ftrun.data.listed`
``batches-v1``       what a batch sampler of the user's lists, see :mod:`ftrun.data.listed`
===================  =======================================================================================

A checkpoint stores the name: a change to what a name computes needs a new name. Nothing here imports torch, unless
the order's name says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ftrun.data.blocks import BlockOrder
from ftrun.data.feistel import FEISTEL, Permutation, places_between
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ftrun.data.position import Position, Recipe

NONE = "none"
TORCH = "torch-v1"
BLOCK = "block-v1:"
SAMPLER = "sampler-v1"
BATCHES = "batches-v1"

# Enough indices at a time that NumPy's cost per call doesn't count, few enough that the first batch doesn't wait.
_BLOCK = 16_384


class Order(Protocol):
    """An order of the samples of one epoch."""

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """Dataset indices at the places ``range(start, stop, step)``; int64, one-dimensional.

        Raises:
            IndexError: there are no such places.
        """
        ...

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Dataset indices at any places of the order; int64, one-dimensional."""
        ...

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The inverse: at which places dataset indices come; int64, one-dimensional."""
        ...


@dataclass(frozen=True)
class Identity:
    """The dataset's own order, in every epoch."""

    n: int

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """See :meth:`Order.take`."""
        return places_between(self.n, start, stop, step)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :meth:`Order.at`."""
        return places

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :meth:`Order.places`."""
        return indices


class Ticket(NamedTuple):
    """One rank's share of one step: what the loader asks a worker to fetch.

    Attributes:
        epoch: from 0.
        indices: dataset indices.
        padding: how many of them, at the end, are repeats that fill the batch.
        after: the position when all ranks have consumed this step; None where the recipe says it.
    """

    epoch: int
    indices: list[int]
    padding: int = 0
    after: Position | None = None


class Share(NamedTuple):
    """Which part of each global batch a rank takes: every ``world_size``-th sample, from its ``rank``-th."""

    rank: int
    world_size: int


def order_of(recipe: Recipe, epoch: int) -> Order:
    """The order of one epoch, by the name in the recipe.

    Raises:
        UsageError: this version knows no such name, or only the sampler of the training script can say the order.
    """
    assert recipe.n is not None
    if recipe.order == FEISTEL:
        return Permutation(recipe.n, recipe.seed, epoch)
    if recipe.order == NONE:
        return Identity(recipe.n)
    if recipe.order == TORCH:
        from ftrun.data.torch_order import torch_order  # it imports torch

        return torch_order(recipe.n, recipe.seed, epoch)
    if recipe.order.startswith(BLOCK):
        size, window = recipe.order.removeprefix(BLOCK).split("x")
        return BlockOrder(recipe.n, recipe.seed, epoch, size=int(size), window=int(window))
    raise UsageError(f"the order {recipe.order!r} can't be computed here: it is not one of this version's names")


def tickets(recipe: Recipe, share: Share, start: Position, order: Order | None = None) -> Iterator[Ticket]:
    """One rank's batches from a position to the end of that epoch.

    All ranks' tickets of one step together are the next ``global_batch`` places of the order, for any world size.

    Args:
        recipe: of a dataset whose length is known.
        share: which part of each step; a global batch that the world size doesn't divide gives shares that differ by
            one sample.
        start: a multiple of the global batch.
        order: of that epoch, where the recipe's name doesn't say it.
    """
    order = order or order_of(recipe, start.epoch)
    assert recipe.n is not None
    size = recipe.global_batch
    offsets = np.arange(share.rank, size, share.world_size, dtype=np.int64)
    whole = recipe.n - recipe.n % size
    stretch = size * max(1, _BLOCK // max(1, len(offsets)))
    for begin in range(start.samples, whole, stretch):
        begins = np.arange(begin, min(begin + stretch, whole), size, dtype=np.int64)
        places = begins[:, np.newaxis] + offsets
        rows: Any = order.at(places.ravel()).reshape(places.shape).tolist()
        for row in rows:
            yield Ticket(start.epoch, row)
    if recipe.usable != whole:
        yield _tail(recipe, share, start.epoch, order)


def _tail(recipe: Recipe, share: Share, epoch: int, order: Order) -> Ticket:
    # A rank for which nothing is left repeats one sample: it takes part in the step, as the others wait for it.
    assert recipe.n is not None
    n, whole = recipe.n, recipe.n - recipe.n % recipe.global_batch
    end = whole + recipe.global_batch if recipe.tail == "pad" else max(n, whole + share.rank + 1)
    places = np.arange(whole + share.rank, end, share.world_size, dtype=np.int64)
    return Ticket(epoch, order.at(places % n).tolist(), int((places >= n).sum()))
