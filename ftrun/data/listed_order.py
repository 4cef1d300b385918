"""An order that is written down, place by place. It imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftrun.data.feistel import places_between

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ListedOrder:
    """An order that lies in memory or in a mapped file: 8 bytes a sample.

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
