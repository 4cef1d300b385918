"""What a loader's arguments mean: torch's own words, and ftrun's, as one order, global batch and share."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from ftrun.data.feistel import FEISTEL
from ftrun.data.order import BATCHES, BLOCK, NONE, SAMPLER, TORCH, Share
from ftrun.data.position import TAILS
from ftrun.data.words import checked
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.data.position import Recipe
    from ftrun.data.words import Words

_BLOCK_NAME = re.compile(r"block(?:-v1)?:([1-9]\d*)(?:x([1-9]\d*))?")
_WINDOW = 8
_NAMES = {"feistel6-v1": FEISTEL, "torch": TORCH, "torch-v1": TORCH, "none": NONE}


@dataclass(frozen=True)
class Meaning:
    """What that comes to.

    Attributes:
        order: versioned name, see :mod:`ftrun.data.order`.
        shuffle: as given, or implied by the order.
        seed: of the order, and of the random numbers of each sample.
        global_batch: samples in a step of all ranks; 1 where a batch sampler decides.
        batch_size: samples per rank where the user gave that.
        tail: one of :data:`ftrun.data.position.TAILS`.
        share: which part of each step this rank takes.
        even: whether a step that the world size doesn't divide is refused.
        by_index: whether the dataset has ``__getitem__``, so that a last batch need not be whole.
        batched: whether samples are collated into batches at all.
        sampler: the user's own, where the order is its list.
    """

    order: str
    shuffle: bool
    seed: int
    global_batch: int
    batch_size: int | None
    tail: str
    share: Share
    even: bool
    by_index: bool = True
    batched: bool = True
    sampler: Any = None


def meaning(words: Words, dataset: Any) -> Meaning:
    """Settle what the arguments of a loader mean together.

    Raises:
        UsageError: they can't work together; says what can.
    """
    words = _without_torch_samplers(checked(words), dataset)
    share = _share(words.rank, words.world_size)
    tail = _tail(words)
    order, seed = _order(words), _seed(words)
    if order == TORCH and not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed={seed} is too large for order='torch': torch's generators take 64 bits")
    own_batches = order == BATCHES
    batch_size = None if words.global_batch is not None or own_batches else words.batch_size or 1
    size = 1 if own_batches else words.global_batch if batch_size is None else batch_size * share.world_size
    assert size is not None
    return Meaning(
        order=order,
        shuffle=order != NONE,
        seed=seed,
        global_batch=size,
        batch_size=batch_size,
        tail="uneven" if own_batches else tail,
        share=share,
        even=words.tail != "uneven" if words.even_shares is None else bool(words.even_shares),
        batched=words.batch_size is not None or words.global_batch is not None,
        sampler=words.batch_sampler if own_batches else words.sampler,
    )


def iterable_meaning(words: Words) -> Meaning:
    """The same for a dataset that is read in order: its order is its own business, and steps are whole.

    Raises:
        UsageError: arguments that need an index, or that can't work together.
    """
    if words.sampler is not None or words.batch_sampler is not None:
        raise UsageError("an iterable dataset is read in order, so there is nothing to sample: leave sampler out")
    if words.tail in ("pad", "uneven") or words.even_shares is False:
        raise UsageError(
            "an iterable dataset makes whole global batches that are split evenly: tail is 'drop' or 'error', and the "
            "world size divides the global batch"
        )
    return replace(meaning(replace(words, order=None, tail=words.tail or "drop"), None), by_index=False)


def _share(rank: int, world_size: int) -> Share:
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}: ranks go from 0 to world_size - 1")
    return Share(rank, world_size)


def _seed(words: Words) -> int:
    if words.generator is None:
        return words.seed
    if words.seed:
        raise UsageError("seed and generator both say the order: give one (of a generator its initial_seed() counts)")
    return int(words.generator.initial_seed())


def _tail(words: Words) -> str:
    _check_sizes(words)
    if words.tail is None:
        # Who speaks of batch_size means torch's drop_last, and that is False if nothing is said.
        return "drop" if words.drop_last or words.global_batch is not None else "uneven"
    if words.tail not in TAILS:
        raise UsageError(f"tail is one of {', '.join(map(repr, TAILS))}, not {words.tail!r}")
    if words.drop_last and words.tail != "drop":
        raise UsageError(f"drop_last=True and tail={words.tail!r} contradict each other: leave drop_last out")
    return words.tail


def _check_sizes(words: Words) -> None:
    if words.global_batch is not None and words.batch_size not in (1, None):
        raise UsageError(
            "give one of global_batch (samples in a step of all ranks together) and batch_size (samples per rank)"
        )
    if words.batch_size is None and words.global_batch is None and words.drop_last:
        raise UsageError("batch_size=None yields samples, not batches, so there is no last batch: leave drop_last out")
    if words.batch_sampler is not None:
        others = {
            "batch_size": words.batch_size != 1,
            "global_batch": words.global_batch is not None,
            "shuffle": bool(words.shuffle),
            "sampler": words.sampler is not None,
            "drop_last": words.drop_last,
            "order": words.order is not None,
            "tail": words.tail is not None,
        }
        given = [name for name, said in others.items() if said]
        if given:
            raise UsageError(f"batch_sampler says which samples make which batch: leave out {', '.join(given)}")


def _order(words: Words) -> str:
    if words.batch_sampler is not None or words.sampler is not None:
        if words.shuffle or words.order is not None:
            raise UsageError("sampler says the order: leave out shuffle and order")
        return BATCHES if words.batch_sampler is not None else SAMPLER
    if words.order is None:
        return FEISTEL if words.shuffle else NONE
    name = order_name(words.order)
    if words.shuffle is not None and words.shuffle != (name != NONE):
        raise UsageError(f"shuffle={words.shuffle} and order={words.order!r} contradict each other: leave shuffle out")
    return name


def order_name(order: str) -> str:
    """The versioned name of an order that a user may name in short.

    Raises:
        UsageError: there is no such order.
    """
    block = _BLOCK_NAME.fullmatch(str(order))
    if block:
        return f"{BLOCK}{block[1]}x{block[2] or _WINDOW}"
    if not isinstance(order, str) or order not in _NAMES:
        raise UsageError(
            f"there is no order {order!r}: it is 'feistel6-v1' (any number of samples at no cost), 'torch' (that of "
            "DistributedSampler), 'block:K' or 'block:KxM' (blocks of K neighbours, M of them mixed at a time) or "
            "'none' (the dataset's own); a list of your own is a sampler"
        )
    return _NAMES[order]


def _without_torch_samplers(words: Words, dataset: Any) -> Words:
    """Put torch's own samplers, whose meaning is known, into words of which nothing has to be listed."""
    words = _without_batch_sampler(words)
    sampler = words.sampler if words.sampler is not None else words.batch_sampler
    if sampler is None:
        return words
    if words.sampler is not None and words.shuffle:
        raise UsageError("sampler says the order: leave shuffle out")
    if type(sampler) is DistributedSampler:
        return _without_distributed(words, sampler, dataset)
    if hasattr(sampler, "num_replicas") or (hasattr(sampler, "rank") and hasattr(sampler, "world_size")):
        raise UsageError(
            f"the {type(sampler).__name__} lists one rank's part, and the loader splits every step itself, so that "
            "another number of ranks can go on: give it a sampler over the whole dataset, the same on all ranks"
        )
    if type(sampler) is SequentialSampler and sampler.data_source is dataset:
        return replace(words, sampler=None, order="none")
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if plain and sampler.data_source is dataset:
        generator = words.generator or sampler.generator
        return replace(words, sampler=None, order=FEISTEL, generator=generator)
    return words


def _without_batch_sampler(words: Words) -> Words:
    given = words.batch_sampler
    if type(given) is not BatchSampler:
        return words
    _check_sizes(words)
    said: dict[str, Any] = {"batch_sampler": None, "sampler": given.sampler, "drop_last": given.drop_last}
    if isinstance(given.sampler, DistributedSampler):
        return replace(words, batch_size=given.batch_size, **said)
    # Its batches are of all ranks together, as those of any other batch sampler.
    return replace(words, global_batch=given.batch_size, tail=None if given.drop_last else "uneven", **said)


def _without_distributed(words: Words, sampler: DistributedSampler[Any], dataset: Any) -> Words:
    if len(sampler.dataset) != len(dataset):  # type: ignore[arg-type]
        raise UsageError("the DistributedSampler was made for another dataset than the loader's: give both the same")
    theirs, ours = (sampler.rank, sampler.num_replicas), (words.rank, words.world_size)
    if ours not in ((0, 1), theirs):
        raise UsageError(
            f"the DistributedSampler is for rank {theirs[0]} of {theirs[1]} and the loader for rank {ours[0]} of "
            f"{ours[1]}: leave the sampler out, the loader splits the data itself (order='torch' gives its order)"
        )
    if words.seed not in (0, sampler.seed):
        raise UsageError(f"seed={words.seed}, and the DistributedSampler's is {sampler.seed}: leave the sampler out")
    return replace(
        words,
        sampler=None,
        shuffle=None,
        order="torch" if sampler.shuffle else "none",
        seed=sampler.seed,
        rank=theirs[0],
        world_size=theirs[1],
        drop_last=words.drop_last,
    )


def check_recipe(recipe: Recipe, asked: Meaning) -> None:
    """Whether steps can be made from data that is known, on this number of ranks.

    Raises:
        UsageError: not so; says what would work.
    """
    size, world = recipe.global_batch, asked.share.world_size
    if recipe.order == BATCHES:
        return
    if not asked.batched and size != world:
        raise UsageError(
            f"batch_size=None yields one sample per rank and step, so a run that began on {size} ranks can't go on "
            f"with {world}: use {size} ranks, or batches"
        )
    if size < world or (size % world and asked.even):
        fitting = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        can_differ = size >= world and asked.by_index
        uneven = "; or allow shares that differ by one sample with even_shares=False" if can_differ else ""
        raise UsageError(
            f"a global batch of {size} can't be split evenly over {world} ranks: world sizes that work "
            f"are {fitting}; or start over with a global_batch that is a multiple of {world}{uneven}"
        )
    if recipe.n is not None:
        _check_length(recipe, recipe.n, size, by_index=asked.by_index)


def _check_length(recipe: Recipe, n: int, size: int, *, by_index: bool) -> None:
    if n < 1 or (n < size and recipe.tail in ("drop", "error")):
        way_out = f"Use a global batch of at most {n}"
        if by_index:
            way_out += ", or keep what doesn't fill one with tail='uneven' or 'pad'"
        raise UsageError(
            f"the dataset has {n} samples, less than one global batch of {size}: no step could be made. "
            + (way_out if n else "Check where the dataset gets its data")
        )
    if recipe.tail == "error" and n % size:
        raise UsageError(
            f"tail='error', and the last {n % size} of {n} samples don't fill a global batch of {size}: "
            "change the global batch or the dataset, or leave samples out with tail='drop'"
        )
