"""A node that is to be left out while it trains leaves by itself, in order, before the others go on without it.

All launchers of a run read in its memory of nodes who is left out. The one concerned has its workers save and leaves.
The leader, which would take it out of the round at once, hears of it only when it has left, or has had time enough.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_LOOK_SECONDS = 0.2
_CLOSE_SECONDS = 1.0


class HoldingBack:
    """What one launcher's leader is told of who is left out. Any thread may call it.

    Args:
        exclude: takes hosts and reasons, all of them each time; returns at once.
        members: host names of the round that stands; none while the nodes are about to meet anyway. Returns at once.
        host: this node's name.
        patience: seconds that a node has for leaving.
        shared: the others read the same memory; otherwise none of them would know that it is to leave.

    Attributes:
        own: why this node is to leave, in words; empty while it isn't.
    """

    def __init__(
        self,
        exclude: Callable[[dict[str, str]], None],
        members: Callable[[], Collection[str]],
        host: str,
        patience: float,
        *,
        shared: bool = True,
    ) -> None:
        self._exclude = exclude
        self._members = members
        self._host = host
        self._patience = patience
        self._shared = shared
        self._guard = threading.Lock()
        self._hosts: dict[str, str] = {}
        self._until: dict[str, float] = {}  # of those that are held back, on the monotonic clock
        self._passed_on: dict[str, str] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.own = ""

    def told(self, hosts: dict[str, str]) -> None:
        """These are left out, for these reasons; all of them."""
        running = self._members()
        with self._guard:
            new = [host for host in hosts if host not in self._hosts and host in running and self._knows(host)]
            until = time.monotonic() + self._patience
            self._until = {host: end for host, end in self._until.items() if host in hosts} | dict.fromkeys(new, until)
            self._hosts = dict(hosts)
            self.own = hosts.get(self._host, "")
        self._pass_on()
        if self._until and self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="ftrun-holding-back", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End its thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _knows(self, host: str) -> bool:
        """Whether a node hears that it is to leave."""
        return self._shared or host == self._host

    def _run(self) -> None:
        # To the end: one that ended when nobody is held back might do so just when somebody is, who then is for ever.
        while not self._closed.wait(_LOOK_SECONDS):
            self._pass_on()

    def _pass_on(self) -> None:
        running, now = self._members(), time.monotonic()
        with self._guard:
            self._until = {host: end for host, end in self._until.items() if host in running and now < end}
            passed_on = {host: why for host, why in self._hosts.items() if host not in self._until}
            if passed_on != self._passed_on:
                self._passed_on = passed_on
                self._exclude(dict(passed_on))
