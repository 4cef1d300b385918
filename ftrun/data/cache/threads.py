"""Threads for calls that may hang: kept for the next call, and left behind where one doesn't come back."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 512
IDLE = 5.0


class Threads:
    """Makes calls, each in a thread that it has for itself until it comes back. Any thread may use it.

    They are daemons: a call that hangs holds up neither the others, which get other threads, nor the process's end.
    They are not those of a forked child, which must make its own.
    """

    def __init__(self, most: int = MOST, idle: float = IDLE) -> None:
        """Assign; threads start with the first calls.

        Args:
            most: how many there may be, those that hang among them.
            idle: seconds without a call after which one ends.
        """
        self.most = most
        self._linger = idle
        self._guard = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._alive = 0

    def call(self, function: Callable[[], None]) -> bool:
        """Have a function called, which raises nothing; False where all threads are busy or hang."""
        with self._guard:
            if self._idle:
                self._idle.pop().put(function)  # the one that was busy last: others get to end
                return True
            if self._alive >= self.most:
                return False
            self._alive += 1
        calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        calls.put(function)
        try:
            threading.Thread(target=self._work, args=(calls,), daemon=True, name="ftrun-remote").start()
        except BaseException:
            with self._guard:
                self._alive -= 1
            raise
        return True

    def _work(self, calls: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                function = calls.get(timeout=self._linger)
            except queue.Empty:
                with self._guard:
                    if calls in self._idle:  # else somebody has given it a call this moment
                        self._idle.remove(calls)
                        self._alive -= 1
                        return
                continue
            function()
            del function  # what it holds must not live until the next call
            with self._guard:
                self._idle.append(calls)
