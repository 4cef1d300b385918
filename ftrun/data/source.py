"""The seam between the loader and the kinds of dataset: something that has an order and can be fetched from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ftrun.data.fetcher import Fetcher
from ftrun.data.listed import batch_tickets
from ftrun.data.listed_order import ListedOrder
from ftrun.data.order import tickets
from ftrun.data.position import fingerprint
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun.data.listed import Listing
    from ftrun.data.order import Share, Ticket
    from ftrun.data.position import Position, Recipe


class Source(Protocol):
    """One dataset, as the loader sees it.

    Attributes:
        state_key: under which a checkpoint stores :meth:`state`.
    """

    state_key: str

    @property
    def n(self) -> int | None:
        """Samples in an epoch; None where nobody knows."""
        ...

    def fingerprint(self) -> str:
        """A cheap name for the dataset, compared on resume."""
        ...

    def tickets(self, recipe: Recipe, share: Share, start: Position) -> Iterator[Any]:
        """This rank's requests from a position to the end of that epoch. Called at the start of each loop.

        What it yields is sent to a worker as it is. It may have attributes ``after`` and ``padding`` like
        :class:`ftrun.data.order.Ticket`.
        """
        ...

    def fetcher(self, collate: Callable[[list[Any]], Any], seed: int, sample_seeds: bool) -> Any:
        """What a worker, or the training process, fetches with: picklable, ``__getitems__(ticket)`` gives a batch."""
        ...

    def opened(self, arrived: Any) -> Any:
        """The batch in what a fetcher returned. Called in the training process when the loop gets it."""
        ...

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint stores beyond the position, for what is committed; None if nothing."""
        ...

    def load(self, state: dict[str, Any] | None) -> None:
        """Take back what :meth:`state` gave. Called before the first loop, after the position was checked."""
        ...

    def commit(self) -> None:
        """The batch that was opened last counts as consumed."""
        ...


class MapSource:
    """A map-style dataset.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        listing: of a sampler of the user's, where there is one.
        even: whether a user's batches that the world size doesn't divide are refused.

    Raises:
        UsageError: it isn't map-style, or says that it has less than no samples.
    """

    state_key = "sampler"

    def __init__(self, dataset: Any, listing: Listing | None = None, *, even: bool = True) -> None:
        self._dataset = dataset
        self._length = _length(dataset)
        self._listing = listing
        self._even = even
        self._fetcher: tuple[Any, Fetcher] | None = None

    @property
    def n(self) -> int | None:
        """Samples in an epoch; None for batches that the user lists, which need not be as many each time."""
        if self._listing is None:
            return self._length
        return None if self._listing.batched else self._listing.length

    @property
    def listing(self) -> Listing | None:
        """Of a sampler of the user's, where there is one."""
        return self._listing

    def fingerprint(self) -> str:
        """See :meth:`Source.fingerprint`."""
        return fingerprint(self._dataset, self._length)

    def tickets(self, recipe: Recipe, share: Share, start: Position) -> Iterator[Ticket]:
        """See :meth:`Source.tickets`.

        Raises:
            UsageError: the dataset's length has changed, or a sampler lists what can't be loaded.
        """
        now = len(self._dataset)
        if now != self._length:
            raise UsageError(
                f"the {type(self._dataset).__name__} had {self._length} samples when its loader was made, and has "
                f"{now} now: a position in it would mean other samples. Make a new loader for a dataset that has "
                "changed, and start that run over with --fresh, or keep its length for the whole run"
            )
        if self._listing is None:
            return tickets(recipe, share, start)
        if self._listing.batched:
            return batch_tickets(self._listing, share, start, even=self._even)
        listed = self._listing.epoch(start.epoch)
        if len(listed.indices) != recipe.n:
            raise UsageError(
                f"the {type(self._listing.sampler).__name__} lists {len(listed.indices)} samples for epoch "
                f"{start.epoch}, and said {recipe.n} when the loader was made: an epoch's length must not change"
            )
        return tickets(recipe, share, start, ListedOrder(listed.indices))

    @property
    def steps(self) -> int | None:
        """Batches that the user's batch sampler lists for an epoch; None without one."""
        return self._listing.length if self._listing is not None and self._listing.batched else None

    def fetcher(self, collate: Callable[[list[Any]], Any], seed: int, sample_seeds: bool) -> Fetcher:
        """See :meth:`Source.fetcher`. The same one again for the same arguments, as it gets to know the dataset."""
        key = (collate, seed, sample_seeds)
        if self._fetcher is None or self._fetcher[0] != key:
            self._fetcher = key, Fetcher(self._dataset, collate, seed, sample_seeds)
        return self._fetcher[1]

    def opened(self, arrived: Any) -> Any:
        """See :meth:`Source.opened`."""
        return arrived

    def state(self) -> dict[str, Any] | None:
        """See :meth:`Source.state`: what identifies a sampler's list, the same on every rank."""
        return None if self._listing is None else self._listing.state

    def load(self, state: dict[str, Any] | None) -> None:
        """See :meth:`Source.load`."""
        if self._listing is not None:
            self._listing.expect(state)

    def commit(self) -> None:
        """See :meth:`Source.commit`: the position says everything."""


def _length(dataset: Any) -> int:
    if isinstance(dataset, str | bytes | type):
        what = f"the class {dataset.__name__}" if isinstance(dataset, type) else f"text, {dataset[:60]!r}"
        raise UsageError(f"the dataset is {what}: give an object of a torch.utils.data.Dataset class")
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise UsageError(
            f"{type(dataset).__name__} has no {' and no '.join(missing)}: a dataset has __len__ and __getitem__, or "
            "it is a torch.utils.data.IterableDataset, or has a method shard(number, of) that gives an iterable"
        )
    try:
        return len(dataset)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"{type(dataset).__name__} says nothing of its length, and the order of its samples needs it: "
            f"give it a __len__ that returns a whole number ({error})"
        ) from error
