"""A user's sampler or batch sampler, made into an order that can be resumed.

It is asked for the whole list of an epoch, on every rank alike, and the loader splits it. Before that its random
numbers are settled from the seed and the epoch: ``set_epoch`` is called where there is one, its ``generator`` and the
global generators are seeded. A sampler that lists something else on resume all the same is found out by a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ftrun.data.listed_order import ListedOrder
from ftrun.data.order import Ticket
from ftrun.data.position import Position
from ftrun.data.randomness import preserved, sample_seed, seed_everything
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ftrun.data.order import Share


class Listed(NamedTuple):
    """What a sampler lists for one epoch.

    Attributes:
        indices: dataset indices; int64, one-dimensional.
        ends: of a batch sampler: where each batch ends among the indices; int64. None for a sampler.
        digest: of both.
    """

    indices: NDArray[np.int64]
    ends: NDArray[np.int64] | None
    digest: str


class Listing:
    """The lists of a sampler, by epoch; the last one is kept: 8 bytes a sample.

    Args:
        sampler: over the whole dataset, not over a rank's part of it.
        seed: of its random numbers.
        batched: whether it lists batches of indices: those of all ranks together.
    """

    def __init__(self, sampler: Any, seed: int, *, batched: bool) -> None:
        self.sampler = sampler
        self.batched = batched
        self._seed = seed
        self._epoch = -1
        self._kept: Listed | None = None
        self._expected: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """Samples, or batches, that it lists for an epoch."""
        if hasattr(self.sampler, "__len__"):
            return len(self.sampler)
        listed = self._kept or self.epoch(0)
        return len(listed.indices if listed.ends is None else listed.ends)

    def epoch(self, epoch: int) -> Listed:
        """The list of one epoch.

        Raises:
            UsageError: it lists something else than whole numbers, or nothing.
            StateMismatch: it lists something else than when the position was stored.
        """
        if self._kept is None or self._epoch != epoch:
            self._kept, self._epoch = self._made(epoch), epoch
        expected = self._expected
        if expected is not None and expected["epoch"] == epoch and expected["digest"] != self._kept.digest:
            raise StateMismatch(
                f"the {type(self.sampler).__name__} lists other samples for epoch {epoch} than when the position was "
                "stored, so the run can't continue at the exact sample. Make its list depend on set_epoch(), on its "
                "generator or on torch's global generator alone, or start over with --fresh."
            )
        return self._kept

    @property
    def state(self) -> dict[str, Any] | None:
        """What identifies the list in use: epoch and digest; None before there is one."""
        return self._expected if self._kept is None else {"epoch": self._epoch, "digest": self._kept.digest}

    def expect(self, state: dict[str, Any] | None) -> None:
        """What :attr:`state` was when the position was stored; compared when that epoch's list is made."""
        self._expected = state

    def _made(self, epoch: int) -> Listed:
        with _settled(self.sampler, self._seed, epoch):
            given = list(self.sampler)
        ends = None
        if self.batched:
            flat = [batch for batch in given if isinstance(batch, str) or not hasattr(batch, "__len__")]
            if flat:
                raise UsageError(
                    f"the {type(self.sampler).__name__} lists no batches for epoch {epoch} such as {flat[0]!r}: a "
                    "batch sampler lists lists of dataset indices; give one that lists indices as sampler"
                )
            ends = np.cumsum([len(batch) for batch in given], dtype=np.int64)
            given = list(itertools.chain.from_iterable(given))
        try:
            indices = np.asarray(given)
        except ValueError:  # lists of different lengths among them
            indices = np.array([], dtype=object)
        if indices.ndim != 1 or not indices.size or not np.issubdtype(indices.dtype, np.integer):
            odd = [each for each in given if not isinstance(each, Integral)]
            what = f"such as {(odd or given)[0]!r}" if given else "and nothing at all"
            raise UsageError(
                f"the {type(self.sampler).__name__} lists no dataset indices for epoch {epoch} {what}: a sampler "
                "lists whole numbers, and a batch sampler lists of them"
            )
        indices = indices.astype(np.int64)
        digest = hashlib.blake2b(indices.tobytes(), digest_size=8)
        digest.update(b"" if ends is None else ends.tobytes())
        return Listed(indices, ends, digest.hexdigest())


def batch_tickets(listing: Listing, share: Share, start: Position, *, even: bool) -> Iterator[Ticket]:
    """One rank's share of each batch that a batch sampler lists, from a position to the end of that epoch.

    Args:
        listing: of a batch sampler.
        share: a rank takes every ``world_size``-th sample of each batch.
        start: between two batches.
        even: whether a batch that the world size doesn't divide is refused.

    Raises:
        StateMismatch: no batch ends at this position.
        UsageError: a batch can't be split.
    """
    listed = listing.epoch(start.epoch)
    assert listed.ends is not None
    bounds = [0, *listed.ends.tolist()]
    if start.samples not in bounds:
        raise StateMismatch(
            f"the stored position is after {start.samples} samples of epoch {start.epoch}, and the "
            f"{type(listing.sampler).__name__} lists no batch that ends there: make it list what it listed then, or "
            "start over with --fresh"
        )
    order, first = ListedOrder(listed.indices), bounds.index(start.samples)
    for begin, end in itertools.pairwise(bounds[first:]):
        after = Position(start.epoch + 1, 0) if end == bounds[-1] else Position(start.epoch, end)
        indices, padding = _part(begin, end, share, even=even)
        yield Ticket(start.epoch, order.at(indices).tolist(), padding, after)


def _part(begin: int, end: int, share: Share, *, even: bool) -> tuple[NDArray[np.int64], int]:
    """A rank's places in one batch, and how many of them are repeats."""
    size, world = end - begin, share.world_size
    if size < 1 or (even and size % world):
        raise UsageError(
            f"the batch sampler lists a batch of {size} samples, which can't be split evenly over {world} ranks: its "
            "batches are those of all ranks together. List multiples of the number of ranks, or allow shares that "
            "differ by one sample with even_shares=False"
        )
    if share.rank >= size:
        return np.array([end - 1], dtype=np.int64), 1
    return np.arange(begin + share.rank, end, world, dtype=np.int64), 0


@contextlib.contextmanager
def _settled(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    bits = sample_seed(seed, epoch, 0, purpose="sampler")
    chain = [sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
    generators = {id(each.generator): each.generator for each in chain if _has_generator(each)}
    before = [(each, each.get_state()) for each in generators.values()]
    for each in chain:
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)
    with preserved():
        seed_everything(bits)
        for generator in generators.values():
            generator.manual_seed(bits)
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


def _has_generator(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "generator", None), torch.Generator)
