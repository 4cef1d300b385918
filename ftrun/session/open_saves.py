"""Saves whose outcome is open, and what a Session hears of them. The keeper decides; this listens."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.staging.sealing import ring
from ftrun.checkpoint.staging.work import remaining
from ftrun.errors import AgreementTimeout, CheckpointError, Disagreement
from ftrun.session.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ftrun.checkpoint.memory.tier import Tier

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


@dataclass(frozen=True)
class Save:
    """What is said about a save, apart from its state.

    Attributes:
        attempt: its name.
        step: number of finished steps in the state.
        total: number of steps that the run asked for.
        reason: why it is taken.
        data: data position.
        position: digest of step, total and data, the same on all ranks.
        began: moment of the monotonic clock.
    """

    attempt: str
    step: int
    total: int | None
    reason: str
    data: dict[str, Any]
    position: str
    began: float


class OpenSaves:
    """Training thread only, apart from :meth:`drop`.

    Args:
        tier: where outcomes are said.
        rank: global rank. Rank 0 speaks for all where all hear the same.
        root: the checkpoint root.
        distrust: hears the names of tensors whose content differs between ranks.

    Attributes:
        commit_seconds: from the seal of the last checkpoint that was committed to its commit; None before that.
    """

    def __init__(self, tier: Tier, rank: int, root: str, distrust: Callable[[Collection[str]], object]) -> None:
        self.commit_seconds: float | None = None
        self._tier = tier
        self._rank = rank
        self._root = root
        self._distrust = distrust
        self._outcomes = Outcomes(tier)
        self._dropped: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._open: dict[str, Save] = {}
        self._given_up: set[str] = set()
        self._last = ""
        self._failure: CheckpointError | None = None
        self._news: list[Checkpoint] = []

    def add(self, save: Save) -> None:
        """A save begins."""
        self._open[save.attempt] = save
        self._last = save.attempt
        self._failure = None

    def give_way(self, attempt: str) -> None:
        """A snapshot that nobody has begun to drain made room for a newer one."""
        if attempt in self._open:
            self.drop(self._open[attempt], "a newer snapshot took its place in memory")

    def drop(self, save: Save, reason: str) -> None:
        """A snapshot will never be whole. Others on the node hear it, and through the keeper all others. Any thread."""
        if save.attempt in self._given_up:  # whoever noticed first has said it
            return
        self._given_up.add(save.attempt)
        _log.warning("ftrun: rank %d: the snapshot of step %d is dropped: %s", self._rank, save.step, reason)
        outcome = Outcome(save.attempt, save.step, committed=False, reason=reason, seconds=0.0, size=0)
        self._dropped.put(outcome)
        with contextlib.suppress(OSError):  # no room for a word: the keeper finds out by itself
            Outcomes(self._tier).put(outcome)
        ring(self._tier)

    def news(self) -> list[Checkpoint]:
        """What was committed since the last call. Quick."""
        self._listen()
        news, self._news = self._news, []
        return news

    def wait(self, timeout: float) -> None:
        """Wait until nothing is open.

        Raises:
            Disagreement: the last save was refused, since its ranks are at different positions.
            CheckpointError: it failed for another reason.
            AgreementTimeout: an outcome is still open.
        """
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        self._listen()
        while self._open:
            if remaining(deadline) == 0:
                raise AgreementTimeout(
                    f"checkpoint {max(self._open)} is not committed after {timeout:.3g} s; `ftrun status` shows how "
                    "far it is, and the log of the keeper why"
                )
            time.sleep(min(pause, remaining(deadline)))
            pause = min(2 * pause, _LONGEST_PAUSE)
            self._listen()
        if self._failure is not None:
            raise self._failure

    def _listen(self) -> None:
        if not self._open:
            return
        while not self._dropped.empty():
            self._hear(self._dropped.get(), said=True)
        for outcome in self._outcomes.poll():
            self._hear(outcome)

    def _hear(self, outcome: Outcome, *, said: bool = False) -> None:
        save = self._open.pop(outcome.attempt, None)
        if save is None:
            return
        if outcome.differ:
            self._distrust(outcome.differ)
        if outcome.committed:
            self.commit_seconds = outcome.seconds
            self._news.append(Checkpoint(save.step, save.attempt, self._root, save.total, save.reason))
            return
        kind = Disagreement if outcome.final else CheckpointError
        error = kind(f"checkpoint {save.attempt} was not committed: {outcome.reason}")
        if save.attempt == self._last:
            self._failure = error
        if self._rank == 0 and not said:
            _log.warning("ftrun: %s; training goes on", error)
