"""``torch-v1``: the order that ``torch.utils.data.DistributedSampler`` makes, for runs that began with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ftrun.data.feistel import places_between

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ListedOrder:
    """An order that is held in memory: 8 bytes a sample.

    Args:
        indices: int64, one-dimensional; the same index may come several times.
    """

    def __init__(self, indices: NDArray[np.int64]) -> None:
        self._indices = indices
        self._sorted: NDArray[np.int64] | None = None

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """See :meth:`ftrun.data.order.Order.take`."""
        return self.at(places_between(len(self._indices), start, stop, step))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :meth:`ftrun.data.order.Order.at`."""
        return self._indices[places]

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :meth:`ftrun.data.order.Order.places`: the first place of an index, -1 for one that doesn't come."""
        if self._sorted is None:
            self._sorted = np.argsort(self._indices, kind="stable")
        at = np.searchsorted(self._indices, indices, sorter=self._sorted)
        found = self._sorted[np.minimum(at, len(self._sorted) - 1)]
        return np.where(self._indices[found] == indices, found, -1)


def torch_order(n: int, seed: int, epoch: int) -> ListedOrder:
    """``torch.randperm`` of a generator seeded with ``seed + epoch``.

    Step k of W ranks takes ``global_batch`` places from the k-th on, and rank r every W-th of them: each rank gets
    what its ``DistributedSampler(shuffle=True)`` lists, but for the repeats that one adds at the end.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    return ListedOrder(torch.randperm(n, generator=generator).numpy())
