"""Copies of snapshots in another node's memory: who gets them, and what is done with those of a node that is lost."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint import holdings
from ftrun.checkpoint.keeper import peers, seats
from ftrun.checkpoint.keeper.peers import Peers
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.memory.files import remove

if TYPE_CHECKING:
    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.holdings import Holding
    from ftrun.checkpoint.keeper.config import KeeperConfig
    from ftrun.checkpoint.memory.tier import Tier

_LEAVE_SECONDS = 5.0
_DISMISS_SECONDS = 2.0
_PAUSE = 0.01


class Copies:
    """One launcher's part. Main thread of the agent.

    Args:
        tier: this node's own memory tier; what it has of another node lies beside it.
        config: what this node's keeper is told.

    Raises:
        OSError: this node can't be reached by others.
    """

    def __init__(self, tier: Tier, config: KeeperConfig) -> None:
        self._tier, self._config = tier, config
        self._socket = peers.listener()
        self._own = secrets.token_hex(8)
        self._peers: Peers | None = None
        self._adopted: Keeper | None = None

    @property
    def listening(self) -> int:
        """Descriptor of the socket for this node's keepers, one after the other."""
        return self._socket.fileno()

    @property
    def card(self) -> str:
        """By what others find this node, as text."""
        where = peers.own_addresses()
        return json.dumps({"target": self._own, "addresses": where, "port": self._socket.getsockname()[1]})

    def befriend(self, secret: str, card: str) -> None:
        """An attempt begins: this node's snapshots go to the one with this card from now on.

        Args:
            secret: random text that all nodes of the round know, and nobody else.
            card: of the next node; empty where there is none.
        """
        try:
            found = json.loads(card) if card else {}
            self._peers = Peers(secret, self._own, **(found | {"addresses": tuple(found.get("addresses", ()))}))
        except (ValueError, TypeError):  # it is another version's
            self._peers = Peers(secret, self._own)
        if self._adopted is None:
            self._vacate()  # what an earlier launcher had adopted, and left: it would keep new copies out

    def _vacate(self) -> None:
        """Make way for new copies. What lies there can be read until they come."""
        with contextlib.suppress(OSError):  # said when it is to be used
            seats.vacate(self._tier.copies)

    def tell(self) -> None:
        """Tell the keeper of it.

        Raises:
            OSError: the tier can't be written.
        """
        if self._peers is not None:
            self._peers.write(self._tier)

    def holdings(self) -> list[Holding]:
        """What this node has of others."""
        found = holdings.of_node(self._tier.copies, None, self._config.run_id)
        return [replace(each, copied=True) for each in found]

    def adopt(self, attempt: str, record: EpochRecord, node: int) -> None:
        """Bring the copy of a lost node's part to the checkpoint root, as its own keeper would have done.

        Args:
            attempt: which.
            record: the start that its nodes know of.
            node: number of this node.

        Raises:
            OSError: the memory for it can't be used.
        """
        copies = self._tier.copies
        sealed = copies.sealed()
        self._dismiss()
        if self._adopted is not None or all(seal.attempt != attempt for _, seal in sealed):
            return
        for slot, seal in sealed:
            if seal.attempt != attempt:  # its node may live, and bring it there itself
                remove(slot.seal)
        self._adopted = Keeper(copies, replace(self._config, local="", node=node, shared=False))
        self._adopted.begin_epoch(record, node)
        self._adopted.ensure()

    def _dismiss(self) -> None:
        """See the last of the keeper of a part that was adopted before, where it has nothing left to do."""
        deadline = time.monotonic() + _DISMISS_SECONDS
        while self._adopted is not None and not self._adopted.has_work() and time.monotonic() < deadline:
            if self._adopted.retire(0.0):
                self._adopted = None
            else:
                time.sleep(_PAUSE)

    def moved(self) -> str:
        """How far an adopted part is: another text whenever something has moved."""
        progress = Progress.read(self._tier.copies)
        return "" if progress is None else f"{progress.attempt} {progress.stage} {progress.bytes_done}"

    def look(self) -> None:
        """See that an adopted part is brought to its end. Cheap where there is none."""
        if self._adopted is None:
            return
        if self._adopted.has_work():
            self._adopted.ensure()
        elif self._adopted.retire(_LEAVE_SECONDS):
            self._adopted = None
            self._vacate()

    def pids(self) -> list[int]:
        """The process that is at an adopted part."""
        return [self._adopted.pid] if self._adopted is not None and self._adopted.pid else []

    def finish(self, seconds: float, *, keep: bool) -> bool:
        """End; whether an adopted part is where it belongs.

        Args:
            seconds: that it may take.
            keep: this node's own snapshots aren't committed: the next start needs the other part, too.
        """
        adopted, self._adopted = self._adopted, None
        # One that doesn't end in time may have done all there was to do.
        done = adopted is None or adopted.finish(seconds) or not adopted.has_work()
        if done:
            self._vacate()
            if not keep:
                self._tier.copies.remove()
        self._socket.close()
        return done
