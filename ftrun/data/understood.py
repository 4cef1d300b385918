"""What a loader's arguments come to for its dataset: a source of samples, and the recipe of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ftrun.data.arguments import check_recipe, iterable_meaning, meaning
from ftrun.data.listed import Listing
from ftrun.data.order import BATCHES
from ftrun.data.position import Recipe
from ftrun.data.source import MapSource
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.data.arguments import Meaning
    from ftrun.data.source import Source
    from ftrun.data.words import Words


class Understood(NamedTuple):
    """What the arguments come to.

    Attributes:
        asked: what the user wants.
        source: the dataset, as the loader sees it.
        recipe: what decides which samples a global batch holds.
    """

    asked: Meaning
    source: Source
    recipe: Recipe


def understood(
    words: Words, dataset: Any, *, num_workers: int, virtual_shards: int | None, epoch_samples: int | None
) -> Understood:
    """Settle what a loader's arguments mean for its dataset.

    Raises:
        UsageError: they can't work together, or not with this dataset; says what can.
    """
    from ftrun.data.iterable.datasets import is_iterable

    if is_iterable(dataset):
        asked, source, order = _in_order(words, dataset, num_workers, virtual_shards, epoch_samples)
    else:
        if virtual_shards is not None or epoch_samples is not None:
            raise UsageError(
                "virtual_shards and epoch_samples are for iterable datasets, and this one has __len__ and "
                "__getitem__: leave them out"
            )
        asked, source, order = _by_index(words, dataset)
    recipe = Recipe(
        n=source.n,
        dataset=source.fingerprint(),
        order=order,
        seed=asked.seed,
        global_batch=asked.global_batch,
        batch_size=asked.batch_size,
        tail=asked.tail,
    )
    # A size per rank gives way to the stored global batch, so it is judged when the first loop begins.
    if asked.batch_size is None or recipe.n == 0:
        check_recipe(recipe, asked)
    return Understood(asked, source, recipe)


def _by_index(words: Words, dataset: Any) -> tuple[Meaning, Source, str]:
    asked = meaning(words, dataset)
    listing = None
    if asked.sampler is not None:
        listing = Listing(asked.sampler, asked.seed, batched=asked.order == BATCHES)
    return asked, MapSource(dataset, listing, even=asked.even), asked.order


def _in_order(
    words: Words, dataset: Any, num_workers: int, virtual_shards: int | None, epoch_samples: int | None
) -> tuple[Meaning, Source, str]:
    from ftrun.data.iterable.source import ShardSource

    asked = iterable_meaning(words)
    source = ShardSource(
        dataset, world_size=asked.share.world_size, virtual_shards=virtual_shards, epoch_samples=epoch_samples
    )
    source.check_workers(num_workers)
    return asked, source, source.order_name(words.order, asked.shuffle)
