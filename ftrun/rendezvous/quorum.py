"""Who may form the next round: most of the last one, so that of two sides of a cut one at most goes on.

A round that a member may not have heard of doesn't take the place of the one before it: that member may go on from
there with others. Until all have taken it up, the next one needs most of both.

Of two halves see :mod:`~ftrun.rendezvous.tie`. No input or output, and no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous.tie import HEIR_WAITS, Tie

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ftrun.rendezvous.model import Round, Terms, Who
    from ftrun.rendezvous.tie import Claim


def surplus(ready: Sequence[Who], base: Mapping[str, Who]) -> int:
    """Whether most of the nodes are there of whom most have to be: above 0 they are, at 0 half of them.

    Args:
        ready: who is there.
        base: of whom most have to be; none before the first round, where anybody will do.
    """
    here = {each.node for each in ready}
    absent = Counter((who.name, who.address) for node, who in base.items() if node not in here)
    # One that was started anew stands for one before it on that machine, which would be heard if it lived.
    anew = Counter((each.name, each.address) for each in ready if each.node not in base)
    present = len(here.intersection(base)) + (absent & anew).total()
    return 2 * present - len(base) if base else 1


@dataclass
class _Vote:
    """A round that counts.

    Attributes:
        key: of it.
        base: of whom most have to be in the next round, by identity.
        incumbent: this leader has formed it itself.
    """

    key: str
    base: dict[str, Who]
    incumbent: bool


class Quorum:
    """What one leader knows of that.

    Args:
        terms: what the leader goes by.
        host: its own node.

    Attributes:
        base: members of the last round that haven't left since, by identity.
        incumbent: this leader has formed the last round itself.
    """

    def __init__(self, terms: Terms, host: str) -> None:
        self._terms = terms
        self._host = host
        self._before: list[_Vote] = []  # rounds that somebody may take for the last one
        self._unaware: set[str] = set()  # who isn't known to have taken up the last one
        self._key = ""
        self._tie = Tie()
        self.base: dict[str, Who] = {}
        self.incumbent = True

    def begin(self, last: Round, base: Iterable[Who], *, incumbent: bool) -> None:
        """A round has formed, here or elsewhere.

        Args:
            last: the round.
            base: those of its members that haven't left since.
            incumbent: it has formed here.
        """
        self._tie.rest()
        if not incumbent:
            self._before, self._unaware = [], set()
        elif self.base:
            self._before.append(_Vote(self._key, self.base, self.incumbent))
        if incumbent:
            self._unaware = {each.node for each in last.members}
        self._key = last.key
        self.base = {each.node: each for each in base}
        self.incumbent = incumbent

    def without(self, node: str) -> None:
        """A member has left on purpose, or has to: the others are counted without it."""
        for base in (self.base, *(each.base for each in self._before)):
            base.pop(node, None)
        self.taken_up(node)

    def taken_up(self, node: str) -> None:
        """A member has taken the last round up, or can't go on from another one."""
        self._unaware.discard(node)
        if not self._unaware:
            self._before.clear()

    def hear(self, claim: Claim | None) -> None:
        """See what has become of the wish for a round."""
        self._tie.hear(claim)

    @property
    def wanted(self) -> str:
        """Key of the round that this leader would claim; empty for none."""
        return self._tie.wanted

    @property
    def _votes(self) -> list[_Vote]:
        return [*self._before, _Vote(self._key, self.base, self.incumbent)]

    def holds(self, ready: Sequence[Who]) -> bool:
        """Whether most of those are there who would otherwise be able to go on without this leader."""
        return all(self._has(each, ready) for each in self._votes)

    def _has(self, vote: _Vote, ready: Sequence[Who]) -> bool:
        more = surplus(ready, vote.base) if self._terms.quorum else 1
        if more or self._terms.witness:
            return more > 0 or (more == 0 and self._tie.is_won(vote.key))
        return vote.incumbent and any(each.node == self._host for each in ready)

    def claims(self, ready: Sequence[Who], now: float, not_before: float) -> bool:
        """Ask for the right to go on with half of the last round; whether that is all that lacks.

        Args:
            ready: who is there.
            now: the leader's clock.
            not_before: the time on it from which the other half has stopped its workers, should it live.
        """
        more = {each.key: surplus(ready, each.base) for each in self._votes}
        halves = [each for each in self._votes if not more[each.key]] if min(more.values()) >= 0 else []
        if not self._terms.witness or not halves or len(ready) < self._terms.min_nodes:
            self._tie.rest()
            return False
        if now >= not_before:
            half = next((each for each in halves if not self._tie.is_won(each.key)), halves[-1])
            self._tie.wish(half.key, now, 0.0 if half.incumbent else HEIR_WAITS)
        return True

    def lacks(self, ready: Sequence[Who]) -> str:
        """What is missing where these don't hold, in words."""
        vote = next((each for each in self._votes if not self._has(each, ready)), self._votes[-1])
        text = f"of the last round's {len(vote.base)} members more than half have to be"
        if self._tie.is_lost(vote.key):
            return f"{text}, as the others may go on"
        if self._tie.wanted:
            return f"{text}, or half of them, for which the shared directory is asked"
        if len(vote.base) == 2 and not self._terms.witness:
            return f"{text} (--rdzv-conf quorum=0 lets one of two go on alone, which is safe where no cut parts them)"
        return f"{text}: start one of them again, or, if they are gone for good, ftrun anew on those that are left"
