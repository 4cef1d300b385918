"""Random numbers that belong to a sample, not to the process that happens to load it.

Before a sample is read, Python's ``random``, NumPy's legacy global generator and torch's default CPU generator are
seeded from ``(seed, epoch, index)``. Augmentation is then the same for any world size, any number of loader workers,
and after any resume.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

from ftrun.data.generators import generators, put_back, states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def sample_seed(seed: int, epoch: int, index: int, purpose: str = "sample") -> int:
    """64 bits for one sample of one epoch; another purpose gives unrelated bits."""
    return sample_seeder(seed, epoch, purpose)(index)


def sample_seeder(seed: int, epoch: int, purpose: str = "sample") -> Callable[[int], int]:
    """What gives :func:`sample_seed` for each index: faster for many of them."""
    epoch_hash = hashlib.blake2b(f"{purpose}/{seed}/{epoch}/".encode(), digest_size=8)

    def bits_of(index: int) -> int:
        sample_hash = epoch_hash.copy()
        sample_hash.update(b"%d" % index)
        return int.from_bytes(sample_hash.digest(), "little")

    return bits_of


def seed_everything(bits: int) -> None:
    """Seed the three global generators of this process by 64 bits."""
    for each in generators():
        each.seed(bits)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Put the three global generators back at the end as they were at the start, also after an exception.

    For samples that are loaded in the training process itself, whose own random streams must not notice.
    """
    before = states()
    try:
        yield
    finally:
        put_back(before)
