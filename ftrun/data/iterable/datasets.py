"""What a dataset offers, as one thing with shards: its own ``shard``, a package's, or none at all."""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ftrun.data.iterable import huggingface, webdataset
from ftrun.data.words import whole
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

VIRTUAL_SHARDS = 64
"""Shards of a dataset that can be cut into any number of them."""


class Piece(Protocol):
    """One shard of a dataset, opened for one reading. ``seek``, ``state_dict`` and ``load_state_dict`` are optional."""

    def __iter__(self) -> Iterator[Any]:
        """From its first sample, or from where ``seek(number)`` or ``load_state_dict(state)`` put it before."""
        ...


class Shards(Protocol):
    """A dataset as a fixed number of shards. Picklable; opening is what workers do.

    Attributes:
        count: number of shards.
        lengths: samples in each; int64, one for each shard; None where they aren't known.
        one_for_each_rank: shard r is what rank r alone can read: the dataset has no shards of its own.
        states_hold: a piece's ``state_dict`` is all that its later samples depend on.
        name: what tells this dataset from another; a part of the fingerprint.
        how_many: what to do for another number of shards, for messages.
    """

    count: int
    lengths: NDArray[np.int64] | None
    one_for_each_rank: bool
    states_hold: bool
    name: str
    how_many: str

    def open(self, shard: int, epoch: int, seed: int) -> Piece:
        """Open a shard. Each call returns a piece of its own.

        Args:
            shard: number of the shard.
            epoch: how often it has been read before.
            seed: of the loader.
        """
        ...

    def expect(self, shard: int) -> None:
        """A shard will be opened soon, in this process: a hint. Returns at once."""
        ...


def can_seek(piece: Any) -> bool:
    """Whether ``seek(number)`` puts a piece before a sample, at no cost that grows with the number."""
    return callable(getattr(piece, "seek", None))


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset is read in order, and not by index."""
    if any(each.__name__ == "IterableDataset" and _is_torch(each) for each in type(dataset).__mro__):
        return True
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return not by_index and (hasattr(dataset, "__iter__") or callable(getattr(dataset, "shard", None)))


def _is_torch(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch"


def shards_of(dataset: Any, world_size: int, virtual_shards: int | None) -> Shards:
    """A dataset as shards.

    Args:
        dataset: anything that :func:`is_iterable`.
        world_size: ranks, each of which reads a dataset without shards by itself.
        virtual_shards: number of shards, where the dataset leaves that open.

    Raises:
        UsageError: it can't be cut so, or could never be resumed; says what to do.
    """
    if isinstance(dataset, set | frozenset):
        raise UsageError(
            "a set has an order of its own in each process, so no position in it can be found again: sort it"
        )
    if virtual_shards is not None:
        virtual_shards = whole("virtual_shards", virtual_shards, 1, "a dataset has at least one shard")
    if huggingface.is_one(dataset):
        most = huggingface.num_shards(dataset)
        count = virtual_shards or most
        if count > most:
            raise UsageError(f"virtual_shards={count}, and this dataset has {most}: leave it out, or dataset.reshard()")
        how_many = "save the data set in more files, or dataset.reshard()"
        return ByNumber(dataset, count, huggingface.name(dataset), huggingface.states_hold(dataset), how_many)
    if webdataset.is_one(dataset):
        return webdataset.Tars(dataset, virtual_shards)
    if callable(getattr(dataset, "shard", None)):
        count = virtual_shards or _own_count(dataset) or VIRTUAL_SHARDS
        return ByNumber(dataset, count, "", True, "virtual_shards=")
    if virtual_shards is not None:
        raise UsageError(
            f"virtual_shards={virtual_shards}: {type(dataset).__name__} can't be cut into shards. Give it a method "
            "shard(index, count) that returns an iterable over that part"
        )
    return Whole(dataset, world_size)


def _own_count(dataset: Any) -> int | None:
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return int(count() if callable(count) else count) if count is not None else None


class ByNumber:
    """A dataset with ``shard(index, count)``, or ``shard(num_shards=, index=)`` as Hugging Face has it."""

    one_for_each_rank = False

    def __init__(self, dataset: Any, count: int, name: str, states_hold: bool, how_many: str) -> None:
        self.dataset, self.count, self.states_hold, self.how_many = dataset, count, states_hold, how_many
        self._by_name = {"num_shards", "index"} <= set(inspect.signature(dataset.shard).parameters)
        if count < 1:
            raise UsageError(f"{type(dataset).__name__} has no shards: check where it gets its data")
        self.lengths = self._lengths()
        self.name = (
            f"{name}/{count} shards/{_digest(self.lengths)}" if name else f"{count} shards/{_digest(self.lengths)}"
        )

    def open(self, shard: int, epoch: int, seed: int) -> Piece:
        """See :meth:`Shards.open`."""
        piece: Piece = self._cut(shard)
        set_epoch = getattr(piece, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return piece

    def expect(self, shard: int) -> None:
        """See :meth:`Shards.expect`: where the dataset says which files it has, and through which cache."""
        files, ask = getattr(self.dataset, "files", None), getattr(self.dataset, "shard_urls", None)
        if files is not None and callable(ask) and hasattr(files, "prefetch"):
            files.prefetch(ask(self.count)[shard])

    def _cut(self, shard: int) -> Any:
        made = (
            self.dataset.shard(num_shards=self.count, index=shard)
            if self._by_name
            else self.dataset.shard(shard, self.count)
        )
        if made is self.dataset or not hasattr(made, "__iter__") or iter_is_self(made):
            what = "itself" if made is self.dataset else repr(made)
            raise UsageError(
                f"{type(self.dataset).__name__}.shard() returned {what}: return a new object over that part for each "
                "call, whose iter() begins at its first sample"
            )
        return made

    def _lengths(self) -> NDArray[np.int64] | None:
        own = getattr(self.dataset, "shard_lengths", None)
        own = own(self.count) if callable(own) else own
        if own is None and callable(getattr(type(self._cut(0)), "__len__", None)):
            own = [len(self._cut(shard)) for shard in range(self.count)]
        return None if own is None else _checked(own, self.count, type(self.dataset).__name__)


class Whole:
    """A dataset without shards: each rank reads it by itself, with at most one worker."""

    one_for_each_rank = True
    states_hold = True
    lengths: NDArray[np.int64] | None = None
    how_many = "give it a method shard(index, count)"

    def __init__(self, dataset: Any, world_size: int) -> None:
        if iter_is_self(dataset):
            raise UsageError(
                f"a {type(dataset).__name__} can be read only once, so no position in it can be found again: give the "
                "loader an object whose iter() begins at the first sample"
            )
        self.dataset, self.count = dataset, world_size
        self.name = "unsharded"

    def open(self, shard: int, epoch: int, seed: int) -> Piece:
        """See :meth:`Shards.open`."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        piece: Piece = self.dataset
        return piece

    def expect(self, shard: int) -> None:
        """See :meth:`Shards.expect`: it is the only one."""


def iter_is_self(made: Any) -> bool:
    """Whether something is used up by one reading: an iterator, such as a generator."""
    return hasattr(made, "__next__") and hasattr(made, "__iter__")


def _checked(lengths: Sequence[int], count: int, dataset: str) -> NDArray[np.int64]:
    found = np.asarray(lengths)
    if found.shape != (count,) or not np.issubdtype(found.dtype, np.integer) or (found < 0).any():
        raise UsageError(
            f"{dataset} says that its {count} shards are of the lengths {str(lengths)[:80]}: return one whole number "
            "from 0 for each shard, or leave the lengths out"
        )
    return found.astype(np.int64)


def _digest(lengths: NDArray[np.int64] | None) -> str:
    if lengths is None:
        return "lengths unknown"
    return hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
