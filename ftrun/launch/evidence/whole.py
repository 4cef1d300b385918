"""What all nodes of an attempt have to say of its end, together. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftrun.launch.failures import across, failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.launch.evidence.model import RankEvidence
    from ftrun.launch.evidence.parts import Part
    from ftrun.launch.failures.across import Verdict


@dataclass(frozen=True)
class Whole:
    """What all nodes have to say.

    Attributes:
        attempt: number of the attempt.
        parts: of each node, by number; of those that are lost, what the others know.
        missing: names of nodes of which nothing has come yet.
        verdict: over all of them.
    """

    attempt: int
    parts: tuple[Part, ...]
    missing: tuple[str, ...]
    verdict: Verdict

    @property
    def decider(self) -> Part | None:
        """The node that has decided what follows."""
        return next((each for each in self.parts if each.decision is not None), None)

    @property
    def of_fault(self) -> Part | None:
        """The node at fault, where something came from it."""
        node = self.verdict.failure.node
        return next((each for each in self.parts if each.node == node and not each.lost), None)

    @property
    def zero(self) -> float:
        """The moment that others are told relative to, by the clock of the first node: the first end, or the notice."""
        ends = [moment(part, each) for part in self.parts for each in part.evidence.ranks if each.fell]
        seen = [part.evidence.time - across.ahead(part.evidence) for part in self.parts if part.evidence.time]
        return min([each for each in ends if each] or seen, default=0.0)


def moment(part: Part, rank: RankEvidence) -> float:
    """When a rank failed, or ended well, by the clock of the first node; 0.0 where that isn't known.

    A process that fails takes a second to end, sometimes.
    """
    at = failure.moment(rank)
    return at - across.ahead(part.evidence) if math.isfinite(at) else 0.0


def as_decided(whole: Whole) -> failure.Failure:
    """The verdict, in the words of the node that decided where it says the same: it may know that this was scripted."""
    what, decider = whole.verdict.failure, whole.decider
    said = decider.failure if decider is not None else None
    if said is None or (said.rank, said.kind) != (what.rank, what.kind):
        return what
    return replace(said, victims=what.victims)


def role(whole: Whole, part: Part, rank: RankEvidence) -> str:
    """What part a rank had in the end of the attempt, in words."""
    what = whole.verdict.failure
    if rank.rank == what.rank:
        return "at fault"
    if rank.rank in what.victims:
        return "fell with it"
    if part.lost:
        return "left with its node" if part.word.endswith(" left") else "lost with its node"
    if rank.exit_code == 0:
        return "had finished"
    return "left in order" if rank.exit_code is not None else "was ended for it"


def restart_of(whole: Whole) -> Mapping[str, Any] | None:
    """Where the seconds of the restart went, as far as it is known: by the node that decided, where it tells."""
    told = [each for each in whole.parts if each.restart is not None]
    return min(told, key=lambda each: each.decision is None).restart if told else None
