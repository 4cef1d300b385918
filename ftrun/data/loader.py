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

import os
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data

from ftrun.data.order import FEISTEL, NONE, Share, Ticket, tickets
from ftrun.data.position import Position, Recipe, advance, fingerprint, from_state, to_state
from ftrun.data.randomness import sample_seed
from ftrun.data.workers import Fetcher, WorkerStart
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import Dataset

T = TypeVar("T", covariant=True)

# Seconds from a broken connection to the news that a worker has died.
_LAST_WORDS = 0.5

_PASSED_ON = (
    "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
_WAY_OUT = {
    "sampler": "the loader makes the order itself, so that it can resume in it: use shuffle and seed, and "
    "wrap the dataset in torch.utils.data.Subset to choose samples",
    "batch_sampler": "the loader makes the batches itself, so that it can resume between them: use "
    "global_batch, shuffle and seed",
    "drop_last": "use tail='drop' (the default) to leave out samples that don't fill a global batch, or tail='error'",
    "generator": "use seed; the global random generators are left alone",
}


class DataLoader(torch.utils.data.DataLoader[T]):
    """Yields this rank's share of each global batch, from an exact position that can be stored and restored.

    Step k of an epoch takes the next ``global_batch`` samples of the order; rank r of W takes every W-th of
    them, from the r-th. The order, the epoch's length and the random numbers drawn while a sample is loaded
    depend on neither the world size, the number of workers nor prefetching, so a run may resume with others.

    Each ``iter()`` continues at the committed position and ends with the epoch; the next one begins the next
    epoch. A batch is committed when the loop asks for the next one, or by :meth:`commit`. Leaving a loop
    early and starting another therefore yields the last batch again, unless it was committed. A new loop ends
    the one before.

    Create it on every rank with the same arguments, but for ``rank``. Use one loader from one thread at a
    time.

    Args:
        dataset: map-style: has ``__len__`` and ``__getitem__``. An attribute or method ``fingerprint`` (a
            string) is stored in checkpoints and compared on resume.
        global_batch: samples in one step of all ranks together, a multiple of the world size.
        batch_size: instead of ``global_batch``: samples in one step of one rank. The global batch is that
            times the world size *when the run first starts*; a resume with another world size keeps the
            global batch.
        shuffle: an order of its own for each epoch, made from ``seed``; otherwise the dataset's own order.
        seed: of the order, and of the random numbers drawn while samples are loaded.
        rank: this process among those that share a global batch (the data-parallel rank).
        world_size: number of those processes.
        tail: samples that don't fill a last global batch are left out of the epoch (``drop``) or refused
            (``error``).
        sample_seeds: seed ``random``, NumPy and torch (CPU) before each sample, and before ``collate_fn``.
            Without it, random numbers come from the streams of whichever process loads the sample, and a
            dataset's ``__getitems__`` is used where it has one.
        num_workers: processes that load samples; they die with the training process.
        **torch_arguments: ``collate_fn``, ``pin_memory``, ``timeout``, ``worker_init_fn``,
            ``multiprocessing_context``, ``prefetch_factor``, ``persistent_workers`` (here True by default),
            ``pin_memory_device``, ``in_order`` (only True), as in torch.

    Raises:
        UsageError: arguments that can't work together; says what can.
    """

    def __init__(  # noqa: PLR0913  torch's signature, and what makes the order
        self,
        dataset: Dataset[T],
        *,
        global_batch: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        tail: str = "drop",
        sample_seeds: bool = True,
        num_workers: int = 0,
        **torch_arguments: Any,
    ) -> None:
        _check_torch_arguments(torch_arguments)
        share = _checked_share(rank, world_size)
        n = _length(dataset)
        recipe = Recipe(
            n=n,
            dataset=fingerprint(dataset, n),
            order=FEISTEL if shuffle else NONE,
            seed=int(seed),
            global_batch=_global_batch(global_batch, batch_size, world_size),
            batch_size=batch_size,
            tail=tail,
        )
        # A size per rank gives way to the stored global batch, so it is judged when the first loop begins.
        if batch_size is None or n == 0:
            _check_recipe(recipe, world_size)
        self._plan = _Plan(recipe, share)
        plan: Any = self._plan  # torch's annotation asks for lists; it hands on what it gets
        self._sample_seeds = sample_seeds
        self._engine: torch.utils.data.DataLoader[Any] | None = None
        self._progress = _Progress()
        torch_arguments.setdefault("persistent_workers", num_workers > 0)
        super().__init__(dataset, batch_sampler=plan, num_workers=num_workers, **torch_arguments)

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together consume in one step."""
        return self._plan.recipe.global_batch

    @property
    def position(self) -> Position:
        """The committed position, the same on every rank that has committed the same number of steps."""
        return self._progress.committed

    @property
    def epoch(self) -> int:
        """Epoch of the next batch after the committed ones: the last batch of an epoch moves it on."""
        return self._progress.committed.epoch

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the position is."""
        return len(self._plan)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch promises a class of its own
        """Go on from the committed position to the end of its epoch."""
        _check_recipe(self._plan.recipe, self._plan.share.world_size)
        progress = self._progress
        progress.turn += 1
        progress.yielded = self._plan.start = progress.committed
        return _Loop(self, progress.turn, iter(self._engine_for_this_loop()))

    def commit(self) -> None:
        """Count the batch that was yielded last as consumed: after the optimizer step, before a checkpoint.

        Call it on every rank at the same step. Calling it twice, or before the first batch, changes nothing.
        """
        self._progress.committed = self._progress.yielded

    def state_dict(self) -> dict[str, int | str | None]:
        """The committed position and what identifies the data: plain JSON values, equal on every rank."""
        return to_state(self._progress.committed, self._plan.recipe)

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
        _check_recipe(recipe, self._plan.share.world_size)
        self._plan.recipe = recipe
        self._progress.committed = self._progress.yielded = position

    def _engine_for_this_loop(self) -> torch.utils.data.DataLoader[Any]:
        if self._engine is None or not self.persistent_workers:
            self._engine = self._new_engine()
        # Without sample seeds the workers' streams start from this; another start for each point of
        # resumption.
        assert self._engine.generator is not None
        recipe, start = self._plan.recipe, self._plan.start
        purpose = f"workers/{self._plan.share.rank}"
        self._engine.generator.manual_seed(sample_seed(recipe.seed, start.epoch, start.samples, purpose))
        return self._engine

    def _new_engine(self) -> torch.utils.data.DataLoader[Any]:
        # A plain torch loader does the work, so that `self.dataset` and `self.collate_fn` stay the user's
        # own.
        fetcher: Any = Fetcher(self.dataset, self.collate_fn, self._plan.recipe.seed, self._sample_seeds)
        plan: Any = self._plan
        in_main_thread = threading.current_thread() is threading.main_thread()
        return torch.utils.data.DataLoader(
            fetcher,
            batch_sampler=plan,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=WorkerStart(os.getpid(), in_main_thread, self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            generator=torch.Generator(),  # of its own: torch would draw from the global one at each iter()
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory_device=self.pin_memory_device,
        )

    def _next(self, turn: int, source: Iterator[T]) -> T:
        progress = self._progress
        if turn != progress.turn:
            raise UsageError(
                "this loop over the loader has ended, because loading a batch failed or a newer loop began: "
                "iter(loader) goes on at the committed position; loops side by side need a loader each"
            )
        progress.committed = progress.yielded
        try:
            batch = self._wait(source)
        except StopIteration:
            raise
        except Exception as error:
            at, share = progress.committed, self._plan.share
            error.add_note(
                f"ftrun: the loader of rank {share.rank} of {share.world_size} was waiting for the batch at "
                f"position {at.samples} of epoch {at.epoch}"
            )
            progress.turn += 1  # this loop is over: what comes next would be at another position
            self._engine = None  # its workers may be gone
            if self.num_workers:
                # Torch re-raises a worker's error from a frame that refers to it: a cycle that holds the
                # workers. When the garbage collector breaks it, they can no longer be told to end, and it
                # takes 5 s.
                traceback.clear_frames(error.__traceback__)
            raise
        recipe = self._plan.recipe
        progress.yielded = advance(progress.yielded, recipe.global_batch, recipe.usable)
        return batch

    def _wait(self, source: Iterator[T]) -> T:
        try:
            return next(source)
        except (OSError, EOFError):
            # A worker's death may show first as a broken connection. Torch's SIGCHLD handler then raises an
            # error that names the process and the signal: let that be here, not wherever the program would
            # be by then.
            if self.num_workers:
                time.sleep(_LAST_WORDS)
            raise


class _Progress:
    """How far one loader has got. Apart from the loader, because torch's makes each assignment of its own slow.

    Attributes:
        committed: after the last batch that counts as consumed.
        yielded: after the last batch that the loop was given.
        turn: number of loops begun or broken off; a loop of an earlier turn is over.
    """

    __slots__ = ("committed", "turn", "yielded")

    def __init__(self) -> None:
        self.committed = Position()
        self.yielded = Position()
        self.turn = 0


class _Loop:
    """One pass to the end of the epoch. The loader doesn't refer to it, so leaving it ends its workers."""

    def __init__(self, loader: DataLoader[Any], turn: int, source: Iterator[Any]) -> None:
        self._loader = loader
        self._turn = turn
        self._source = source

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        return self._loader._next(self._turn, self._source)


class _Plan(torch.utils.data.Sampler[Ticket]):
    """The batch sampler: tickets from ``start`` to the end of its epoch. The loader moves ``start``."""

    def __init__(self, recipe: Recipe, share: Share) -> None:
        self.recipe = recipe
        self.share = share
        self.start = Position()

    def __iter__(self) -> Iterator[Ticket]:
        return tickets(self.recipe, self.share, self.start)

    def __len__(self) -> int:
        return self.recipe.n // self.recipe.global_batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _check_torch_arguments(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name not in _PASSED_ON:
            way_out = _WAY_OUT.get(name, f"these arguments are passed on to torch: {', '.join(_PASSED_ON)}")
            raise UsageError(f"ftrun's DataLoader doesn't take {name!r}: {way_out}")
    if not arguments.get("in_order", True):
        raise UsageError(
            "in_order=False yields batches in the order in which they happen to be ready, which has no "
            "exact position: leave it out, or use torch.utils.data.DataLoader for data that needs no resume"
        )


def _checked_share(rank: int, world_size: int) -> Share:
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}: ranks go from 0 to world_size - 1")
    return Share(rank, world_size)


def _length(dataset: Any) -> int:
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if isinstance(dataset, torch.utils.data.IterableDataset) or missing:
        raise UsageError(
            f"{type(dataset).__name__} is not a map-style dataset, and this version's loader takes those "
            "only: give it __len__ and __getitem__ (and don't derive it from IterableDataset), or use "
            "torch.utils.data.DataLoader and keep its position in what you track"
        )
    return len(dataset)


def _global_batch(global_batch: int | None, batch_size: int | None, world_size: int) -> int:
    if (global_batch is None) == (batch_size is None):
        raise UsageError(
            "give one of global_batch (samples in a step of all ranks together) and batch_size (samples per rank)"
        )
    size = global_batch if batch_size is None else batch_size * world_size
    if size is None or size < 1:
        raise UsageError(f"a batch has at least one sample, not {global_batch if batch_size is None else batch_size}")
    return size


def _check_recipe(recipe: Recipe, world_size: int) -> None:
    size = recipe.global_batch
    if size % world_size:
        fitting = ", ".join(str(world) for world in range(1, size + 1) if size % world == 0)
        raise UsageError(
            f"a global batch of {size} can't be split evenly over {world_size} ranks: world sizes that work "
            f"are {fitting}; or start over with a global_batch that is a multiple of {world_size}"
        )
    if recipe.n < size:
        raise UsageError(
            f"the dataset has {recipe.n} samples, less than one global batch of {size}: no step could be "
            "made. "
            + (f"Use a global batch of at most {recipe.n}" if recipe.n else "Check where the dataset gets its data")
        )
    if recipe.tail not in ("drop", "error"):
        raise UsageError(f"tail is 'drop' or 'error', not {recipe.tail!r}")
    left = recipe.n - recipe.usable
    if recipe.tail == "error" and left:
        raise UsageError(
            f"tail='error', and the last {left} of {recipe.n} samples don't fill a global batch of {size}: "
            "change the global batch or the dataset, or leave samples out with tail='drop'"
        )
