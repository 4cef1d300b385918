"""Who may form the next round: most of the last one, so that of two sides of a cut one at most goes on.

Of two halves see :mod:`~ftrun.rendezvous.tie`. No input or output, and no clock.
"""

from __future__ import annotations

from collections import Counter
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


class Quorum:
    """What one leader knows of that.

    Args:
        terms: what the leader goes by.
        host: its own node.

    Attributes:
        base: of whom most have to be in the next round, by identity.
        incumbent: this leader has formed the last round itself.
    """

    def __init__(self, terms: Terms, host: str) -> None:
        self._terms = terms
        self._host = host
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
        self._key = last.key
        self.base = {each.node: each for each in base}
        self.incumbent = incumbent

    def without(self, node: str) -> None:
        """A member has left on purpose, or has to: the others are counted without it."""
        self.base.pop(node, None)

    def hear(self, claim: Claim | None) -> None:
        """See what has become of the wish for a round."""
        self._tie.hear(claim)

    @property
    def wanted(self) -> str:
        """Key of the round that this leader would claim; empty for none."""
        return self._tie.wanted

    def holds(self, ready: Sequence[Who]) -> bool:
        """Whether most of those are there who would otherwise be able to go on without this leader."""
        more = surplus(ready, self.base) if self._terms.quorum else 1
        if more or self._terms.witness:
            return more > 0 or (more == 0 and self._tie.is_won(self._key))
        return self.incumbent and any(each.node == self._host for each in ready)

    def claims(self, ready: Sequence[Who], now: float, not_before: float) -> bool:
        """Ask for the right to go on with half of the last round; whether that is all that lacks.

        Args:
            ready: who is there.
            now: the leader's clock.
            not_before: the time on it from which the other half has stopped its workers, should it live.
        """
        half = self._terms.witness and not surplus(ready, self.base)
        if not half or len(ready) < self._terms.min_nodes:
            self._tie.rest()
            return False
        if now >= not_before:
            self._tie.wish(self._key, now, 0.0 if self.incumbent else HEIR_WAITS)
        return True

    def lacks(self) -> str:
        """What is missing, in words."""
        text = f"of the last round's {len(self.base)} members more than half have to be"
        if self._tie.is_lost(self._key):
            return f"{text}, as the others may go on"
        if len(self.base) == 2 and not self._terms.witness:
            return f"{text} (--rdzv-conf quorum=0 lets one of two go on alone, which is safe where no cut parts them)"
        return text
