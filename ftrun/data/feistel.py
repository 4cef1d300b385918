"""``feistel6-v1``: a pseudo-random permutation of ``range(n)`` that is computed where it is needed and never stored.

Any stretch of it costs time and memory for that stretch alone, whatever ``n`` is, so resuming in the middle of an
epoch costs nothing, and the inverse costs the same. It is a Feistel network of six rounds (M. Luby, C. Rackoff, "How
to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17(2), 1988) in the form for
arbitrary domains: an index is a pair in ``Z_a x Z_b`` with ``a * b`` just above ``n``, each round adds a keyed hash
of one half to the other half, and a result outside ``range(n)`` is put through again ("cycle walking"; both from J.
Black, P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The hash is the output function of
SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

The name is stored in checkpoints: a change to what a name computes needs a new name.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

FEISTEL = "feistel6-v1"

_ROUNDS = 6


class Permutation:
    """A pseudo-random order that depends on ``(n, seed, epoch)`` alone, on every machine.

    Args:
        n: number of samples, at least 1.
        seed: any integer.
        epoch: from 0; each epoch has an order of its own.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self._network = Network(n, round_keys(f"{FEISTEL}/{seed}/{epoch}"))

    def take(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """See :meth:`ftrun.data.order.Order.take`.

        Raises:
            IndexError: places outside ``range(n)``.
        """
        return self.at(places_between(self.n, start, stop, step))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :meth:`ftrun.data.order.Order.at`."""
        return self._network.encipher(places.astype(np.uint64)).astype(np.int64)

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :meth:`ftrun.data.order.Order.places`."""
        return self._network.decipher(indices.astype(np.uint64)).astype(np.int64)


class Network:
    """The permutation behind the name, or as many of them side by side as its keys have columns.

    Args:
        n: size of the domain, at least 1.
        keys: :func:`round_keys`; for a permutation of its own for each value, of the shape ``(6, values)``.
    """

    def __init__(self, n: int, keys: Words) -> None:
        self._n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = keys

    def encipher(self, values: Words) -> Words:
        """Permute values of ``range(n)``; one-dimensional, in a new array."""
        return self._walk(values, self._forwards)

    def decipher(self, values: Words) -> Words:
        """The inverse of :meth:`encipher`."""
        return self._walk(values, self._backwards)

    def _walk(self, values: Words, once: Callable[[Words, Words], Words]) -> Words:
        values = once(values, self._keys)
        outside = np.flatnonzero(values >= self._n)
        while outside.size:
            keys = self._keys if self._keys.ndim == 1 else self._keys[:, outside]
            values[outside] = once(values[outside], keys)
            outside = outside[values[outside] >= self._n]
        return values

    def _forwards(self, values: Words, keys: Words) -> Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = values // b
        right = values - left * b
        for number in range(0, _ROUNDS, 2):
            left = _added(left, _fraction(_hash(right, keys[number]), a), a)
            right = _added(right, _fraction(_hash(left, keys[number + 1]), b), b)
        return left * b + right

    def _backwards(self, values: Words, keys: Words) -> Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = values // b
        right = values - left * b
        for number in range(_ROUNDS - 2, -1, -2):
            right = _added(right, b - _fraction(_hash(left, keys[number + 1]), b), b)
            left = _added(left, a - _fraction(_hash(right, keys[number]), a), a)
        return left * b + right


def round_keys(name: str) -> Words:
    """The keys of the six rounds that belong to a name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def derived_keys(keys: Words, numbers: Words) -> Words:
    """Keys of a permutation of its own for each number; of the shape ``(6, numbers)``."""
    return _hash(np.broadcast_to(numbers, (_ROUNDS, len(numbers))), keys[:, np.newaxis])


def places_between(n: int, start: int, stop: int, step: int) -> NDArray[np.int64]:
    """The places ``range(start, stop, step)`` of an order of ``n`` samples.

    Raises:
        IndexError: there are no such places.
    """
    if not (start >= 0 and stop <= n and step >= 1):
        raise IndexError(f"places {start}:{stop}:{step} are not in an order of {n} samples")
    return np.arange(start, stop, step, dtype=np.int64)


def _added(half: Words, more: Words, size: np.uint64) -> Words:
    # Modulo size without a division.
    total: Words = half + more
    wrapped: Words = np.minimum(total, total - size)  # below size the difference wraps around to a large number
    return wrapped


def _fraction(mixed: Words, size: np.uint64) -> Words:
    # The upper half of a hash, as a fraction of size, which is below 2**32.
    fraction: Words = (mixed >> np.uint64(32)) * size >> np.uint64(32)
    return fraction


def _hash(values: Words, key: Words) -> Words:
    mixed: Words = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Words = mixed ^ (mixed >> np.uint64(31))
    return result
