"""What one node has of snapshots that aren't committed: each node says it before an attempt begins. No torch.

A part counts where its bytes can still be brought to the checkpoint root: sealed in memory, or in the local tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.keeper.work import NodeWork, works
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.loading.sealed import problem_of
from ftrun.checkpoint.manifest import is_count
from ftrun.checkpoint.memory.outcomes import Outcomes
from ftrun.checkpoint.plan.pieces import ranks_of, ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ftrun.checkpoint.keeper.local import LocalTier
    from ftrun.checkpoint.memory.tier import Tier

_MOST = 8
"""Attempts that a node tells of: two slots hold two, and a local tier what a slow root hasn't taken yet."""


@dataclass(frozen=True)
class Holding:
    """A node's part of one attempt.

    Attributes:
        name: the attempt.
        world_size: number of ranks that took it.
        ranks: those whose parts are here, whole.
        copied: they are copies of another node's.
        node: who has them, where that is known.
    """

    name: AttemptName
    world_size: int
    ranks: tuple[int, ...]
    copied: bool = False
    node: int = 0

    def to_json(self) -> list[Any]:
        """As JSON: short, however many ranks there are."""
        return [str(self.name), self.world_size, ranks_text(self.ranks), self.copied]

    @classmethod
    def from_json(cls, document: Any) -> Holding:
        """Read it back.

        Raises:
            ValueError: it is something else.
        """
        try:
            name, world_size, ranks, copied = document
            made = cls(AttemptName.of(name), world_size, ranks_of(ranks), bool(copied))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{document!r:.80} says nothing of a snapshot") from error
        if not is_count(world_size) or made.ranks[-1] >= world_size:
            raise ValueError(f"{document!r:.80} has ranks outside its world")
        return made


def of_node(tier: Tier, local: LocalTier | None, run_id: str) -> list[Holding]:
    """What a node has, newest first. What will never be committed, as its keeper has said, is left out.

    Args:
        tier: its memory tier; it need not exist.
        local: its local tier, where there is one.
        run_id: identity of the run.
    """
    sealed = [(slot, seal) for slot, seal in tier.sealed() if not problem_of(seal)]
    found = [*works(sealed).values(), *_copied(local)]
    outcomes = Outcomes(tier)
    parts: dict[AttemptName, Holding] = {}
    for work in found:
        outcome = outcomes.get(str(work.name))
        if work.first.run_id == run_id and (outcome is None or outcome.committed):
            ranks = {each.rank for each in work.seals}
            if work.name in parts:
                ranks |= set(parts[work.name].ranks)
            parts[work.name] = Holding(work.name, work.first.world_size, tuple(sorted(ranks)))
    return [parts[name] for name in sorted(parts, reverse=True)[:_MOST]]


def _copied(local: LocalTier | None) -> list[NodeWork]:
    if local is None:
        return []
    try:
        return [work for work in local.works() if work.files and not work.committed]
    except OSError:
        return []


@dataclass(frozen=True)
class Parts:
    """What all nodes together have of one attempt.

    Attributes:
        name: the attempt.
        world_size: number of ranks that took it.
        ranks: those whose parts some node has, and brings to the root.
        copies: copies of the parts of others; no part is in two of them.
    """

    name: AttemptName
    world_size: int
    ranks: frozenset[int]
    copies: tuple[Holding, ...] = ()

    def missing(self, besides: Iterable[int] = ()) -> tuple[int, ...]:
        """The ranks whose parts no node has.

        Args:
            besides: ranks that count as there.
        """
        return tuple(sorted(set(range(self.world_size)) - self.ranks - set(besides)))

    def adopted(self) -> Parts:
        """As :attr:`ranks` are once the copies are brought to the root, too."""
        return Parts(self.name, self.world_size, self.ranks.union(*(each.ranks for each in self.copies)))


def together(found: Collection[Holding], newer_than: AttemptName | None, since: int) -> list[Parts]:
    """What the nodes have of each attempt, newest first.

    Args:
        found: by the nodes.
        newer_than: the newest commit; older attempts are of no interest.
        since: epoch at which the lineage began.
    """
    names = {each.name for each in found if each.name.epoch >= since}
    wanted = {name for name in names if newer_than is None or name > newer_than}
    return [_together(name, [each for each in found if each.name == name]) for name in sorted(wanted, reverse=True)]


def _together(name: AttemptName, found: Collection[Holding]) -> Parts:
    ranks = frozenset(rank for each in found if not each.copied for rank in each.ranks)
    copies: list[Holding] = []
    taken = set(ranks)
    for each in sorted(found, key=lambda each: each.node):
        # Of a node that still has a part of its own, nothing is brought there by another.
        if each.copied and taken.isdisjoint(each.ranks):
            copies.append(each)
            taken |= set(each.ranks)
    return Parts(name, next(iter(found)).world_size, ranks, tuple(copies))
