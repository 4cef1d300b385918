"""Entering a round: its first node serves a store for it, and all its nodes connect to that one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousInfo, RendezvousStoreInfo

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.line import Line
from ftrun.rendezvous.round_store import Address, RoundBroken, RoundServer, RoundStore
from ftrun.rendezvous.wire import LineDown

if TYPE_CHECKING:
    from ftrun.rendezvous.model import Round
    from ftrun.rendezvous.pulse import Pulse

_SLICE = 0.25
_STORE_SECONDS = 90.0
"""Within which a round's first node has its store up. A launcher that stands still is left out before that."""
_REACH_SECONDS = 30.0
"""Within which the others reach it."""
_TIMES = 3
"""How many rounds in a row are tried, the first node of which isn't reached: with another one first, or without this
node, it may be otherwise."""
_PATIENCE = 30.0
"""For an answer of it. Workers use it, too, all at once, and it looks up the name of everybody who connects: that takes
as long as the name server does where ``/etc/hosts`` doesn't know it. Whether its host lives is known from elsewhere."""


class Entry:
    """This node's way into one round after the other. Main thread.

    Args:
        pulse: what this node knows.
        local_addr: how others reach this node; found out where it is None.
        shared: workers use the round's store, too.
    """

    def __init__(self, pulse: Pulse, local_addr: str | None, *, shared: bool) -> None:
        self._pulse = pulse
        self._local_addr = local_addr
        self._shared = shared
        self._server: RoundServer | None = None
        self._store: RoundStore | None = None
        self._in_vain = 0

    def enter(self, formed: Round) -> RendezvousInfo:
        """Reach the store of a round.

        Raises:
            RoundBroken: the round is over already, or its first node can't be reached.
            RendezvousConnectionError: nor could that of some rounds before it.
        """
        rank = formed.rank_of(self._pulse.who.node)
        if rank is None:
            raise RoundBroken("this node is not in the round")
        if rank == 0:
            self._serve(formed)
        address = self._await(formed)
        self._store = self._reach(formed, address, "127.0.0.1" if rank == 0 else address.host)
        told = RendezvousStoreInfo(address.host, address.master_port)
        return RendezvousInfo(self._store, rank, len(formed.members), told)

    def leave(self) -> None:
        """Let go of the last round's store."""
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
        self._store = self._server = None

    def _serve(self, formed: Round) -> None:
        own = self._address(formed)
        self._server = RoundServer(own, shared=self._shared)
        self._server.start(self._pulse.tick)
        address = Address(own, self._server.port, self._server.master_port)
        self._pulse.publish(Keys.store(formed.generation), address.encode())

    def _address(self, formed: Round) -> str:
        """How the others in a round reach this node."""
        others = [each.address for each in formed.members if each.node != self._pulse.who.node]
        return endpoint.address_among(self._local_addr or self._pulse.who.address, others)

    def _await(self, formed: Round) -> Address:
        deadline = time.monotonic() + _STORE_SECONDS
        while True:
            known = self._pulse.known
            if known.store and known.round == formed:
                return Address.decode(known.store)
            self._require_standing()
            if time.monotonic() >= deadline:
                first = formed.members[0].name
                raise RendezvousConnectionError(
                    f"{first} did not start the store of round {formed.generation} within {_STORE_SECONDS:g} s."
                )
            self._pulse.wait(_SLICE)

    def _reach(self, formed: Round, address: Address, host: str) -> RoundStore:
        deadline = time.monotonic() + _REACH_SECONDS
        while True:
            line = Line(host, address.port, "ftrun-round-line", _PATIENCE)
            try:
                line.open(until=self._disturbed, look=self._server is None)
            except LineDown as error:
                self._require_standing()
                if time.monotonic() >= deadline:
                    self._give_up(formed, address, error)
                self._pulse.wait(_SLICE)
            else:
                self._in_vain = 0
                return RoundStore(line, self._pulse.disturbed)

    def _give_up(self, formed: Round, address: Address, error: LineDown) -> NoReturn:
        first = formed.members[0].name
        text = f"this node can't reach {first} at {address.host}, where the workers are to meet: {error}"
        self._in_vain += 1
        if self._in_vain < _TIMES:
            raise RoundBroken(text) from error
        raise RendezvousConnectionError(f"{text}. --local-addr on {first} gives another address.") from error

    def _require_standing(self) -> None:
        if reason := self._disturbed():
            raise RoundBroken(reason)

    def _disturbed(self) -> str:
        """Why the round is over, in words; asked again and again by a main thread that doesn't stand still."""
        self._pulse.tick()
        return self._pulse.disturbed()
