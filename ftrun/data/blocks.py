"""``block-v1:KxM``: a shuffled order that stays within a few neighbourhoods at a time, so that shards stay hot.

The dataset is cut into blocks of K neighbours (the samples of one file, say). The blocks come in the order of a
permutation, M of them make a window, and within a window the samples are shuffled. M blocks are in use at a time, two
windows' worth at their edge. Like the permutation behind it, it is computed and never stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftrun.data.feistel import Network, derived_keys, places_between, round_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Places = NDArray[np.int64]

_NAME = "block-v1"


class BlockOrder:
    """The order that depends on ``(n, seed, epoch, size, window)`` alone.

    Args:
        n: number of samples, at least 1.
        seed: any integer.
        epoch: from 0.
        size: samples in a block; the dataset's last block may have less.
        window: blocks that are mixed.
    """

    def __init__(self, n: int, seed: int, epoch: int, *, size: int, window: int) -> None:
        self.n = n
        self._size = size
        self._window = window
        self._num_blocks = -(-n // size)
        self._missing = self._num_blocks * size - n  # in the dataset's last block
        self._blocks = Network(self._num_blocks, round_keys(f"{_NAME}/blocks/{seed}/{epoch}"))
        self._keys = round_keys(f"{_NAME}/samples/{seed}/{epoch}")
        # Where the last block comes among the blocks. Beyond its window, and beyond itself within that, everything
        # lies as if it were whole.
        last = np.array([self._num_blocks - 1], dtype=np.uint64)
        self._last = int(self._blocks.decipher(last)[0])

    def take(self, start: int, stop: int, step: int = 1) -> Places:
        """See :meth:`ftrun.data.order.Order.take`."""
        return self.at(places_between(self.n, start, stop, step))

    def at(self, places: Places) -> Places:
        """See :meth:`ftrun.data.order.Order.at`."""
        span = self._size * self._window
        short, first = self._last // self._window, self._last // self._window * span
        beyond = places >= first + self._length_of(short)
        whole = places + self._missing * beyond
        windows = whole // span
        inside = self._shuffled(windows, whole - windows * span, back=False)
        gap = (self._last - short * self._window + 1) * self._size - self._missing
        inside = inside + self._missing * ((windows == short) & (inside >= gap))
        slots = inside // self._size
        blocks = self._blocks.encipher((windows * self._window + slots).astype(np.uint64)).astype(np.int64)
        indices: Places = blocks * self._size + inside - slots * self._size
        return indices

    def places(self, indices: Places) -> Places:
        """See :meth:`ftrun.data.order.Order.places`."""
        span = self._size * self._window
        short = self._last // self._window
        blocks = indices // self._size
        slots = self._blocks.decipher(blocks.astype(np.uint64)).astype(np.int64)
        windows = slots // self._window
        inside = (slots - windows * self._window) * self._size + indices - blocks * self._size
        inside = inside - self._missing * ((windows == short) & (slots > self._last))
        return windows * span + self._shuffled(windows, inside, back=True) - self._missing * (windows > short)

    def _shuffled(self, windows: Places, inside: Places, *, back: bool) -> Places:
        # Windows of one length at a time: all whole ones, the one with the short block, and the last one.
        result = np.empty_like(inside)
        odd = {self._last // self._window, (self._num_blocks - 1) // self._window}
        groups = [(windows == number, self._length_of(number)) for number in sorted(odd)]
        groups.append((~np.isin(windows, list(odd)), self._size * self._window))
        for chosen, length in groups:
            if chosen.any():
                network = Network(length, derived_keys(self._keys, windows[chosen].astype(np.uint64)))
                permute = network.decipher if back else network.encipher
                result[chosen] = permute(inside[chosen].astype(np.uint64)).astype(np.int64)
        return result

    def _length_of(self, window: int) -> int:
        blocks = min(self._window, self._num_blocks - window * self._window)
        return blocks * self._size - (self._missing if window == self._last // self._window else 0)
