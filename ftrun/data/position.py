"""How far a run has got in its data, and whether a stored position belongs to this data.

The position is two numbers that are the same on every rank: the epoch, and how many samples all ranks
together have consumed in it. Nothing here depends on the world size, the number of loader workers or
prefetching, so neither does what a checkpoint stores. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ftrun.errors import StateMismatch

STATE_VERSION = 1

TAILS = ("drop", "error", "pad", "uneven")
"""Samples that don't fill a last global batch are left out, refused, filled up with marked repeats, or make a smaller
last batch."""


class Position(NamedTuple):
    """A point in the data, between two global batches.

    Attributes:
        epoch: from 0.
        samples: samples of this epoch consumed by all ranks together; less than an epoch, see
            :func:`advance`.
    """

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which samples a global batch holds: equal recipes, equal data.

    Attributes:
        n: number of samples in an epoch; None where nobody knows before its end.
        dataset: fingerprint of the dataset, see :func:`fingerprint`.
        order: versioned name of the order of samples within an epoch.
        seed: seed of the order and of the random numbers drawn for each sample.
        global_batch: samples that all ranks together consume in one step.
        batch_size: samples per rank as the user gave them, or None where the user gave the global batch. A
            run that was started so keeps the global batch of its first start when the world size changes.
        tail: what happens to samples that don't fill a last global batch, one of :data:`TAILS`.
    """

    n: int | None
    dataset: str
    order: str
    seed: int
    global_batch: int
    batch_size: int | None
    tail: str

    @property
    def usable(self) -> int | None:
        """Samples that count in an epoch, for every world size; None where nobody knows before its end."""
        whole = self.tail in ("drop", "error")
        return self.n if self.n is None or not whole else self.n - self.n % self.global_batch

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch, the same for every world size; None where nobody knows before its end."""
        return None if self.usable is None else -(-self.usable // self.global_batch)


def advance(position: Position, global_batch: int, usable: int | None) -> Position:
    """The position one global batch later; the end of an epoch is ``(epoch + 1, 0)``."""
    samples = position.samples + global_batch
    ended = usable is not None and samples >= usable
    return Position(position.epoch + 1, 0) if ended else Position(position.epoch, samples)


def fingerprint(dataset: Any, n: int) -> str:
    """A cheap name for a dataset: its class, its length and its own ``fingerprint``, if it has one.

    Args:
        dataset: may have an attribute ``fingerprint``, a string or a method without arguments that returns
            one.
        n: length of the dataset.
    """
    own = getattr(dataset, "fingerprint", None)
    own = own() if callable(own) else own
    parts = [type(dataset).__qualname__, str(n)]
    return "/".join(parts if own is None else [*parts, str(own)])


def to_state(position: Position, recipe: Recipe) -> dict[str, int | str | None]:
    """What a checkpoint stores: plain JSON values, the same on every rank."""
    return {
        "v": STATE_VERSION,
        "epoch": position.epoch,
        "samples": position.samples,
        "global_batch": recipe.global_batch,
        "batch_size": recipe.batch_size,
        "seed": recipe.seed,
        "n": recipe.n,
        "order": recipe.order,
        "tail": recipe.tail,
        "dataset": recipe.dataset,
    }


def check(state: Mapping[str, Any], expected: Recipe) -> None:
    """Compare a stored data state with the data at hand.

    Raises:
        StateMismatch: it was stored for other data; names every difference and the ways out.
    """
    if not isinstance(state, Mapping) or "v" not in state:
        what = f"keys {sorted(map(str, state))}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise StateMismatch(
            f"this is no position of a loader of ftrun's, which is a dict with a version 'v', but {what}: give what "
            "state_dict() returned, or start over with --fresh"
        )
    if state["v"] != STATE_VERSION:
        raise StateMismatch(
            f"this version of ftrun reads data positions of version {STATE_VERSION}, and the checkpoint has "
            f"version {state['v']!r}: resume with the version of ftrun that wrote it, or start over "
            "with --fresh"
        )
    differences = _differences(state, expected)
    if differences:
        lines = "\n".join(f"  {name}: was {was!r}, now {now!r}" for name, was, now in differences)
        raise StateMismatch(
            "the data position in the checkpoint belongs to other data than this loader "
            f"reads:\n{lines}\nPut the old value back to continue at the exact sample, or start over with "
            "--fresh."
        )
    _check_numbers(state)


def from_state(state: Mapping[str, Any], expected: Recipe) -> tuple[Position, Recipe]:
    """Read a stored data state: the position, and the recipe with the run's own global batch.

    Raises:
        StateMismatch: see :func:`check`.
    """
    check(state, expected)
    return Position(state["epoch"], state["samples"]), replace(expected, global_batch=state["global_batch"])


def _differences(state: Mapping[str, Any], expected: Recipe) -> list[tuple[str, Any, Any]]:
    names = ["n", "dataset", "order", "seed", "tail"]
    per_rank = (state.get("batch_size"), expected.batch_size)
    if None in per_rank:
        names.append("global_batch")
    elif per_rank[0] != per_rank[1]:
        names.append("batch_size")
    # The same size per rank as at the first start: another world size is no difference, the global batch
    # stays.
    now = vars(expected)
    return [(name, state.get(name), now[name]) for name in names if state.get(name) != now[name]]


def _check_numbers(state: Mapping[str, Any]) -> None:
    epoch, samples, global_batch = state.get("epoch"), state.get("samples"), state.get("global_batch")
    sound = (
        type(epoch) is type(samples) is type(global_batch) is int
        and epoch >= 0
        and samples >= 0
        and global_batch > 0
        and samples % global_batch == 0
        and (state["n"] is None or samples < state["n"])
    )
    if not sound:
        raise StateMismatch(
            f"the data position in the checkpoint makes no sense (epoch {epoch!r}, samples {samples!r}, "
            f"global_batch {global_batch!r}, n {state['n']!r}): resume from another checkpoint, or start "
            "over with --fresh"
        )
