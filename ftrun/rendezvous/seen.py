"""A node as the leader sees it, and when those who are there are most of a round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous.model import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftrun.rendezvous.model import Beat, Who


@dataclass
class Seen:
    """A node, as far as its records tell."""

    who: Who
    beat: Beat
    silent: float = 0.0
    lost: bool = False
    late: bool = False  # was left out because it took too long to stop; over when it is ready

    @property
    def lives(self) -> bool:
        """Whether it can take part in a round."""
        return not (self.lost or self.late or self.beat.stuck or self.beat.phase is Phase.GONE)

    def why_gone(self, excluded: Mapping[str, str]) -> str:
        """What a member that is out of the round has come to, in words."""
        name = self.who.name
        if name in excluded:
            return f"{name} is excluded"
        if self.beat.phase is Phase.GONE:
            return f"{name} left"
        if self.beat.stuck:
            return f"the launcher on {name} stands still"
        return f"{name} is lost" if self.lost else f"{name} did not stop in time"


def has_most(ready: Sequence[Who], base: Mapping[str, Who], host: str) -> bool:
    """Whether most of the nodes are there of whom most have to be.

    Args:
        ready: who is there.
        base: of whom most have to be; none before the first round.
        host: the leader's own node, where it has formed the last round itself: half with that one in it is enough.
    """
    here = {each.node for each in ready}
    absent = Counter((who.name, who.address) for node, who in base.items() if node not in here)
    # One that was started anew stands for one before it on that machine, which would be heard if it lived.
    anew = Counter((each.name, each.address) for each in ready if each.node not in base)
    present = len(here.intersection(base)) + (absent & anew).total()
    return not base or 2 * present > len(base) or (2 * present == len(base) and host in here)
