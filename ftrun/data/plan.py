"""The requests of a loop, as torch's loaders want them: a batch sampler; and the view of it that users get."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data

from ftrun.data.position import Position, advance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.data.order import Share
    from ftrun.data.position import Recipe
    from ftrun.data.source import Source


class Ahead(NamedTuple):
    """What is known of a batch that has been asked for.

    Attributes:
        after: the position when all ranks have consumed it.
        padding: samples at its end that are repeats.
    """

    after: Position
    padding: int


class Plan(torch.utils.data.Sampler[Any]):
    """Tickets from ``start`` to the end of its epoch. The loader moves ``start`` before each loop.

    Attributes:
        start: where the next loop begins.
        ahead: batches asked for that the loop hasn't got yet, oldest first.
    """

    def __init__(self, source: Source, recipe: Recipe, share: Share) -> None:
        self.source = source
        self.recipe = recipe
        self.share = share
        self.start = Position()
        self.ahead: deque[Ahead] = deque()

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: what the source finds wrong is said now, and not when workers are running.
        return self._noted(self.source.tickets(self.recipe, self.share, self.start))

    def _noted(self, tickets: Iterator[Any]) -> Iterator[Any]:
        ahead: deque[Ahead] = deque()
        self.ahead = ahead
        at, size, usable = self.start, self.recipe.global_batch, self.recipe.usable
        for ticket in tickets:
            at = getattr(ticket, "after", None) or advance(at, size, usable)
            ahead.append(Ahead(at, getattr(ticket, "padding", 0)))
            yield ticket

    def __len__(self) -> int:
        steps = self.recipe.steps
        if steps is None:
            steps = getattr(self.source, "steps", None)
        if steps is None:
            raise TypeError("nobody knows how many batches this loader yields: its dataset has no length")
        return steps


class Batches(torch.utils.data.BatchSampler):
    """What users and frameworks see as ``loader.batch_sampler``: this rank's indices, batch by batch.

    Iterating over it moves nothing: it goes from the committed position to the end of the epoch.
    """

    def __init__(self, plan: Plan, *, batch_size: int, drop_last: bool) -> None:
        super().__init__(Indices(plan), batch_size, drop_last)
        self._plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan
        for ticket in plan.source.tickets(plan.recipe, plan.share, plan.start):
            yield getattr(ticket, "indices", ticket)

    def __len__(self) -> int:
        return len(self._plan)


class Indices(torch.utils.data.Sampler[int]):
    """What users and frameworks see as ``loader.sampler``: this rank's indices, one by one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[int]:
        plan = self._plan
        for ticket in plan.source.tickets(plan.recipe, plan.share, plan.start):
            yield from getattr(ticket, "indices", ())

    def __len__(self) -> int:
        recipe, share = self._plan.recipe, self._plan.share
        if recipe.usable is None:
            raise TypeError("nobody knows how many samples this loader yields: its dataset has no length")
        if recipe.tail == "pad":
            return len(self._plan) * len(range(share.rank, recipe.global_batch, share.world_size))
        whole = recipe.usable - recipe.usable % recipe.global_batch
        size = len(range(share.rank, recipe.global_batch, share.world_size))
        rest = recipe.usable - whole
        tail = max(1, len(range(share.rank, rest, share.world_size))) if rest else 0
        return whole // recipe.global_batch * size + tail
