"""The threads of a keeper that give a snapshot to the next node, and take that of the one before."""

from __future__ import annotations

import logging
import select
import socket
import threading
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper import peer_wire
from ftrun.checkpoint.keeper.peer_call import Call, PeerError
from ftrun.checkpoint.keeper.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.checkpoint.keeper.rate import Limiter
    from ftrun.checkpoint.keeper.work import NodeWork
    from ftrun.checkpoint.memory.tier import Tier

_log = logging.getLogger(__name__)

_TRIES = 3
_PAUSE = 1.0
_LISTEN_SECONDS = 1.0


class Sharing:
    """A keeper's part in copies from memory to memory.

    Args:
        tier: the memory tier.
        run_id: identity of the run.
        limiter: for all bytes of the node.
        listening: descriptor of the socket at which others reach this node.
    """

    def __init__(self, tier: Tier, run_id: str, limiter: Limiter, listening: int) -> None:
        self._tier, self._run_id, self._limiter = tier, run_id, limiter
        self._socket = socket.socket(fileno=listening)
        self._offered: NodeWork | None = None
        self._news = threading.Condition()
        self._given = ""
        self._calling: tuple[Peers, Call] | None = None

    def start(self) -> None:
        """Begin; the threads end with the process."""
        for target, name in ((self._give_all, "ftrun-give"), (self._take_all, "ftrun-take")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def look(self, memory: Mapping[str, NodeWork]) -> None:
        """See what lies sealed in memory: the newest snapshot that is whole is given away."""
        whole = [work for work in memory.values() if not (work.missing or work.empty or work.alone)]
        newest = max(whole, key=lambda work: work.name, default=None)
        with self._news:
            if newest is not None and (self._offered is None or newest.name > self._offered.name):
                self._offered = newest
                self._news.notify()
        calling = self._calling
        if calling is not None and Peers.read(self._tier) != calling[0]:
            calling[1].break_off()  # another round has begun, in which it goes to another node

    def _give_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._offered is not None and str(self._offered.name) != self._given)
                work = self._offered
            assert work is not None
            self._give(work)
            self._given = str(work.name)

    def _give(self, work: NodeWork) -> None:
        tries = 0
        while tries < _TRIES:
            peers = Peers.read(self._tier)
            if peers is None or not peers.addresses:
                return
            call = Call()
            self._calling = peers, call
            try:
                peer_wire.send(peers, work, self._limiter.take, call)
            except Exception as error:  # the thread must live: the next snapshot has the same chance
                tries += not call.broken_off
                said = _log.info if tries < _TRIES else _log.warning
                said("checkpoint %s is not copied to another node's memory: %s", work.name, error)
            else:
                _log.info("checkpoint %s is copied to another node's memory", work.name)
                return
            finally:
                self._calling = None
            with self._news:
                newest = self._offered
            if newest is not work:
                return
            if not call.broken_off:
                threading.Event().wait(_PAUSE)

    def _take_all(self) -> None:
        while True:
            try:
                # Not blocking in accept: the launcher shares the socket, and its flags.
                if not select.select([self._socket], [], [], _LISTEN_SECONDS)[0]:
                    continue
                connection, _ = self._socket.accept()
            except OSError as error:
                _log.warning("no copies of other nodes' snapshots are taken: %s", error)
                threading.Event().wait(_PAUSE)
                continue
            with connection:
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        peers = Peers.read(self._tier)
        if peers is None:
            return
        try:
            name = peer_wire.receive(connection, peers, self._tier.copies, self._run_id)
        except (PeerError, OSError) as error:
            _log.info("a copy of another node's snapshot was not taken: %s", error)
        except Exception as error:  # whatever somebody sends: the thread must live
            _log.warning("a copy of another node's snapshot was not taken", exc_info=error)
        else:
            _log.info("checkpoint %s: another node's part is here, too", name)
