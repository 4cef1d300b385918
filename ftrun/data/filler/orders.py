"""Orders of an epoch as the filler knows them: computed from the recipe, or written down by a rank that can."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ftrun import durable
from ftrun.data.listed_order import ListedOrder
from ftrun.data.order import TORCH, order_of
from ftrun.errors import FtrunError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ftrun.data.position import Recipe


class Inverse(Protocol):
    """What the filler asks an order."""

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices at places."""
        ...

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of indices; -1 for those that don't come."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """One epoch.

    Attributes:
        order: of its samples.
        usable: how many of them count.
        ends: where each batch ends, where batches are not all of one size.
    """

    order: Inverse
    usable: int
    ends: NDArray[np.int64] | None = None


def must_be_written(recipe: Recipe) -> bool:
    """Whether the order of a recipe can't be computed without torch, or without the user's sampler."""
    if recipe.n is None or recipe.order == TORCH:
        return True
    try:
        order_of(recipe, 0)
    except FtrunError:
        return True
    return False


def computed(recipe: Recipe, epoch: int) -> EpochOrder | None:
    """An epoch's order, where the recipe says it."""
    if recipe.n is None or recipe.usable is None:
        return None
    return EpochOrder(order_of(recipe, epoch), recipe.usable)


def write(path: Path, indices: NDArray[np.int64], ends: NDArray[np.int64] | None) -> None:
    """Write an epoch's order down.

    Raises:
        OSError: the disk doesn't take it.
    """
    if ends is not None:
        durable.write(path.with_suffix(".ends"), ends.astype("<i8").tobytes())
    if not path.exists() or path.stat().st_size != 8 * len(indices):
        durable.write(path, indices.astype("<i8").tobytes())


def read(path: Path, recipe: Recipe) -> EpochOrder | None:
    """An order that was written; None where there is none."""
    try:
        indices: NDArray[np.int64] = np.memmap(path, dtype="<i8", mode="r")
    except (OSError, ValueError):
        return None
    ends = None
    with contextlib.suppress(OSError, ValueError):
        ends = np.fromfile(path.with_suffix(".ends"), dtype="<i8")
    usable = len(indices) if recipe.usable is None else min(recipe.usable, len(indices))
    return EpochOrder(ListedOrder(indices), usable, ends)
