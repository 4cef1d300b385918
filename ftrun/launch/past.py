"""What one launcher has been through: its failures and restarts, as the policy counts them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ftrun.launch.failures.kinds import Kind

if TYPE_CHECKING:
    from ftrun.launch.failures.failure import Failure


class Past:
    """This launcher's failures and restarts so far. Main thread."""

    def __init__(self) -> None:
        self.restarts = 0
        self.streak = 0
        self.streak_by_kind: Counter[Kind] = Counter()
        self.failed_at: list[float] = []
        self.earlier: list[tuple[str, int]] = []

    def refill(self) -> None:
        """There was progress: the budgets are full again."""
        self.streak = 0
        self.streak_by_kind.clear()

    def knows(self, what: Failure) -> bool:
        """Whether this failure has come before, or one of the storage, which looks different each time."""
        seen = any(fingerprint == what.fingerprint for fingerprint, _ in self.earlier)
        return seen or (what.kind is Kind.STORAGE and self.streak_by_kind[Kind.STORAGE] > 0)

    def add(self, what: Failure, step: int | None, now: float, *, restart: bool) -> None:
        """One more failure, and whether a restart follows."""
        self.failed_at.append(now)
        if step is not None:
            self.earlier.append((what.fingerprint, step))
        if restart:
            self.restarts += 1
            self.streak += 1
            self.streak_by_kind[what.kind] += 1
