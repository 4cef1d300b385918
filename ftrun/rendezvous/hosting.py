"""The stores that one agent serves: that of the endpoint, or one that stands by until the endpoint's host is lost."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ftrun.errors import UsageError
from ftrun.rendezvous import endpoint
from ftrun.rendezvous.model import Who
from ftrun.rendezvous.scout import Scout
from ftrun.rendezvous.serving import Server, Serving

if TYPE_CHECKING:
    from ftrun.rendezvous.member import Inheritance
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
        where: the endpoint, with the port that was found where any would do.
        is_host: the endpoint is here.
    """

    def __init__(self, settings: Settings, node: str) -> None:
        self._settings = settings
        self._server: Server | None = None
        self._serving: Serving | None = None
        self._scout: Scout | None = None
        self._excluded: dict[str, str] = {}
        self._hold_growth = False
        self.who = Who(node, socket.gethostname(), settings.local_addr or "", 0, settings.traits)
        self.where = settings.where
        self.is_host = False

    @property
    def leads(self) -> bool:
        """Whether the leader of the run is here."""
        return self._serving is not None and self._serving.leads

    def start(self) -> None:
        """Serve, and lead if the endpoint is here and nobody serves it yet. Main thread.

        Raises:
            NotAdmitted: this node is to be the host, and can't.
        """
        settings = self._settings
        mine = self._own_addresses()
        listener = endpoint.listen(settings.where.port) if mine or settings.is_host else None
        if listener is None and settings.is_host:
            raise NotAdmitted(f"--rdzv-endpoint {settings.where}: something else listens at that port on this node.")
        self.is_host = listener is not None
        if listener is None and settings.failover:
            listener = endpoint.listen(0)
        if listener is None:
            return
        self._server = Server(listener)
        address = self.who.address or next((each for each in mine if not endpoint.is_loopback(each)), "")
        if self.is_host:
            address = address or "127.0.0.1"
            self.where = endpoint.Endpoint(settings.where.host, self._server.port)
        self.who = Who(self.who.node, self.who.name, address, self._server.port, settings.traits)
        if self.is_host:
            self._serving = Serving(self._server, settings.run_id, settings.terms, self.who, settings.report)
            self._instruct(self._serving)
            self._serving.start()

    def take_over(self, who: Who, inheritance: Inheritance) -> int:
        """Lead in the store that stood by. The pulse's thread.

        Args:
            who: this node, with its address.
            inheritance: of the leader before.

        Returns:
            The port of the store.
        """
        if self._server is None:
            raise RuntimeError("it serves no store")
        self._retire()
        settings = self._settings
        serving = Serving(self._server, settings.run_id, settings.terms, who, settings.report, inheritance)
        self._instruct(serving)
        serving.start()
        self._serving = serving
        self._scout = Scout(serving, settings.where, f"{who.address} {self._server.port}")
        self._scout.start()
        return self._server.port

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
        self._server = self._serving = self._scout = None

    def _retire(self, linger: float = 0.0) -> None:
        if self._scout is not None:
            self._scout.close()
        if self._serving is not None:
            self._serving.close(linger)

    def _own_addresses(self) -> list[str]:
        """Those of the endpoint's addresses that are this machine's."""
        if self._settings.is_host is False:
            return []
        try:
            return [each for each in endpoint.resolve(self._settings.where.host) if endpoint.is_mine(each)]
        except OSError:
            return []
