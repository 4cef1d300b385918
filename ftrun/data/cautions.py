"""Warnings about what will go wrong later: memory that forked workers copy, shared memory that is too small."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Subset

from ftrun.data.worker_death import SHARED_MEMORY, amount

if TYPE_CHECKING:
    from collections.abc import Iterator

MORE_MEMORY = (
    "Use fewer num_workers or a smaller prefetch_factor, or give the container more (docker run --shm-size, an "
    "emptyDir of medium Memory in Kubernetes)."
)
"""What helps where shared memory is too small."""

_MANY = 100_000
_CONTAINERS = (list, tuple, dict, set, frozenset)


def forked(context: Any) -> bool:
    """Whether workers with this ``multiprocessing_context`` (or none) begin as copies of the training process."""
    method = context if isinstance(context, str) else context.get_start_method() if context is not None else None
    return (method or multiprocessing.get_start_method()) == "fork"


def many_objects(dataset: Any) -> str | None:
    """What to say of a dataset that holds so many Python objects that forked workers copy much of its memory.

    Returns:
        The warning; None where there is nothing to warn of.
    """
    for where, held in _held(dataset):
        boxed = held.dtype == object if isinstance(held, np.ndarray) else True
        if boxed and len(held) > _MANY:
            return (
                f"{where} is a {type(held).__name__} of {len(held):,} Python objects. A forked worker that looks at "
                "them counts references, so each worker comes to hold a copy of its own: some 60 bytes for each "
                "object and pass. Keep strings in a NumPy array of fixed width (np.array(paths)), numbers in a NumPy "
                "array or a tensor, and urls in ftrun.CachedDataset, which packs them."
            )
    return None


def _held(dataset: Any, name: str = "the dataset") -> Iterator[tuple[str, Any]]:
    if isinstance(dataset, (*_CONTAINERS, np.ndarray)):
        yield name, dataset
        return
    # A Subset's indices count as well.
    for key, value in list(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, (*_CONTAINERS, np.ndarray)):
            yield f"{type(dataset).__name__}.{key}", value
    if isinstance(dataset, Subset):
        yield from _held(dataset.dataset)


def shared_memory_free() -> int | None:
    """Bytes free in shared memory; None where there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def too_little_shared_memory(batch: Any, batches: int, free: int | None) -> str | None:
    """What to say where the batches that workers may have ready don't fit into shared memory.

    Args:
        batch: one batch, as it arrived.
        batches: how many of them may be ready at a time.
        free: bytes free before the workers began; None where there is no shared memory.
    """
    size = tensor_bytes(batch)
    if free is None or size * batches <= free:
        return None
    return (
        f"{batches} batches of {amount(size)} may be ready at a time, {amount(size * batches)} in all, and "
        f"{SHARED_MEMORY} had {amount(free)} free: workers may fail for lack of shared memory. {MORE_MEMORY}"
    )


def tensor_bytes(batch: Any) -> int:
    """Bytes of the CPU tensors in a batch, however nested."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes if batch.device.type == "cpu" else 0
    if isinstance(batch, dict):
        return sum(map(tensor_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(tensor_bytes, batch))
    if dataclasses.is_dataclass(batch):
        return sum(map(tensor_bytes, vars(batch).values())) if hasattr(batch, "__dict__") else 0
    return 0
