"""The arguments of a loader as the user gave them, and whether each by itself is of the kind that it should be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch

from ftrun.errors import UsageError


@dataclass(frozen=True)
class Words:
    """What the user said. Names and meanings are those of :class:`ftrun.data.loader.DataLoader`."""

    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    generator: torch.Generator | None = None
    global_batch: int | None = None
    seed: int = 0
    order: str | None = None
    tail: str | None = None
    even_shares: bool | None = None
    rank: int = 0
    world_size: int = 1


def checked(words: Words) -> Words:
    """The same, with plain numbers.

    Raises:
        UsageError: an argument of another kind.
    """
    flag("shuffle", words.shuffle)
    flag("drop_last", words.drop_last)
    flag("even_shares", words.even_shares)
    for name, value in (("sampler", words.sampler), ("batch_sampler", words.batch_sampler)):
        _check_sampler(name, value)
    if words.generator is not None and not isinstance(words.generator, torch.Generator):
        raise UsageError(f"generator is a torch.Generator, or left out, not {words.generator!r}")
    a_batch = "a batch has at least one sample"
    return replace(
        words,
        batch_size=None if words.batch_size is None else whole("batch_size", words.batch_size, 1, a_batch),
        global_batch=None if words.global_batch is None else whole("global_batch", words.global_batch, 1, a_batch),
        seed=whole("seed", words.seed),
        rank=whole("rank", words.rank),
        world_size=whole("world_size", words.world_size),
    )


def check_torch_words(words: Mapping[str, Any], *, in_order: Any) -> None:
    """Refuse what torch would take and stumble over later, or what an exact position can't.

    Raises:
        UsageError: says what works.
    """
    workers = whole("num_workers", words["num_workers"], 0, "a number of processes")
    if words["prefetch_factor"] is not None:
        whole("prefetch_factor", words["prefetch_factor"], 1, "batches that each worker has ready")
    for name in ("pin_memory", "persistent_workers"):
        flag(name, words[name])
    for name in ("collate_fn", "worker_init_fn"):
        if words[name] is not None and not callable(words[name]):
            raise UsageError(f"{name} is a function, not {words[name]!r}")
    flag("in_order", in_order)
    timeout = words["timeout"]
    if isinstance(timeout, bool | str) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise UsageError(f"timeout is a number of seconds, 0 for none, not {timeout!r}")
    if timeout and not workers:
        raise UsageError(
            f"timeout={timeout} is for batches that workers load: leave it out, or give the loader num_workers"
        )
    if not in_order:
        raise UsageError(
            "in_order=False yields batches in the order in which they happen to be ready, which has no "
            "exact position: leave it out, or use torch.utils.data.DataLoader for data that needs no resume"
        )


def whole(name: str, value: Any, least: int | None = None, why: str = "") -> int:
    """A whole number, of Python's or NumPy's, as Python's.

    Raises:
        UsageError: it is none, or less than the least.
    """
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is not None and (least is None or number >= least):
        return number
    from_least = "" if least is None else f" from {least}"
    raise UsageError(f"{name} is a whole number{from_least}{why and f': {why}'}, not {value!r}")


def flag(name: str, value: Any) -> None:
    """Refuse text where a yes or no is meant: ``"false"`` would be a yes.

    Raises:
        UsageError: it is neither.
    """
    if value is not None and not (isinstance(value, bool | int) or type(value).__name__ in ("bool_", "bool")):
        raise UsageError(f"{name} is True or False, not {value!r}")


def _check_sampler(name: str, sampler: Any) -> None:
    if sampler is None:
        return
    if not isinstance(sampler, Iterable) and not hasattr(sampler, "__getitem__"):
        raise UsageError(f"{name} lists dataset indices when it is iterated over, and {sampler!r} can't be")
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"{name} is a {type(sampler).__name__}, which can be read only once, and each epoch asks for its list: "
            "give a list, or an object whose iter() begins anew"
        )
