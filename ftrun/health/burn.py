"""A load on every processor and on memory, with results that are known to the last bit.

Factors are small whole numbers, so their products are exact in whatever order they are added, and a wrong bit shows.
numpy lets go of the interpreter's lock in both calls that take time, so one process loads all processors.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Multiply = Callable[[Matrix, Matrix, Matrix], Any]

SIDE = 512
"""Rows and columns: some milliseconds of work, much longer than what the interpreter's lock is held for."""
MEMORY_BYTES = 16 << 20
"""Memory for each processor, which holds a pattern while the load is on."""


@dataclass(frozen=True)
class Load:
    """How a load went.

    Attributes:
        name: of what was loaded.
        trouble: what was wrong; empty for nothing.
        detail: what was done, in words.
    """

    name: str
    trouble: str
    detail: str


def processors(seconds: float, cores: Sequence[int] = (), multiply: Multiply | None = None) -> Load:
    """Load processors and compare.

    Args:
        seconds: for how long.
        cores: numbers of the processors; empty for all that this process may use.
        multiply: puts the product of the first two matrices into the third; numpy's without it.
    """
    cores = cores or sorted(os.sched_getaffinity(0))
    factors = _factors()
    deadline = time.monotonic() + seconds
    workers = [_Core(core, factors, multiply or np.matmul, deadline) for core in cores]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    troubles = [f"processor {each.core}: {each.trouble}" for each in workers if each.trouble]
    more = f" and {len(troubles) - 3} more" if len(troubles) > 3 else ""
    products = sum(each.products for each in workers)
    detail = f"{len(cores)} processors, {products:,} products, {len(cores) * MEMORY_BYTES >> 20} MiB of memory"
    return Load("processors and memory", "; ".join(troubles[:3]) + more, detail)


def _factors() -> tuple[Matrix, Matrix, Matrix]:
    """Two matrices and their product, which whole numbers have made."""
    random = np.random.default_rng(17)
    left, right = (random.integers(-8, 9, (SIDE, SIDE), dtype=np.int64) for _ in range(2))
    # numpy multiplies whole numbers without the library that is under test here.
    product = left @ right
    return left.astype(np.float64), right.astype(np.float64), product.astype(np.float64)


class _Core(threading.Thread):
    """The load on one processor."""

    def __init__(self, core: int, factors: tuple[Matrix, Matrix, Matrix], multiply: Multiply, deadline: float) -> None:
        super().__init__(name=f"burn-{core}", daemon=True)
        self.core = core
        self.products = 0
        self.trouble = ""
        self._factors = factors
        self._multiply = multiply
        self._deadline = deadline

    def run(self) -> None:
        """Fill memory, multiply until it is time, and see whether the memory still holds what it did."""
        try:
            os.sched_setaffinity(0, {self.core})  # of this thread alone
        except OSError as error:
            self.trouble = f"can't be used ({error.strerror})"
            return
        pattern = np.random.default_rng(self.core).bytes(MEMORY_BYTES)
        before = crc32c.crc32c(pattern)
        held = bytearray(pattern)
        self._burn()
        if not self.trouble and crc32c.crc32c(held) != before:
            self.trouble = "memory changed under load (CRC32C)"

    def _burn(self) -> None:
        left, right, expected = self._factors
        product = np.empty_like(expected)
        while time.monotonic() < self._deadline or not self.products:
            self._multiply(left, right, product)
            self.products += 1
            if not np.array_equal(product, expected):
                wrong = int(np.count_nonzero(product != expected))
                self.trouble = f"of {expected.size:,} numbers in product {self.products:,}, {wrong:,} wrong"
                return
            product.fill(np.nan)  # what is left over from before must not pass for a result
