"""A node as the leader sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous.model import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.rendezvous.model import Beat, Who


@dataclass
class Seen:
    """A node, as far as its records tell."""

    who: Who
    beat: Beat
    silent: float = 0.0
    lost: bool = False
    late: bool = False  # was left out because it took too long to stop; over when it is ready
    still: float = 0.0  # for how long it has said that its main thread stands still
    stands_still: bool = False  # for too long, and it is not what most nodes do

    @property
    def lives(self) -> bool:
        """Whether it can take part in a round."""
        return not (self.lost or self.late or self.stands_still or self.beat.phase is Phase.GONE)

    def why_gone(self, excluded: Mapping[str, str]) -> str:
        """What a member that is out of the round has come to, in words."""
        name = self.who.name
        if name in excluded:
            return f"{name} is excluded"
        if self.beat.phase is Phase.GONE:
            return f"{name} left"
        if self.stands_still:
            return f"the launcher on {name} stands still{self.beat.where and f' in {self.beat.where}'}"
        return f"{name} is lost" if self.lost else f"{name} did not stop in time"
