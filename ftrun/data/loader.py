"""A drop-in ``torch.utils.data.DataLoader`` that knows, and restores, exactly where it is.

For example::

    loader = DataLoader(dataset, global_batch=64, shuffle=True, seed=17, rank=rank, world_size=world_size)
    loader.load_state_dict(state)   # before the first loop; from any world size and number of workers
    for batch in loader:            # the rest of the current epoch
        train(batch)
        loader.commit()             # optional: asking for the next batch commits the one before
    state = loader.state_dict()     # some two hundred bytes, the same on every rank
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data

from ftrun.data.arguments import check_recipe
from ftrun.data.cautions import forked, many_objects
from ftrun.data.filler.own import own_filler
from ftrun.data.order import BATCHES
from ftrun.data.plan import Batches, Indices, Plan
from ftrun.data.position import from_state, to_state
from ftrun.data.progress import Loop, Progress
from ftrun.data.supply import Supply
from ftrun.data.understood import understood
from ftrun.data.words import Words, check_torch_words, flag
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.data import Dataset

    from ftrun.data.order import Share
    from ftrun.data.position import Position, Recipe
    from ftrun.data.progress import Follower
    from ftrun.data.source import Source

T = TypeVar("T", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T]):
    """Yields this rank's share of each global batch, from an exact position that can be stored and restored.

    Step k of an epoch takes the next ``global_batch`` samples of the order; rank r of W takes every W-th of them, from
    the r-th. The order, the epoch's length and the random numbers drawn while a sample is loaded depend on neither the
    world size, the number of workers nor prefetching, so a run may resume with others.

    Each ``iter()`` continues at the committed position and ends with the epoch; the next one begins the next epoch. A
    batch is committed when the loop asks for the next one, or by :meth:`commit`. Leaving a loop early and starting
    another therefore yields the last batch again, unless it was committed. A new loop ends the one before.

    Create it on every rank with the same arguments, but for ``rank``. Use one loader from one thread at a time.

    Args:
        dataset: map-style, with ``__len__`` and ``__getitem__``; or iterable, see :mod:`ftrun.data.iterable`. An
            attribute or method ``fingerprint`` (a string) is stored in checkpoints and compared on resume.
        batch_size: samples in one step of one rank. The global batch is that times the world size *when the run first
            starts*; a resume with another world size keeps the global batch. None yields samples, one a step.
        shuffle: an order of its own for each epoch, made from ``seed``; otherwise the dataset's own order.
        sampler: over the whole dataset, the same on every rank; its list of an epoch is the order. Torch's
            ``DistributedSampler`` is taken for what it means, and so are its ``RandomSampler`` and
            ``SequentialSampler``. Others are asked for their list at the start of each epoch, with their ``generator``
            and the global random generators seeded from ``seed`` and the epoch, after ``set_epoch``.
        batch_sampler: lists the batches of all ranks together; each rank takes its share of each. Only one over a
            ``DistributedSampler`` means batches of one rank, as in torch.
        num_workers: processes that load samples; they die with the training process. When one dies, all are replaced
            once in each loop.
        collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers,
            pin_memory_device, in_order: as in torch, but that workers persist by default, and ``in_order`` is True.
        drop_last: leave out samples that don't fill a last batch of ``batch_size``.
        generator: its ``initial_seed()`` is the seed.
        global_batch: instead of ``batch_size``: samples in one step of all ranks together.
        seed: of the order, and of the random numbers drawn while samples are loaded.
        order: instead of ``shuffle``: ``feistel6-v1``, ``torch`` (what DistributedSampler makes: 8 bytes and
            30 nanoseconds for each sample of the dataset, at the start of each epoch), ``block:K`` or
            ``block:KxM`` (blocks of K neighbours, M of them mixed at a time, so that shards stay hot) or ``none``.
        tail: of samples that don't fill a last global batch: ``drop`` leaves them out of the epoch, ``error`` refuses
            them, ``uneven`` makes a smaller last batch whose shares differ by one sample at most, ``pad`` fills it
            with samples from the start of the epoch, see :attr:`padding`. By default ``drop`` with ``global_batch``,
            and with ``batch_size`` what ``drop_last`` says.
        sample_seeds: seed ``random``, NumPy and torch (CPU) before each sample, and before ``collate_fn``, from
            ``seed``, the epoch and the index: 6 microseconds. Where samples take less than 2 milliseconds, 16 of them
            are read twice in each process (but for a dataset that holds a generator or iterator of its own), to find
            generators that they don't depend on: those are watched instead,
            and a batch in which one moves after all is read again, see :mod:`ftrun.data.trial`. A dataset whose samples
            depend on none is asked for a whole batch by ``__getitems__``, if it has that and gives the same. Without
            sample seeds, random numbers come from the streams of whichever process loads the sample.
        even_shares: refuse a global batch that the world size doesn't divide. With False shares differ by one sample.
            By default True, unless ``tail="uneven"`` is given.
        rank: this process among those that share a global batch (the data-parallel rank).
        world_size: number of those processes.
        virtual_shards: for iterable datasets: into how many shards they are cut, for good.
        epoch_samples: for iterable datasets whose length isn't known: samples in an epoch.

    Raises:
        UsageError: arguments that can't work together; says what can.
    """

    def __init__(  # noqa: PLR0913  torch's signature, and what makes the order
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
        global_batch: int | None = None,
        seed: int = 0,
        order: str | None = None,
        tail: str | None = None,
        sample_seeds: bool = True,
        even_shares: bool | None = None,
        rank: int = 0,
        world_size: int = 1,
        virtual_shards: int | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        words = Words(
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            generator=generator,
            global_batch=global_batch,
            seed=seed,
            order=order,
            tail=tail,
            even_shares=even_shares,
            rank=rank,
            world_size=world_size,
        )
        for_torch: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
        }
        check_torch_words(for_torch, in_order=in_order)
        flag("sample_seeds", sample_seeds)
        asked, source, recipe = understood(
            words, dataset, num_workers=num_workers, virtual_shards=virtual_shards, epoch_samples=epoch_samples
        )
        self._asked = asked
        self._source = source
        self._plan = Plan(source, recipe, asked.share)
        self._progress = Progress(self._plan, in_workers=num_workers > 0)
        self._supply = Supply(self._progress, batched=asked.batched, sample_seeds=sample_seeds)
        if persistent_workers is None:
            for_torch["persistent_workers"] = num_workers > 0
        super().__init__(dataset, batch_size=1 if asked.batched else None, **for_torch)
        self._show()
        self._caution()

    def _show(self) -> None:
        # What torch's own shows, past its ban on changes. A stored global batch may change the size per rank.
        recipe, share = self._plan.recipe, self._plan.share
        size = len(range(share.rank, recipe.global_batch, share.world_size))
        shown: dict[str, Any] = {"drop_last": recipe.tail in ("drop", "error")}
        if self._asked.batched:
            batches = Batches(self._plan, batch_size=max(size, 1), drop_last=shown["drop_last"])
            shown |= {"batch_size": None if recipe.order == BATCHES else size, "batch_sampler": batches}
        shown["sampler"] = Indices(self._plan)
        for name, value in shown.items():
            object.__setattr__(self, name, value)

    def _caution(self) -> None:
        caution = many_objects(self.dataset) if self.num_workers and self._plan.share.rank == 0 else None
        if caution and forked(self.multiprocessing_context):
            warnings.warn(f"ftrun: {caution}", stacklevel=3)

    @property
    def recipe(self) -> Recipe:
        """What decides which samples a global batch holds; with the run's own global batch once that is restored."""
        return self._plan.recipe

    @property
    def share(self) -> Share:
        """Which part of each global batch this rank takes."""
        return self._plan.share

    @property
    def source(self) -> Source:
        """The dataset, as the loader sees it."""
        return self._source

    @property
    def global_batch(self) -> int | None:
        """Samples that all ranks together consume in one step; None where a batch sampler decides."""
        return None if self._plan.recipe.order == BATCHES else self._plan.recipe.global_batch

    @property
    def dispatched(self) -> Position:
        """After the last batch that was asked for: ahead of :attr:`yielded` by what is prefetched."""
        ahead = self._plan.ahead
        return ahead[-1].after if ahead else self._progress.yielded

    @property
    def yielded(self) -> Position:
        """After the last batch that the loop was given."""
        return self._progress.yielded

    @property
    def committed(self) -> Position:
        """After the last batch that counts as consumed: what :meth:`state_dict` stores.

        The same on every rank that has committed the same number of steps.
        """
        return self._progress.committed

    @property
    def position(self) -> Position:
        """Another name for :attr:`committed`."""
        return self._progress.committed

    @property
    def epoch(self) -> int:
        """Epoch of the next batch after the committed ones: the last batch of an epoch moves it on."""
        return self._progress.committed.epoch

    @property
    def padding(self) -> int:
        """How many samples at the end of the batch yielded last are repeats, which don't count in the epoch.

        With ``tail="pad"`` in the last batch of an epoch. With ``tail="uneven"`` one, where a rank had nothing left:
        it takes part in the step all the same. Give those samples no weight in a loss or a metric.
        """
        return self._progress.padding

    def set_epoch(self, epoch: int) -> None:
        """Check that the loop means the epoch that the loader is in: it counts epochs itself.

        Raises:
            UsageError: it is in another.
        """
        if epoch != self.epoch:
            raise UsageError(
                f"set_epoch({epoch}), and the loader is in epoch {self.epoch}, {self.committed.samples} samples in: "
                "it counts epochs itself and continues where it was. Start the loop over epochs at loader.epoch, or "
                "leave set_epoch out; after leaving a loop early at its last batch call loader.commit()"
            )

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the position is.

        Raises:
            TypeError: nobody knows.
        """
        return len(self._plan)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch promises a class of its own
        """Go on from the committed position to the end of its epoch."""
        check_recipe(self._plan.recipe, self._asked)
        progress = self._progress
        progress.begin()
        if progress.follower is None:
            progress.follower = own_filler(self)
        progress.tell()
        return Loop(self, progress, self._supply.begin(self))

    @property
    def waited(self) -> float:
        """Seconds for which loops over this loader have waited for batches so far."""
        return self._progress.waited

    def listed(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None] | None:
        """What a sampler of the user's lists for an epoch, and where its batches end; None for computed orders."""
        listing = getattr(self._source, "listing", None)
        return None if listing is None else listing.epoch(epoch)[:2]

    def follow(self, follower: Follower) -> None:
        """Have something told of each committed position: whoever fetches ahead of this loader."""
        self._progress.follower = follower

    def commit(self) -> None:
        """Count the batch that was yielded last as consumed: after the optimizer step, before a checkpoint.

        Call it on every rank at the same step. Calling it twice, or before the first batch, changes nothing.
        """
        self._progress.commit()

    def state_dict(self) -> dict[str, Any]:
        """The committed position and what identifies the data: plain JSON values.

        Equal on every rank, but for the key ``shards`` of an iterable dataset.
        """
        own = self._source.state()
        state: dict[str, Any] = to_state(self._progress.committed, self._plan.recipe)
        return state if own is None else {**state, self._source.state_key: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a stored position. Call it on every rank, before the first loop.

        Args:
            state_dict: what :meth:`state_dict` returned, under any world size and number of workers.

        Raises:
            UsageError: a loop has begun already, or the stored global batch can't be split over this world
                size.
            StateMismatch: it belongs to other data; names the differences.
        """
        if self._progress.turn:
            raise UsageError(
                "load_state_dict came after iter() on this loader, and batches have been prefetched from "
                "the old position: load the state before the loop, or make a new loader"
            )
        position, recipe = from_state(state_dict, self._plan.recipe)
        check_recipe(recipe, self._asked)
        self._source.load(state_dict.get(self._source.state_key))
        self._plan.recipe = recipe
        self._progress.restore(position)
        self._show()
