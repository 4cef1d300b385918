"""Who may form the next round: most of the last one, so that of two sides of a cut one at most goes on.

A round that a member may not have heard of doesn't take the place of the one before it: that member may go on from
there with others. Until all have taken it up, the next one needs most of both.

Of two halves see :mod:`~ftrun.rendezvous.tie`. No input or output, and no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ftrun.rendezvous.tie import HEIR_WAITS, Half, Need, Tie

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ftrun.rendezvous.model import Round, Terms, Who
    from ftrun.rendezvous.tie import Findings, Wish


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


def absent(ready: Sequence[Who], base: Iterable[Who]) -> tuple[str, ...]:
    """Places of those who aren't there, and weren't started anew; of several of one name, of all of them."""
    places = [each.place for each in base]
    missing = Counter(places) - Counter(each.place for each in ready)
    return tuple(each for each in places if each in missing)


def are_here(places: Iterable[str], ready: Iterable[Who]) -> bool:
    """Whether somebody is there for each of these places."""
    return not Counter(places) - Counter(each.place for each in ready)


@dataclass
class _Vote:
    """A round that counts.

    Attributes:
        key: of it.
        generation: its number.
        base: of whom most have to be in the next round, by identity.
        incumbent: this leader has formed it itself.
    """

    key: str
    generation: int
    base: dict[str, Who]
    incumbent: bool

    @property
    def patience(self) -> float:
        """Seconds that are left to another half of it."""
        return 0.0 if self.incumbent else HEIR_WAITS

    def surplus(self, ready: Sequence[Who]) -> int:
        """As :func:`surplus`, of those alone that have been there all the time."""
        return 2 * len({each.node for each in ready}.intersection(self.base)) - len(self.base)


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
        self._key, self._generation = "", 0
        self._halves: tuple[Half, ...] = ()  # by which the last one may go on
        self._tie = Tie(terms.claim_lasts)
        self.base: dict[str, Who] = {}
        self.incumbent = True

    def begin(self, last: Round, base: Iterable[Who], *, incumbent: bool) -> None:
        """A round has formed, here or elsewhere.

        Args:
            last: the round.
            base: those of its members that haven't left since.
            incumbent: it has formed here.
        """
        self._tie.begin()
        if not incumbent:
            self._before, self._unaware = [], set()
        elif self.base:
            self._before.append(_Vote(self._key, self._generation, self.base, self.incumbent))
        if incumbent:
            self._unaware = {each.node for each in last.members}
        self._key, self._generation, self._halves = last.key, last.generation, last.halves
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
            # Whoever has taken up a round can't go on from one before it.
            self._halves = tuple(each for each in self._halves if not are_here(each.absent, self.base.values()))

    def hear(self, findings: Findings | None, now: float, passed: float) -> None:
        """See what the shared directory says; the arguments are those of :meth:`ftrun.rendezvous.tie.Tie.hear`."""
        self._tie.hear(findings, now, passed)

    def doubt(self) -> None:
        """A new round comes about: the directory is to be asked once more."""
        self._tie.doubt()

    @property
    def wish(self) -> Wish | None:
        """The claim that this leader would make."""
        return self._tie.wish

    @property
    def asked(self) -> tuple[str, ...]:
        """Keys of the rounds of which it has to know who has claimed them."""
        return tuple(dict.fromkeys((*(each.key for each in self._halves), *self._tie.needed)))

    @property
    def unheard(self) -> bool:
        """Whether it waits for that."""
        return (bool(self._halves) and not self._tie.noted) or not all(map(self._tie.has_heard, self.asked))

    @property
    def _votes(self) -> list[_Vote]:
        return [*self._before, _Vote(self._key, self._generation, self.base, self.incumbent)]

    def holds(self, ready: Sequence[Who]) -> bool:
        """Whether most of those are there who would otherwise be able to go on without this leader."""
        return all(self._has(each, ready) for each in self._votes) and not self._unkept(ready)

    def _has(self, vote: _Vote, ready: Sequence[Who]) -> bool:
        more = self._surplus(ready, vote) if self._terms.quorum else 1
        if more or self._terms.witness:
            return more > 0 or (more == 0 and self._tie.is_won(vote.key))
        return vote.incumbent and any(each.node == self._host for each in ready)

    def _surplus(self, ready: Sequence[Who], vote: _Vote) -> int:
        more = surplus(ready, vote.base)
        if more <= 0 or not self._terms.witness or vote.surplus(ready) > 0 or not absent(ready, vote.base.values()):
            return more
        return 0  # those that were started anew don't know to what they may have gone on before, with some who live

    def _unkept(self, ready: Sequence[Who]) -> list[Half]:
        """Those by which this may not go on any more, or not without asking."""
        if not self._terms.quorum:
            return []
        return [each for each in self._halves if not (are_here(each.absent, ready) or self._tie.keeps(each))]

    def lapsed(self) -> str:
        """Why the last round may go on no longer, in words; empty while it may."""
        members = self.base.values()
        return self._tie.lapsed([each for each in self._halves if not are_here(each.absent, members)])

    def halves(self, ready: Sequence[Who]) -> tuple[Half, ...]:
        """Those by which a round of these may go on."""
        found = {each.key: replace(each, number=self._tie.own(each.key) or each.number) for each in self._halves}
        for vote in self._votes if self._terms.witness else ():
            if not self._surplus(ready, vote):
                found[vote.key] = Half(vote.key, self._tie.own(vote.key), absent(ready, vote.base.values()))
        return tuple(found.values())

    def takes_over(self, ready: Sequence[Who]) -> int:
        """The latest round that others may have formed who have lost the right to it to these; 0 where nobody has."""
        later = any(each.number > 1 and each not in self._halves for each in self.halves(ready))
        return self._tie.rivals_round + 1 if later else 0

    def claims(self, ready: Sequence[Who], now: float, not_before: float) -> bool:
        """Ask for the right to go on with half of the last round; whether that is all that lacks.

        Args:
            ready: who is there.
            now: the leader's clock.
            not_before: the time on it from which the other half has stopped its workers, should it live.
        """
        more = {each.key: self._surplus(ready, each) for each in self._votes}
        # Without the half that is here nobody goes on but by a claim, and with an eye on the next one.
        halves = [
            Need(each.key, each.generation, each.patience, again=each.surplus(ready) >= 0)
            for each in self._votes
            if not more[each.key]
        ]
        unkept = [Need(each.key, self._generation, inf) for each in self._unkept(ready)]
        needs = [*unkept, *halves] if min(more.values()) >= 0 else []
        if not self._terms.witness or not needs or len(ready) < self._terms.min_nodes:
            self._tie.rest()
            return False
        self._tie.needed = tuple(each.key for each in needs)
        if now >= not_before:
            self._tie.want([each for each in needs if not self._tie.is_won(each.key)], now)
        return True

    def lacks(self, ready: Sequence[Who]) -> str:
        """What is missing where these don't hold, in words."""
        vote = next((each for each in self._votes if not self._has(each, ready)), None)
        if vote is None:
            lapsed = self._tie.lapsed(self._unkept(ready))
            return lapsed or "the shared directory has to say that these may still go on without the others"
        text = f"of the last round's {len(vote.base)} members more than half have to be"
        if self._tie.is_lost(vote.key, vote.generation):
            return f"{text}, as the others may go on{self._how_long(vote)}"
        if self._tie.own(vote.key) > 1:
            return f"{text}, or half of them, which leave the others a moment to see that they may go on no longer"
        if self._tie.wish:
            return f"{text}, or half of them, for which the shared directory is asked"
        if len(vote.base) == 2 and not self._terms.witness:
            return f"{text} (--rdzv-conf quorum=0 lets one of two go on alone, which is safe where no cut parts them)"
        return f"{text}: start one of them again, or, if they are gone for good, ftrun anew on those that are left"

    def _how_long(self, vote: _Vote) -> str:
        """When these may go on in their place, in words; empty where that is never."""
        lasts = self._terms.claim_lasts
        if not lasts or not self._tie.number(vote.key):
            return ""
        return f": these may once the shared directory has shown no sign of them for {lasts:g} s"
