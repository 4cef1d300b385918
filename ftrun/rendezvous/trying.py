"""A node tries to connect to others, as the leader has asked; on threads of its own, a few at a time."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.preflight import Report, Trial, partners

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.rendezvous.model import Who

_PATIENCE = 2.0
_TIMES = 2
"""A packet that is lost once is no broken link."""
_AT_ONCE = 8
_SOON = 0.25
"""An answer that takes longer is worth a word."""
_AGAIN_SECONDS = 3.0
"""After which those that couldn't be reached are tried once more."""
_JOIN_SECONDS = 2 * _PATIENCE


class Trying:
    """Tries, and reports what it found.

    Args:
        node: this node.
        publish: is given a :class:`Report`; called on the thread.
    """

    def __init__(self, node: str, publish: Callable[[Report], None]) -> None:
        self._node = node
        self._publish = publish
        self._trial = Trial()
        self._times = 0  # how often it was asked: two leaders may ask the same
        self._asked = threading.Condition()
        self._stopping = False
        self._reached: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name="ftrun-trying", daemon=True)

    def ask(self, trial: Trial) -> None:
        """Try these. Any thread; returns at once."""
        with self._asked:
            self._trial = trial
            self._times += 1
            self._asked.notify_all()
        if not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        """End."""
        with self._asked:
            self._stopping = True
            self._asked.notify_all()
        if self._thread.ident:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        done, report = 0, Report(0)
        with ThreadPoolExecutor(_AT_ONCE, "ftrun-trying") as pool:
            while True:
                with self._asked:
                    if not self._stopping and self._times == done:
                        self._asked.wait(_AGAIN_SECONDS if report.failed else None)
                    if self._stopping:
                        return
                    trial, times = self._trial, self._times
                if trial.anew and times != done:
                    self._reached.clear()
                found = self._try(trial, pool, report if times == done else None)
                if found != report or times != done:
                    self._publish(found)
                done, report = times, found

    def _try(self, trial: Trial, pool: ThreadPoolExecutor, before: Report | None) -> Report:
        """Try all that weren't reached yet. What takes time is reported as pending, the first time."""
        new = [each for each in partners(trial.nodes, self._node) if (each.address, each.port) not in self._reached]
        running = {pool.submit(self._reach, each): each for each in new}
        pending = wait(running, _SOON).not_done
        if pending and before is None:
            self._publish(self._report(trial, running, tuple(running[each].node for each in pending)))
        wait(pending)
        return self._report(trial, running, ())

    def _report(self, trial: Trial, running: dict[Future[str], Who], pending: tuple[str, ...]) -> Report:
        failed = {}
        for future, who in running.items():
            if who.node in pending:
                continue
            if why := future.result():
                failed[who.node] = why
            else:
                self._reached.add((who.address, who.port))
        return Report(trial.number, failed, pending)

    def _reach(self, who: Who) -> str:
        """Why a node can't be reached; empty where it can."""
        why = "this node ends its part"
        for _ in range(0 if self._stopping else _TIMES):
            try:
                endpoint.probe(who.address, who.port, _PATIENCE)
            except TimeoutError:
                why = f"no answer within {_TIMES * _PATIENCE:g} s"
            except OSError as error:
                why = (error.strerror or str(error)).lower()
            else:
                return ""
        return why
