"""The order of samples in an epoch, computed where it is needed and never stored.

``feistel6-v1`` is a pseudo-random permutation of ``range(n)``: any stretch of it costs time and memory for
that stretch alone, whatever ``n`` is, so resuming in the middle of an epoch costs nothing. It is a Feistel
network of six rounds (M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", SIAM J. Comput. 17(2), 1988) in the form for arbitrary domains: an index is a pair in ``Z_a x
Z_b`` with ``a * b`` just above ``n``, each round adds a keyed hash of one half to the other half, and a
result outside ``range(n)`` is put through again ("cycle walking"; both from J. Black, P. Rogaway, "Ciphers
with arbitrary finite domains", CT-RSA 2002). The hash is the output function of SplitMix64 (G. Steele, D.
Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

The name is stored in checkpoints: a change to what a name computes needs a new name.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ftrun.data.position import Position, Recipe

FEISTEL = "feistel6-v1"
NONE = "none"

_ROUNDS = 6
# Enough indices at a time that NumPy's cost per call doesn't count, few enough that the first batch doesn't
# wait.
_BLOCK = 16_384


class Order(Protocol):
    """An order of the samples of one epoch."""

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """Dataset indices at the places ``range(start, stop, step)``; int64, one-dimensional."""
        ...


@dataclass(frozen=True)
class Identity:
    """The dataset's own order, in every epoch."""

    n: int

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """See :meth:`Order.take`.

        Raises:
            IndexError: places outside ``range(n)``.
        """
        return _places(self.n, start, stop, step)


class Permutation:
    """A pseudo-random order that depends on ``(n, seed, epoch)`` alone, on every machine.

    Args:
        n: number of samples, at least 1.
        seed: any integer.
        epoch: from 0; each epoch has an order of its own.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = _round_keys(seed, epoch)

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """See :meth:`Order.take`.

        Raises:
            IndexError: places outside ``range(n)``.
        """
        values = self._encipher(_places(self.n, start, stop, step).astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            values[outside] = self._encipher(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = values // b
        right = values - left * b
        for key in self._keys.reshape(-1, 2):
            left = _added(left, _hash(right, key[0]), a)
            right = _added(right, _hash(left, key[1]), b)
        return left * b + right


class Ticket(NamedTuple):
    """One rank's share of one global batch: what the loader asks a worker to fetch."""

    epoch: int
    indices: list[int]


class Share(NamedTuple):
    """Which part of each global batch a rank takes: every ``world_size``-th sample, from its ``rank``-th."""

    rank: int
    world_size: int


def order_of(recipe: Recipe, epoch: int) -> Order:
    """The order of one epoch, by the name in the recipe."""
    return Permutation(recipe.n, recipe.seed, epoch) if recipe.order == FEISTEL else Identity(recipe.n)


def tickets(recipe: Recipe, share: Share, start: Position) -> Iterator[Ticket]:
    """One rank's batches from a position to the end of that epoch.

    All ranks' tickets of one step together are ``global_batch`` places of the order in a row, for any world
    size. The global batch is a multiple of the world size.
    """
    order = order_of(recipe, start.epoch)
    size = recipe.global_batch // share.world_size
    block = recipe.global_batch * max(1, _BLOCK // size)
    for begin in range(start.samples, recipe.usable, block):
        end = min(begin + block, recipe.usable)
        indices = order.take(begin + share.rank, end, share.world_size)
        for row in indices.reshape(-1, size).tolist():
            yield Ticket(start.epoch, row)


def _places(n: int, start: int, stop: int, step: int) -> NDArray[np.int64]:
    if not (start >= 0 and stop <= n and step >= 1):
        raise IndexError(f"places {start}:{stop}:{step} are not in an order of {n} samples")
    return np.arange(start, stop, step, dtype=np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{FEISTEL}/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _added(half: NDArray[np.uint64], mixed: NDArray[np.uint64], size: np.uint64) -> NDArray[np.uint64]:
    # Modulo size, below 2**32, without a division: the upper half of a hash, as a fraction of size.
    total = half + ((mixed >> np.uint64(32)) * size >> np.uint64(32))
    return np.minimum(total, total - size)  # where total < size the difference wraps around to a large number


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
