"""From the evidence of all nodes to what went wrong with the job. Pure.

Each node decides by its own ranks; what is said of all of them is found out afterwards, in the same way as on one node:
causes before consequences, then time decides, by clocks that were compared. Where two causes lie so near to each other
that the clocks don't tell them apart, that is said. A rank that lost its connection is a victim of whatever ended the
one at the other end, also where its node noticed it earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftrun.launch.evidence.model import Evidence
from ftrun.launch.failures import failure
from ftrun.launch.failures.failure import CLEARLY_BEFORE, Failure, Kind
from ftrun.launch.failures.symptoms import Standing
from ftrun.launch.watching.culprit import waits_for_others

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftrun.launch.evidence.model import RankEvidence
    from ftrun.launch.failures.symptoms import Symptom

MEMBERSHIP = "membership"
"""The kind of an end that no rank is at fault for: nodes were lost, or came or went."""

LAUNCHER = "launcher"
"""The kind of an end that a launcher has brought about which couldn't go on."""

_UNKNOWN = float("inf")
_MOST_NAMES = 8


@dataclass(frozen=True)
class Verdict:
    """What went wrong.

    Attributes:
        kind: for people: that of the failure, :data:`MEMBERSHIP` or :data:`LAUNCHER`.
        failure: with the first rank at fault, its node, and victims on all nodes; rank -1 where none is at fault.
        evidence: of that node; None where nothing came from it.
        order: what is to be said about the order in time, in sentences.
    """

    kind: str
    failure: Failure
    evidence: Evidence | None = None
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class _End:
    """One rank that is over."""

    rank: RankEvidence
    symptom: Symptom
    evidence: Evidence

    @property
    def moment(self) -> float:
        """When, by the clock of the first node."""
        return failure.moment(self.rank) - ahead(self.evidence)

    @property
    def key(self) -> tuple[int, bool]:
        return self.symptom.standing, "log says" not in self.symptom.note


def ahead(evidence: Evidence) -> float:
    """Seconds that a node's clock is ahead of the first node's, as far as is known."""
    clock = evidence.seat.clock if evidence.seat is not None else None
    return clock.seconds if clock is not None else 0.0


def uncertainty(evidence: Evidence) -> float:
    """How far :func:`ahead` may be wrong; without end where the clocks were not compared."""
    clock = evidence.seat.clock if evidence.seat is not None else None
    return clock.uncertainty if clock is not None else _UNKNOWN


def explain(seen: Sequence[Evidence], gone: Mapping[int, str], decided: int | None = None) -> Verdict | None:
    """Name the first rank at fault over all nodes, and what went wrong.

    Args:
        seen: evidence of each node of which there is any.
        gone: nodes that were lost or left, by number, in words.
        decided: the node that has decided what follows: it is believed where nothing else tells.

    Returns:
        None where nothing went wrong.
    """
    over = [_End(_rank(each, rank), symptom, each) for each in seen for rank, symptom in failure.ends(each).items()]
    causes = [each for each in over if each.symptom.standing in (Standing.SIGNAL, Standing.ERROR)]
    if causes:
        first, order = _first(causes, decided)
        return _verdict(failure.explain(first.evidence), first.evidence, over, order)
    if gone:
        return Verdict(MEMBERSHIP, _without_a_rank(gone, over))
    hung = any(each.hang is not None for each in seen)
    if not over and not hung:
        return None
    return _consequence(seen, over, decided)


def _first(causes: Sequence[_End], decided: int | None) -> tuple[_End, tuple[str, ...]]:
    """The cause that was there first, and what there is to say about that."""
    first = min(causes, key=lambda each: (each.key, each.moment, each.rank.rank))
    if first.symptom.standing is Standing.SIGNAL:
        first = min(
            (each for each in causes if each.symptom.standing is Standing.ERROR and _clearly_before(each, first)),
            key=lambda each: each.moment,
            default=first,
        )
    rivals = [each for each in causes if each.key == first.key and not _told_apart(first, each)]
    if not rivals:
        return first, ()
    near = [first, *rivals]
    of_decider = [each for each in near if each.evidence.node == decided]
    believed = min(of_decider or [first], key=lambda each: (each.moment, each.rank.rank))
    return believed, (_doubt(believed, [each for each in near if each.evidence is not believed.evidence]),)


def _clearly_before(error: _End, end: _End) -> bool:
    doubt = 0.0 if error.evidence is end.evidence else uncertainty(error.evidence) + uncertainty(end.evidence)
    return error.rank.error is not None and error.moment + CLEARLY_BEFORE + doubt < end.moment


def _told_apart(one: _End, other: _End) -> bool:
    """Whether it is known which of them was first; of one node, its own clock tells."""
    if one.evidence is other.evidence:
        return True
    return abs(one.moment - other.moment) > uncertainty(one.evidence) + uncertainty(other.evidence)


def _doubt(believed: _End, others: Sequence[_End]) -> str:
    named = sorted(others, key=lambda each: each.rank.rank)
    names = ", ".join(f"rank {each.rank.rank} on node {each.evidence.node}" for each in named[:_MOST_NAMES])
    names += ", ..." if len(named) > _MOST_NAMES else ""
    doubt = max(uncertainty(each.evidence) for each in others) + uncertainty(believed.evidence)
    apart = max(abs(each.moment - believed.moment) for each in others)
    if doubt == _UNKNOWN:
        why = "their nodes' clocks were not compared"
    elif not math.isfinite(apart):
        why = "it isn't known when they ended"
    else:
        why = f"they ended within {apart:.3g} s of each other, and the nodes' clocks are known to {doubt:.2g} s"
    return f"whether {names} or rank {believed.rank.rank} was first can't be told: {why}"


def _verdict(what: Failure, evidence: Evidence | None, over: Sequence[_End], order: tuple[str, ...] = ()) -> Verdict:
    victims = tuple(sorted(each.rank.rank for each in over if each.rank.rank != what.rank))
    return Verdict(what.kind.value, replace(what, victims=victims), evidence, order)


def _consequence(seen: Sequence[Evidence], over: Sequence[_End], decided: int | None) -> Verdict:
    """Nothing is known of a cause: ranks waited in vain, or lost each other. Seen together they may tell more."""
    ordered = sorted(seen, key=lambda each: each.node != decided)
    ranks = tuple(rank for each in ordered for rank in by_first_clock(each).ranks)
    hang = next((each.hang for each in ordered if each.hang is not None), None)
    what = failure.explain(Evidence(ranks, node=ordered[0].node, hang=hang))
    if not over and len(seen) > 1 and all(waits_for_others(each.stack) for each in ranks if each.exit_code is None):
        message = "all ranks wait for each other, as they do where two nodes don't reach each other"
        return Verdict(what.kind.value, replace(what, rank=-1, message=message, why=(message, *what.why[:1])))
    evidence = next((each for each in seen if any(rank.rank == what.rank for rank in each.ranks)), ordered[0])
    return _verdict(replace(what, node=evidence.node), evidence, over)


def by_first_clock(evidence: Evidence) -> Evidence:
    """A node's evidence with the times that the clock of the first node showed."""
    late = ahead(evidence)
    if not late:
        return evidence
    ranks = tuple(_earlier(each, late) for each in evidence.ranks)
    return replace(evidence, ranks=ranks, time=evidence.time - late if evidence.time else 0.0)


def _earlier(rank: RankEvidence, late: float) -> RankEvidence:
    error = rank.error
    if error is not None and error.time:
        error = replace(error, time=error.time - late)
    return replace(rank, exited_at=rank.exited_at - late if rank.exited_at else 0.0, error=error)


def _without_a_rank(gone: Mapping[int, str], over: Sequence[_End]) -> Failure:
    """Nodes were lost, or have left."""
    first = min(gone)
    return Failure(
        kind=Kind.UNKNOWN,
        rank=-1,
        exit_code=0,
        message=", ".join(gone[each] for each in sorted(gone)),
        victims=tuple(sorted(each.rank.rank for each in over)),
        node=first,
        blame="infrastructure",
        why=tuple(gone[each] for each in sorted(gone)),
    )


def _rank(evidence: Evidence, rank: int) -> RankEvidence:
    return next(each for each in evidence.ranks if each.rank == rank)
