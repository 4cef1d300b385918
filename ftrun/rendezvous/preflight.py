"""Before nodes meet for the first time, each tries to connect to the others; who can't is told, and left out.

The leader asks, all at once, and nodes try on threads of their own (:mod:`~ftrun.rendezvous.trying`); workers
that run go on meanwhile. Members of one round have met each other, and aren't asked again: a node that is lost costs no
time here. Only where workers have fallen all are tried once more: it may be that two members don't reach each other any
more, which their workers need, and nobody else notices. Of up to 32 nodes every pair is tried, in both directions. Of
more each node tries the first one, its neighbours and the one half-way round: a node that is cut off shows up in that,
a single broken pair of a large number may not. (All pairs of a thousand nodes would fill the kernels' tables of
neighbours, and be a fault of their own.)

What is decided here has no input, no output and no clock.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.model import Who

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

ALL_PAIRS = 32
"""Up to so many nodes every pair is tried."""
ANSWER_SECONDS = 6.0
"""A node that hasn't said by then whom it reaches is taken to reach all."""


@dataclass(frozen=True)
class Trial:
    """What the leader asks.

    Attributes:
        number: counts up.
        nodes: who is to be tried.
        anew: those, too, that were reached before.
    """

    number: int = 0
    nodes: tuple[Who, ...] = ()
    anew: bool = False

    def encode(self) -> str:
        """As text."""
        nodes = [[each.node, each.name, each.address, each.port] for each in self.nodes]
        return json.dumps([self.number, nodes, self.anew])

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        number, nodes, anew = json.loads(text)
        return cls(number, tuple(Who(*each) for each in nodes), anew)


@dataclass(frozen=True)
class Report:
    """What one node found.

    Attributes:
        number: of the trial.
        failed: whom it can't reach, by identity, and why.
        pending: whom it still tries to reach.
    """

    number: int
    failed: Mapping[str, str] = field(default_factory=dict)
    pending: tuple[str, ...] = ()

    def encode(self) -> str:
        """As text."""
        return json.dumps([self.number, dict(self.failed), self.pending])

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        number, failed, pending = json.loads(text)
        return cls(number, failed, tuple(pending))


def partners(nodes: Sequence[Who], node: str) -> list[Who]:
    """Whom one node tries."""
    places = [place for place, each in enumerate(nodes) if each.node == node]
    if not places:
        return []
    count, place = len(nodes), places[0]
    far = {0, *((place + step) % count for step in (1, -1, count // 2))}
    chosen = set(range(count)) if count <= ALL_PAIRS else far
    found = [nodes[each] for each in sorted(chosen - {place}) if nodes[each].port and nodes[each].address]
    # A host that knows itself by such an address only is known to be reached: at the endpoint.
    near = endpoint.is_loopback(nodes[place].address)
    return [each for each in found if near or not endpoint.is_loopback(each.address)]


@dataclass(frozen=True)
class Broken:
    """One node can't reach another one."""

    one: Who
    other: Who
    why: str

    def __str__(self) -> str:
        return f"{self.one.name} can't reach {self.other.name} at {self.other.address}:{self.other.port}: {self.why}"


def brief(texts: Sequence[str], most: int, between: str) -> str:
    """A list for people, the first few of many."""
    rest = len(texts) - most
    return between.join([*texts[:most], *([f"and {rest} more"] if rest > 0 else [])])


class Preflight:
    """What the leader knows of who reaches whom.

    Attributes:
        trial: what it has asked last.
        broken: pairs that don't reach each other, of those that it has looked at last.
    """

    def __init__(self) -> None:
        self.trial = Trial()
        self.broken: list[Broken] = []
        self._asked_at = 0.0
        self._doubts = False
        self._stale = 0  # the last trial before the doubts

    def doubt(self) -> None:
        """Try members, too, that have met before, until :meth:`trust`."""
        self._doubts, self._stale = True, self.trial.number

    def trust(self) -> None:
        """A round has formed: its members have met."""
        self._doubts = False

    def ask(self, nodes: Sequence[Who], together: Collection[str], now: float) -> bool:
        """Ask for what isn't known of these. Returns whether that is news to publish.

        Args:
            nodes: who is to meet.
            together: identities of those who have met in the last round.
            now: the leader's clock.
        """
        strangers = {each.node for each in nodes} - self._met(together)
        asked = set() if self._doubts and self.trial.number <= self._stale else {each.node for each in self.trial.nodes}
        if len(nodes) < 2 or not strangers or strangers <= asked:
            return False
        self.trial = Trial(self.trial.number + 1, tuple(nodes), self._doubts)
        self._asked_at = now
        return True

    def settled(
        self, nodes: Sequence[Who], reports: Mapping[str, Report], together: Collection[str], now: float
    ) -> bool:
        """Whether all of these have answered, or had the time to."""
        if {each.node for each in nodes} <= self._met(together) or now - self._asked_at >= ANSWER_SECONDS:
            return True
        wanted = {each.node for each in nodes}
        asked = wanted & {each.node for each in self.trial.nodes}
        # That somebody still tries to reach one that is lost meanwhile holds nobody up.
        answered = {
            node
            for node, report in reports.items()
            if report.number >= self.trial.number and wanted.isdisjoint(report.pending)
        }
        return asked <= answered

    def fit(
        self, nodes: Sequence[Who], reports: Mapping[str, Report], together: Collection[str], first: str
    ) -> list[Who]:
        """Those who reach each other: who is in the way of most is left out, a newcomer before an old member.

        Args:
            nodes: who is to meet, in order.
            reports: what they have found.
            together: identities of those who have met in the last round.
            first: who stays in any case: the leader's own node.
        """
        known = {each.node: each for each in nodes}
        self.broken = [
            Broken(each, known[other], why)
            for each in nodes
            if each.node in reports
            for other, why in reports[each.node].failed.items()
            if other in known and not {each.node, other} <= self._met(together)
        ]
        kept, pairs = list(nodes), list(self.broken)
        while pairs:
            met = Counter(who.node for pair in pairs for who in (pair.one, pair.other))
            rank = {each.node: place for place, each in enumerate(kept)}
            out = max(met, key=lambda node: (node != first, node not in together, met[node], rank[node]))
            kept = [each for each in kept if each.node != out]
            pairs = [pair for pair in pairs if out not in (pair.one.node, pair.other.node)]
        return kept

    def _met(self, together: Collection[str]) -> set[str]:
        return set() if self._doubts else set(together)
