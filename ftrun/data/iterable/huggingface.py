"""Hugging Face's streaming datasets, recognised without importing the package.

They have shards (files) and a ``state_dict``. That is exact but for shuffle buffers, which are lost when a state is
put back and filled with other samples, and for batched maps under a format, which may lose a batch. A shard with one
of those is read again from its start instead, where all comes out as it was.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ftrun.errors import UsageError

_SEEDED = "generator"
_INNER = ("ex_iterable", "ex_iterables")
# What keeps samples back, and has no word for them in its state.
_LOSSY = ("BufferShuffled", "InterleavedShards", "RandomlyCycling")
_MOST = 100


def is_one(dataset: Any) -> bool:
    """Whether it is a ``datasets.IterableDataset``."""
    return any(
        each.__name__ == "IterableDataset" and each.__module__.split(".")[0] == "datasets"
        for each in type(dataset).__mro__
    )


def num_shards(dataset: Any) -> int:
    """Its number of shards.

    Raises:
        UsageError: it is a rank's part already.
    """
    if getattr(dataset, "_distributed", None) is not None:
        raise UsageError(
            "this dataset went through split_dataset_by_node, so it is one rank's part and bound to this number of "
            "ranks: give the loader the whole dataset, it deals the shards out itself"
        )
    return int(getattr(dataset, "num_shards", None) or dataset.n_shards)


def states_hold(dataset: Any) -> bool:
    """Whether ``state_dict`` is all that later samples depend on; False where that can't be told."""
    stages = _stages(dataset)
    if not stages:
        return False
    formatted = getattr(dataset, "_formatting", None) is not None
    return not any(
        type(each).__name__.startswith(_LOSSY) or (formatted and getattr(each, "batched", False)) for each in stages
    )


def name(dataset: Any) -> str:
    """What is known of its identity: builder, configuration, version, split, stages, and the seeds of shuffles."""
    info = getattr(dataset, "info", None)
    known = [getattr(info, each, None) for each in ("builder_name", "config_name", "version")]
    stages = [type(each).__name__ + _seed(each) for each in _stages(dataset)]
    text = "/".join(map(str, [*known, getattr(dataset, "split", None), *stages]))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _seed(stage: Any) -> str:
    # Without a seed of the user's each process has drawn its own, and would read another order.
    generator = getattr(getattr(stage, _SEEDED, None), "bit_generator", None)
    return str(generator.state) if generator is not None else ""


def _stages(dataset: Any) -> list[Any]:
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    found: list[Any] = []
    while waiting and len(found) < _MOST:
        stage = waiting.pop()
        if stage is None:
            continue
        found.append(stage)
        for attribute in _INNER:
            inner = getattr(stage, attribute, None)
            waiting += inner if isinstance(inner, list | tuple) else [inner]
    return found
