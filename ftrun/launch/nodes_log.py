"""The launcher's own events where several nodes take part: which file is this node's is known once they have met."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.rundir import RunDir


class NodeLog(events.EventLog):
    """Keeps what is written until :meth:`settle` says where it belongs; of a node that is never needed nothing is kept.

    Several threads may write.

    Args:
        run_dir: the run directory.
        lead: called once, before the first round in which this node is the first one.
    """

    def __init__(self, run_dir: RunDir, lead: Callable[[], None] | None = None) -> None:
        super().__init__(run_dir.events())
        self._lead = lead
        self._run_dir = run_dir
        self._node: int | None = None
        self._held: list[events.Event] = []
        self._lock = threading.Lock()

    @property
    def first(self) -> bool:
        """Whether this node was the first one in its last round, whose events are the history of the run."""
        return self._node == 0

    def settle(self, node: int) -> None:
        """From here on this node has this number."""
        if node == self._node:
            return
        if node == 0 and self._lead is not None:
            self._lead()
            self._lead = None
        path = self._run_dir.events(node)
        events.mend(path)
        with self._lock:
            self._node, self._path = node, path
            held, self._held = self._held, []
        for each in held:
            super().write(each)

    def write(self, event: events.Event) -> None:
        """Append an event, or keep it until it is known where."""
        with self._lock:
            if self._node is None:
                self._held.append(event)
                return
        super().write(event)
