"""Metrics of steps, on their way into the run's events: rank 0's, and a few times a second at most."""

from __future__ import annotations

import time
from typing import Any

from ftrun import events
from ftrun.errors import UsageError

_PERIOD = 0.2


class StepNotes:
    """Collects what is logged during a step and how long batches were waited for."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.data_wait = 0.0
        self._last: float | None = None
        self._unsaid: tuple[int, dict[str, Any]] | None = None

    def event(self, step: int, *, last: bool) -> events.Step | None:
        """The event of a step, or None when the last one was a moment ago. The first and the last are always told.

        Raises:
            UsageError: a metric is no number.
        """
        now = time.monotonic()
        self._unsaid = step, dict(self.metrics)
        if self._last is not None and not last and now - self._last < _PERIOD:
            return None
        self._last = now
        return self.rest()

    def rest(self) -> events.Step | None:
        """The event of the last step, if it has not been told: for the end of a loop that doesn't know its total."""
        if self._unsaid is None:
            return None
        step, logged = self._unsaid
        self._unsaid = None
        # A tensor is read here and not when it is logged: most are never read, and their step isn't held up.
        metrics = {name: _number(name, value) for name, value in logged.items()}
        event = events.Step(step=step, metrics=metrics, data_wait=self.data_wait)
        self.data_wait = 0.0
        return event


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"ft.log({name}=...): a metric is one number, not {type(value).__name__}: {error}") from error
