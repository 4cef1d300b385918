"""The fetching of one batch of a map-style dataset, in a worker or in the training process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate, default_convert, get_worker_info

from ftrun.data.generators import put_back, states
from ftrun.data.randomness import sample_seed, seed_everything
from ftrun.data.reading import Reader, note, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.order import Ticket


@dataclass(frozen=True)
class Alone:
    """Collates for ``batch_size=None``: converts the one sample."""

    convert: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> Any:
        """What the loop gets."""
        return self.convert(samples[0])


# Of these it is known that they draw nothing.
_SILENT = (default_collate, default_convert, Alone(default_convert))


class Fetcher:
    """Stands between torch's loader and the user's dataset: takes a ticket, returns the collated batch.

    It collates as well, so that random numbers drawn by ``collate_fn`` are settled like those of the samples. In the
    training process the global generators are left as they were.

    Args:
        dataset: the user's map-style dataset.
        collate: the user's ``collate_fn``, or torch's default.
        seed: of the random numbers of each sample.
        sample_seeds: give each sample random numbers of its own, see :mod:`ftrun.data.trial`. Without it a dataset
            that has ``__getitems__`` is asked for the whole batch at once.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, sample_seeds: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._collate_draws = collate not in _SILENT
        self._seed = seed
        self._sample_seeds = sample_seeds
        self._reader: Reader | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what was found out about the dataset: that is of its process."""
        return {**self.__dict__, "_reader": None}

    def __getitems__(self, ticket: Ticket) -> Any:
        """Fetch and collate one batch; torch passes what the batch sampler yielded, as it is.

        Raises:
            Exception: whatever the dataset or ``collate_fn`` raises, with a note that names the sample.
            RuntimeError: one of them let a StopIteration out, which would end the epoch without a word.
        """
        if not self._sample_seeds:
            return self._collated(ticket, together(self.dataset, ticket))
        if self._reader is None:
            self._reader = Reader(self.dataset, self._seed)
        before, untouched = states(), False
        try:
            samples, untouched = self._reader.settled(ticket, before)
            if self._collate_draws:
                untouched = False
                seed_everything(sample_seed(self._seed, ticket.epoch, ticket.indices[0], purpose="collate"))
            return self._collated(ticket, samples)
        finally:
            if not untouched and get_worker_info() is None:
                put_back(before)

    def _collated(self, ticket: Ticket, samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            note(error, f"the batch of sample indices {ticket.indices} of epoch {ticket.epoch}, in collate_fn")
            raise
