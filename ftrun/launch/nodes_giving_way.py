"""How a node's workers end for what happened on another node, and how long this one waits to learn of that."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from ftrun.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftrun.launch.director import Director
    from ftrun.launch.evidence.collect import LiveRank
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.nodes_group import Group
    from ftrun.launch.processes import Workers

_VERDICT_SECONDS = 120.0
"""How long another node that has claimed the decision may take for it, beside its pause before the restart."""
_LOOK_SECONDS = 0.4


class GivingWay:
    """One node's part in what is decided elsewhere. Main thread of the agent.

    Args:
        group: the nodes of the run.
        director: of this node.
        spared: this process's own children that lead sessions.
    """

    def __init__(self, group: Group, director: Director, spared: Callable[[], set[int]]) -> None:
        self._group = group
        self._director = director
        self._spared = spared

    def word(self, ranks: Sequence[LiveRank], hang: Evidence | None) -> str:
        """Wait for what other nodes have to say; why they decide what follows, empty where this one does.

        Args:
            ranks: of this node, which have fallen.
            hang: evidence that they stand still, where they have not.
        """
        leaving = self._group.somebody_leaves()
        word = self._group.await_word(self._director.patience(ranks, hang, leaving=leaving))
        if word or self._group.claim():
            return word
        return self._group.await_word(_VERDICT_SECONDS + self._director.longest_pause)

    def end(self, workers: Workers, word: str) -> None:
        """End this node's workers: in order where all nodes live and have time for it, at once otherwise.

        Args:
            workers: of this node.
            word: why, in words.
        """
        group = self._group
        with group.absent():
            grows = group.grows and self._director.sessions_lead()
            if grows and workers.alive:
                workers.send(signal.SIGTERM, groups=False)
                self._await_end(workers, lambda: group.grows)
            elif workers.alive and self._is_orderly(workers):
                self._await_end(workers, lambda: True)
            in_order = grows and not workers.alive
            # Before all else, files on a shared storage included: the others may be about to go on without this node.
            workers.send(signal.SIGKILL, groups=False)
            self._director.disturbed(word, over=group.ending is not None, grows=in_order)
            stuck = workers.kill(self._spared())
            workers.close()
            if stuck:
                self._director.cannot_be_killed(stuck)
            self._director.clock.mark("stop")

    def _is_orderly(self, workers: Workers) -> bool:
        """Whether the run stops, or a node leaves, on request, and ranks here have begun to leave with the others."""
        ending = self._group.ending
        stops = ending is not None and ending.code == ExitCode.TRY_AGAIN
        left = any(each.code == ExitCode.TRY_AGAIN for each in workers.ended.values())
        return stops or (left and self._group.somebody_leaves())

    def _await_end(self, workers: Workers, goes_on: Callable[[], bool]) -> None:
        """They save at their next step boundary."""
        deadline = time.monotonic() + self._director.grace
        while workers.alive and goes_on() and time.monotonic() < deadline:
            workers.look(min(_LOOK_SECONDS, deadline - time.monotonic()))
