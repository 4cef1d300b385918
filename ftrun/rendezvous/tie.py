"""Half of a round's members are there, and nobody knows what has become of the other half.

Where nodes share a directory, it is the witness: of two halves of a round the one goes on that has claimed the round
there first, by a file that can be made once. The half in which that round was led claims it at once, the other one
leaves it some seconds for that. So the loss of either of two nodes is survived, and of two that don't reach each other
one at most goes on. A half that has claimed a round and is lost then leaves the other one waiting.

Without a shared directory the half goes on in which the round was led. No input or output, and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEIR_WAITS = 2.0
"""Seconds that the half without the leader of the last round leaves to the other one."""


@dataclass(frozen=True)
class Claim:
    """What has become of the wish for a round.

    Attributes:
        key: of the round.
        won: this leader may go on with half of it; otherwise another one may.
    """

    key: str
    won: bool


@dataclass
class Tie:
    """A leader's part in it.

    Attributes:
        wanted: key of the round that it would claim; empty while it would claim none.
    """

    wanted: str = ""
    _claims: dict[str, bool] = field(default_factory=dict)
    _since: float | None = None

    def hear(self, claim: Claim | None) -> None:
        """See what the directory says."""
        if claim is not None:
            self._claims[claim.key] = claim.won

    def is_won(self, key: str) -> bool:
        """Whether half of this round may go on here."""
        return self._claims.get(key, False)

    def is_lost(self, key: str) -> bool:
        """Whether another half of it may."""
        return not self._claims.get(key, True)

    def wish(self, key: str, now: float, patience: float) -> None:
        """Half of this round is here, and no more.

        Args:
            key: of the round.
            now: the leader's clock.
            patience: seconds that are left to the other half.
        """
        self._since = now if self._since is None else self._since
        self.wanted = key if now - self._since >= patience and key not in self._claims else ""

    def rest(self) -> None:
        """There are more, or fewer."""
        self.wanted, self._since = "", None
