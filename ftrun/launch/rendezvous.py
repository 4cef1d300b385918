"""Rendezvous of one node with itself: nobody to wait for, and a new store for every attempt.

Torch's own handler keeps one store for all attempts, in which the workers of the next one find the addresses of the
dead; and it goes through the motions of a meeting, which take a good part of a second.
"""

from __future__ import annotations

import datetime as dt
import os
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_STORE_DEADLINE = dt.timedelta(seconds=60)


class OneNode(RendezvousHandler):
    """Hands out a world of one node.

    Args:
        run_id: for ``TORCHELASTIC_RUN_ID``.
        local_addr: what workers are told as ``MASTER_ADDR``; this host's name otherwise.
    """

    def __init__(self, run_id: str, local_addr: str | None) -> None:
        self._run_id = run_id
        self._local_addr = local_addr
        self._closed = False

    def get_backend(self) -> str:
        """The name under which torch's own handler for this would appear in its events."""
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share the agent's store; torch's switch for that is honoured."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store, and the whole world: node 0 of 1."""
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_STORE_DEADLINE)
        port = store.port if self.use_agent_store else None
        where = RendezvousStoreInfo.build(0, store, self._local_addr, server_port=port)
        return RendezvousInfo(store, 0, 1, where)

    def is_closed(self) -> bool:
        """Whether :meth:`set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Note that the run is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else knows of this rendezvous."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is held here."""
        return True


def creator(parameters: Any) -> OneNode:
    """Make a handler from torch's parameters."""
    return OneNode(parameters.run_id, parameters.local_addr)
