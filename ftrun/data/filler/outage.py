"""A remote that doesn't answer: how long the filler leaves it alone. Pure but for the clock that is handed in."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _LONGEST = 0.5, 30.0
_ENOUGH = 4
"""Failures in a row after which it isn't the file's fault."""


@dataclass
class Outage:
    """What is known of one remote.

    Attributes:
        failures: in a row.
        errors: in all.
        last: what the last one said.
    """

    failures: int = 0
    errors: int = 0
    last: str = ""
    _until: float = 0.0
    _probing: bool = False

    @property
    def is_down(self) -> bool:
        """Whether the remote is left alone, but for a probe now and then."""
        return self.failures >= _ENOUGH

    def may_ask(self, now: float) -> bool:
        """Whether one more file may be asked for. While the remote is down one at a time may, after each pause."""
        if not self.is_down:
            return True
        if self._probing or now < self._until:
            return False
        self._probing = True
        return True

    def well(self) -> None:
        """It has answered."""
        self.failures, self._probing, self.last = 0, False, ""

    def failed(self, why: str, now: float) -> float:
        """It has not, and should be asked for that file again then: a time on the same clock."""
        probing, self._probing = self._probing, False
        self.errors += 1
        self.last = why
        if self.is_down and not probing:
            return self._until  # asked before it was known to be down: no news
        self.failures += 1
        self._until = now + min(_LONGEST, _FIRST * 2.0 ** max(0, min(10, self.failures - _ENOUGH)))
        return self._until
