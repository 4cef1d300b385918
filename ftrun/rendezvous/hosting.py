"""The stores that one agent serves: that of the endpoint, or one that stands by until the endpoint's host is lost."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.errors import UsageError
from ftrun.rendezvous import endpoint
from ftrun.rendezvous.founding import Founding
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.model import Who
from ftrun.rendezvous.note import Board
from ftrun.rendezvous.noting import Noting
from ftrun.rendezvous.scout import Scout
from ftrun.rendezvous.serving import Serving
from ftrun.rendezvous.shelf import Server
from ftrun.rendezvous.wire import LineDown

if TYPE_CHECKING:
    import socket

    from ftrun.rendezvous.member import Inheritance
    from ftrun.rendezvous.note import Note
    from ftrun.rendezvous.settings import Settings


class NotAdmitted(UsageError):
    """This node doesn't fit the others, or the endpoint isn't what it should be: exit code 2."""


class Hosting:
    """What this agent does for the others.

    Args:
        settings: of the handler.
        node: identity of this node.

    Attributes:
        who: this node as it introduces itself; without an address where none is known yet.
        endpoints: all of them, the first with the port that was found where any would do.
        board: where notes are; None where there are none.
    """

    def __init__(self, settings: Settings, node: str) -> None:
        self._settings = settings
        self._server: Server | None = None
        self._serving: Serving | None = None
        self._scout: Scout | None = None
        self._noting: Noting | None = None
        self._founding: Founding | None = None
        self._excluded: dict[str, str] = {}
        self._hold_growth = False
        self.who = Who(node, settings.name, settings.local_addr or "", 0, settings.traits)
        self.endpoints = settings.endpoints
        shares = settings.notes is not None and settings.failover
        self.board = Board(settings.notes, settings.run_id) if settings.notes is not None and shares else None

    @property
    def leads(self) -> bool:
        """Whether the leader of the run is here."""
        return self._serving is not None and self._serving.leads

    def start(self) -> None:
        """Serve, and lead at once if the endpoint is here, nobody serves it yet, and there is nobody else to ask.

        Main thread.

        Raises:
            NotAdmitted: this node is to be the host, and can't.
        """
        settings = self._settings
        place, mine = self._own_place()
        listener = self._listen(settings.endpoints[place]) if place is not None else None
        if listener is None and settings.is_host:
            raise NotAdmitted(f"--rdzv-endpoint {settings.where}: something else listens at that port on this node.")
        if listener is None:
            place = None
        if listener is None and settings.failover:
            listener = endpoint.listen(0)
        if listener is None:
            return
        self._server = Server(listener)
        self._server.start()
        address = self.who.address or next((each for each in mine if not endpoint.is_loopback(each)), "")
        if place is not None:
            address = address or "127.0.0.1"
        if place == 0:
            self.endpoints = (endpoint.Endpoint(settings.where.host, self._server.port), *settings.more)
        self.who = Who(self.who.node, self.who.name, address, self._server.port, settings.traits)
        if place is None:
            return
        self._founding = Founding(place)
        if self.board is None and not settings.more:
            self.begin(self.who, None, seen=time.monotonic(), deserted=False)

    # What a node does that looks for the leader; the pulse's thread

    def owns(self, address: str, port: int) -> bool:
        """Whether this node's own store is there, and is led by nobody here."""
        own = self._server is not None and port == self._server.port
        return own and not self.leads and endpoint.is_mine(address)

    def guide(self, text: str) -> None:
        """Write into the store that stands by where the leader is."""
        if self._server is not None:
            self._server.shelf.set(Keys.GUIDE, text)
            if self._serving is not None and not self.leads:
                # The one to which the leader here gave way may have been lost since.
                self._server.shelf.set(Keys.MOVED, text)

    def take_over(self, who: Who, inheritance: Inheritance) -> int:
        """Lead in the store that stood by.

        Args:
            who: this node, with its address.
            inheritance: of the leader before.

        Returns:
            The port of the store.
        """
        return self._lead(who, inheritance, 0)

    def begin(self, who: Who, note: Note | None, *, seen: float, deserted: bool) -> int:
        """Lead a new run, if this node is at an endpoint and nobody is found who leads it already.

        Args:
            who: this node, with its address.
            note: what is noted of the run.
            seen: when that was looked at, by the monotonic clock.
            deserted: all that the note names say that nobody is there.

        Returns:
            The port of the store.

        Raises:
            LineDown: it doesn't; the message says why, where there is something to say.
        """
        founding = self._founding
        if founding is None:
            raise LineDown("")
        if not founding.look(seen, note, deserted=deserted):
            raise LineDown(founding.reason)
        return self._lead(who, None, founding.generation)

    def _lead(self, who: Who, inheritance: Inheritance | None, remembered: int) -> int:
        if self._server is None:
            raise RuntimeError("it serves no store")
        self._retire()
        settings, server = self._settings, self._server
        terms = replace(settings.terms, witness=settings.terms.quorum and self.board is not None)
        serving = Serving(server, settings.run_id, terms, who, settings.report, inheritance, remembered)
        self._instruct(serving)
        serving.start()
        self._serving = serving
        self._instruct(serving)  # what another thread said meanwhile went to the one before
        if self.board is not None:
            self._noting = Noting(self.board, serving, who.address, terms.claim_lasts)
            self._noting.start()
        if self.board is not None or settings.more or inheritance is not None:
            self._scout = Scout(serving, self.endpoints, f"{who.address} {server.port}", self.board)
            self._scout.start()
        return server.port

    # What the main thread says

    def exclude(self, hosts: dict[str, str]) -> None:
        """See :meth:`ftrun.rendezvous.handler.Handler.exclude`."""
        self._excluded = dict(hosts)
        self._instruct(self._serving)

    def hold_growth(self, *, hold: bool) -> None:
        """See :meth:`ftrun.rendezvous.handler.Handler.hold_growth`."""
        self._hold_growth = hold
        self._instruct(self._serving)

    def _instruct(self, serving: Serving | None) -> None:
        if serving is not None:
            serving.excluded, serving.hold_growth = self._excluded, self._hold_growth

    def close(self, linger: float) -> None:
        """End all of it.

        Args:
            linger: seconds to wait until all nodes know that the run is over.
        """
        self._retire(linger)
        if self._server is not None:
            self._server.close()
        self._server = self._serving = self._scout = self._noting = None

    def _retire(self, linger: float = 0.0) -> None:
        if self._scout is not None:
            self._scout.close()
        if self._serving is not None:
            self._serving.close(linger)
        if self._noting is not None:
            self._noting.close()

    @staticmethod
    def _listen(where: endpoint.Endpoint) -> socket.socket | None:
        try:
            return endpoint.listen(where.port)
        except OSError as error:  # a port below 1024, above all
            raise NotAdmitted(f"--rdzv-endpoint {where}: this node can't listen there: {error.strerror}.") from error

    def _own_place(self) -> tuple[int | None, list[str]]:
        """The first of the endpoints that is this machine's, and which addresses of it are."""
        for place, where in enumerate(self._settings.endpoints):
            if self._settings.is_host is False:
                break
            with contextlib.suppress(OSError):  # a host's own name may not resolve there
                mine = [each for each in endpoint.resolve(where.host) if endpoint.is_mine(each)]
                if mine:
                    return place, mine
            if where.host == self.who.machine:
                return place, []
        return 0 if self._settings.is_host else None, []
