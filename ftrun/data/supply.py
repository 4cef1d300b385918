"""Where a loader's batches come from: the training process itself, or workers of torch's."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch.utils.data

from ftrun.data.engine import Crew, Direct, Supervised
from ftrun.data.fetcher import Alone
from ftrun.data.randomness import sample_seed
from ftrun.data.workers import WorkerStart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.data.progress import Progress


class Supply:
    """The batches of one loader, loop after loop. Doesn't refer to the loader, so that its workers end with that.

    Args:
        progress: of the loader.
        batched: whether samples are collated into batches.
        sample_seeds: give each sample random numbers of its own.
    """

    def __init__(self, progress: Progress, *, batched: bool, sample_seeds: bool) -> None:
        self._progress = progress
        self._batched = batched
        self._sample_seeds = sample_seeds
        self._crew: Crew | None = None

    def begin(self, loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
        """The batches of a loop that begins now.

        Args:
            loader: the user's, with the arguments of torch in its attributes.
        """
        plan = self._progress.plan
        recipe, start = plan.recipe, plan.start
        collate = loader.collate_fn if self._batched else Alone(loader.collate_fn)
        fetcher = plan.source.fetcher(collate, recipe.seed, self._sample_seeds)
        if not loader.num_workers and not loader.pin_memory and not loader.timeout:
            return Direct(fetcher.__getitems__, iter(plan))
        if self._crew is None:
            ready = loader.num_workers * (loader.prefetch_factor or 2)
            self._crew = Crew(batches=ready, persistent=loader.persistent_workers)
        # Without sample seeds the workers' streams start from this; another start for each point of resumption.
        seed = sample_seed(recipe.seed, start.epoch, start.samples, f"workers/{plan.share.rank}")
        make = functools.partial(_torch_loader, loader, fetcher, plan)
        return Supervised(self._crew, make, seed, self._progress.rewind)


class _Plain(torch.utils.data.DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """The user's loader has warned already."""


def _torch_loader(
    loader: torch.utils.data.DataLoader[Any], fetcher: Any, plan: Any
) -> torch.utils.data.DataLoader[Any]:
    # A plain torch loader does the work, so that `dataset` and `collate_fn` of the loader stay the user's own.
    in_main_thread = threading.current_thread() is threading.main_thread()
    return _Plain(
        fetcher,
        batch_sampler=plan,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=WorkerStart(os.getpid(), in_main_thread, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # of its own: torch would draw from the global one at each iter()
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def _as_it_is(batch: Any) -> Any:
    return batch
