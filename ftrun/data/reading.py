"""Reads the samples of a map-style dataset, each with random numbers of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from ftrun.data.randomness import sample_seeder, seed_everything
from ftrun.data.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftrun.data.order import Ticket


class Reader:
    """Reads for one loader, in one process.

    Args:
        dataset: the user's map-style dataset.
        seed: of the random numbers of each sample.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._trial = Trial()

    def settled(self, ticket: Ticket, before: Sequence[Any]) -> tuple[list[Any], bool]:
        """The samples as they are when all generators are seeded for each from ``(seed, epoch, index)``.

        Args:
            ticket: which samples.
            before: states of the generators.

        Returns:
            The samples, and whether all generators have been left as they were.

        Raises:
            Exception: whatever the dataset raises, with a note that names the sample.
        """
        trial = self._trial
        if not trial.is_over:
            return self._tried(ticket, trial), False
        if trial.watched:
            samples = self._watched(ticket, trial, before)
            if samples is not None:
                return samples, not trial.seeded
        return self._seeded(ticket), False

    def _tried(self, ticket: Ticket, trial: Trial) -> list[Any]:
        if trial.is_due:
            bits_of = sample_seeder(self._seed, ticket.epoch)
            trial.begin()

            def prepare(index: int) -> None:
                bits = bits_of(index)
                trial.read(self._dataset, index, bits)
                seed_everything(bits)

            samples = each_of(self._dataset, ticket, prepare)
            trial.compare(self._dataset, ticket.indices, samples)
            return samples
        began = time.perf_counter()
        samples = self._seeded(ticket)
        trial.took(self._dataset, (time.perf_counter() - began) / len(samples))
        return samples

    def _watched(self, ticket: Ticket, trial: Trial, before: Sequence[Any]) -> list[Any] | None:
        """The samples, with the seeds that others needed; None where these need more."""
        try:
            if trial.whole:
                samples: list[Any] = self._dataset.__getitems__(ticket.indices)
            elif trial.seeded:
                samples = self._seeded_in_part(ticket, trial)
            else:
                samples = each_of(self._dataset, ticket)
        except Exception:
            # Of samples that were asked for together nobody knows which one it was: they are read one by one.
            if not trial.whole and not trial.noticed(before):
                raise
            return None
        return None if trial.noticed(before) else samples

    def _seeded(self, ticket: Ticket) -> list[Any]:
        bits_of = sample_seeder(self._seed, ticket.epoch)
        return each_of(self._dataset, ticket, lambda index: seed_everything(bits_of(index)))

    def _seeded_in_part(self, ticket: Ticket, trial: Trial) -> list[Any]:
        bits_of = sample_seeder(self._seed, ticket.epoch)

        def prepare(index: int) -> None:
            bits = bits_of(index)
            for each in trial.seeded:
                each.seed(bits)

        return each_of(self._dataset, ticket, prepare)


def each_of(dataset: Any, ticket: Ticket, prepare: Callable[[int], None] | None = None) -> list[Any]:
    """Read the samples one by one.

    Args:
        dataset: the user's map-style dataset.
        ticket: which samples.
        prepare: called before each with its index.

    Raises:
        Exception: whatever the dataset raises, with a note that names the sample.
    """
    samples: list[Any] = []
    try:
        if prepare is None:
            for index in ticket.indices:
                samples.append(dataset[index])  # noqa: PERF401  how far it got says which sample failed
        else:
            for index in ticket.indices:
                prepare(index)
                samples.append(dataset[index])
    except Exception as error:
        index = ticket.indices[len(samples)]
        note(error, f"sample index {index} of epoch {ticket.epoch}{_file_of(dataset, index)}")
        raise
    return samples


def together(dataset: Any, ticket: Ticket) -> list[Any]:
    """Ask a dataset that has ``__getitems__`` for all samples at once, and others one by one.

    Raises:
        Exception: whatever the dataset raises, with a note that names the samples.
    """
    if not getattr(dataset, "__getitems__", None):
        return each_of(dataset, ticket)
    try:
        samples: list[Any] = dataset.__getitems__(ticket.indices)
    except Exception as error:
        note(error, f"sample indices {ticket.indices} of epoch {ticket.epoch}")
        raise
    return samples


def note(error: Exception, what: str) -> None:
    """Say in an error what was being loaded.

    Raises:
        RuntimeError: in the place of a StopIteration, which would end the epoch without a word.
    """
    if isinstance(error, StopIteration):
        raise RuntimeError(f"StopIteration came out while ftrun was loading {what}") from error
    error.add_note(f"ftrun was loading {what}")


def _file_of(dataset: Any, index: int) -> str:
    """Which file a sample is, where the dataset has ``urls``; through any Subset."""
    try:
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        urls = getattr(dataset, "urls", None)
        return "" if urls is None else f" ({urls[index]})"
    except Exception:  # this is about an error of the dataset, which must not be lost for another
        return ""
