"""Half of a round's members are there, and nobody knows what has become of the other half.

Where nodes share a directory, it is the witness: of two halves of a round the one goes on that has claimed the round
there first, by a file that can be made once. The half in which that round was led claims it at once, the other one
leaves it some seconds for that. So the loss of either of two nodes is survived, and of two that don't reach each other
one at most goes on.

A claim is a lease. Its half, and whatever that becomes, keeps the note in the directory changing. Where the note hasn't
changed for long (:attr:`~ftrun.rendezvous.model.Terms.claim_lasts`), the other half claims the round once more: the
second file of that round ends the claim of the first, for good. No clock is compared with another one's:

    the half that goes on   looks for the next claim every time it has written the note. Once there is one, or for 3/4
                            of that time nothing could be written, it stops its workers, and forms no round any more.
    the half that waits     counts the time in which it could read the note and saw no change, with its own clock; then
                            it claims, and waits some seconds more until whoever is awake has seen that. Those who were
                            started anew don't count for it: others may have gone on with them as most of that round.

Who was stopped meanwhile, clocks and all, finds the claim or its own lateness at its first look, and can't commit what
its workers did until then: its epoch is older. Whoever can't read the directory claims nothing.

Without a shared directory the half goes on in which the round was led. No input or output, and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

HEIR_WAITS = 2.0
"""Seconds that the half without the leader of the last round leaves to the other one."""
_GIVES_UP_AFTER = 0.75
"""Of the time that a claim lasts: a half that couldn't renew it stops its workers, which takes a while."""
_GRACE, _GRACE_SHARE = 5.0, 0.5
"""Seconds after a later claim in which the half before sees it, and stops; at most this share of what a claim lasts."""
_LONGEST_SILENCE = 2.0
"""What lies between two looks at the directory counts for no more: nobody was seen to be silent meanwhile."""


@dataclass(frozen=True)
class Claim:
    """The latest claim on a round, as the directory has it.

    Attributes:
        key: of the round.
        number: how many there have been, 0 for none.
        mine: the leader that asked has made it.
    """

    key: str
    number: int = 1
    mine: bool = True


@dataclass(frozen=True)
class Half:
    """A round of which no more than half has gone on, by a claim.

    Attributes:
        key: of that round.
        number: of the claim, from 1; a later one ends it.
        absent: places of the other half.
    """

    key: str
    number: int
    absent: tuple[str, ...]


@dataclass(frozen=True)
class Findings:
    """What a leader has found in the shared directory.

    Attributes:
        at: its monotonic clock before it looked.
        claims: on the rounds that it asked for.
        noted: its clock before it last wrote its note, which all see who wait for its silence; 0.0 for never.
        rival: another leader's note, which changes as long as that one lives; empty where there is none.
        rivals_round: that one's latest round.
    """

    at: float
    claims: tuple[Claim, ...] = ()
    noted: float = 0.0
    rival: str = ""
    rivals_round: int = 0


@dataclass(frozen=True)
class Need:
    """A round that a leader has to have claimed.

    Attributes:
        key: of the round.
        generation: its number.
        patience: seconds that are left to another half of it; endless where it was claimed long ago.
        again: it may be claimed once more, as whoever has gone on from it knows of that.
    """

    key: str
    generation: int
    patience: float
    again: bool = True


@dataclass(frozen=True)
class Wish:
    """A claim that a leader would make.

    Attributes:
        key: of the round.
        number: of the claim.
        rival: the note in spite of which it may.
    """

    key: str
    number: int = 1
    rival: str = ""


class Tie:
    """A leader's part in it.

    Args:
        lasts: seconds that a claim lasts without a sign of its half; 0 for ever.

    Attributes:
        wish: the claim that it would make; None while it would make none.
        needed: keys of the rounds that it has to have claimed before it may go on.
    """

    def __init__(self, lasts: float) -> None:
        self._lasts = lasts
        self._now = self._doubted = self._began = 0.0
        self._heard = Findings(0.0)
        self._claims: dict[str, Claim] = {}
        self._silent = 0.0
        self._held_for: dict[str, float] = {}  # later claims of this leader's, by key: seconds since it knows of them
        self._since: float | None = None
        self.wish: Wish | None = None
        self.needed: tuple[str, ...] = ()

    # What the directory says

    def hear(self, found: Findings | None, now: float, passed: float) -> None:
        """See what it says.

        Args:
            found: what was found last.
            now: the leader's monotonic clock.
            passed: seconds since the last look, at which it was awake.
        """
        self._now = now
        for key in self._held_for:
            self._held_for[key] += passed
        if found is not None and found != self._heard:
            self._learn(found)
        if self._is_late(self._heard.at):
            self._claims.clear()

    def _learn(self, found: Findings) -> None:
        before, self._heard = self._heard, found
        stands = bool(before.at) and (found.rival, found.claims) == (before.rival, before.claims)
        self._silent = self._silent + min(found.at - before.at, _LONGEST_SILENCE) if stands else 0.0
        for each in found.claims if found.at >= self._doubted else ():
            self._claims[each.key] = each
            if each.mine and each.number > 1:
                self._held_for.setdefault(each.key, 0.0)
            else:
                self._held_for.pop(each.key, None)

    def doubt(self) -> None:
        """A new round comes about: what was heard before is not enough for it."""
        self._doubted = self._now
        self._claims.clear()

    def begin(self) -> None:
        """A round has formed."""
        self._began = self._heard.at
        self.rest()

    @property
    def noted(self) -> bool:
        """Whether the leader's note was written since there was doubt, and not long ago."""
        return self._heard.noted > self._doubted and not self._is_late(self._heard.noted)

    def has_heard(self, key: str) -> bool:
        """Whether the directory has said who has claimed this round, since there was doubt."""
        return key in self._claims

    # What follows

    def number(self, key: str) -> int:
        """How many claims on this round there are, as far as it knows."""
        return self._claims[key].number if key in self._claims else 0

    def own(self, key: str) -> int:
        """Number of the last claim on this round, if this leader has made it; 0 otherwise."""
        return self.number(key) if key in self._claims and self._claims[key].mine else 0

    def is_won(self, key: str) -> bool:
        """Whether half of this round may go on here."""
        claim = self._claims.get(key)
        if claim is None or not claim.mine:
            return False
        return claim.number == 1 or self._held_for.get(key, 0.0) >= min(_GRACE, _GRACE_SHARE * self._lasts)

    def is_lost(self, key: str, generation: int) -> bool:
        """Whether another half of it may, or most of it have gone on.

        Args:
            key: of the round.
            generation: its number.
        """
        claim = self._claims.get(key)
        return claim is not None and not claim.mine and (claim.number > 0 or self._heard.rivals_round > generation)

    def keeps(self, half: Half) -> bool:
        """Whether what has become of half of a round may go on here."""
        claim = self._claims.get(half.key)
        if claim is None:
            return False
        if claim.mine and claim.number > 1:
            return self.is_won(half.key)
        return claim.number == half.number and self.noted

    def lapsed(self, halves: Collection[Half]) -> str:
        """Why what has become of these halves may go on no longer, in words; empty while it may."""
        for half in halves:
            claim = self._claims.get(half.key)
            if claim is not None and not claim.mine and claim.number > half.number:
                return "the other nodes go on without these, of which the shared directory showed no sign for too long"
        if halves and self._is_late(max(self._heard.noted, self._began)):
            return (
                "the right to go on without the others was not renewed in the shared directory in time: they may go on"
            )
        return ""

    def _is_late(self, at: float) -> bool:
        """Whether what was found then can't be relied on any more: others may go on soon."""
        return 0 < _GIVES_UP_AFTER * self._lasts < self._now - at

    @property
    def rivals_round(self) -> int:
        """The latest round of another leader, whose note it has seen."""
        return self._heard.rivals_round

    def want(self, needs: Iterable[Need], now: float) -> None:
        """These rounds have to be claimed, and nothing else is missing.

        Args:
            needs: the rounds, in the order in which they are claimed.
            now: seconds that the leader was awake.
        """
        self._since = now if self._since is None else self._since
        waited = now - self._since
        self.wish = next(filter(None, (self._wish(each, waited) for each in needs)), None)

    def _wish(self, need: Need, waited: float) -> Wish | None:
        number, rival = self.number(need.key), self._heard.rival
        if self.is_lost(need.key, need.generation):
            over = need.again and number and self._lasts and rival and self._silent >= self._lasts
            return Wish(need.key, number + 1, rival) if over else None
        return Wish(need.key) if not number and waited >= need.patience else None

    def rest(self) -> None:
        """There are more, or fewer."""
        self.wish, self.needed, self._since = None, (), None
