"""Stores in which a run looks led, without a leader behind them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from conftest import held_port

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.model import PROTOCOL, Job, Outcome, State
from ftrun.rendezvous.shelf import Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def served() -> Iterator[Server]:
    with held_port() as port:  # also once it is closed, lest another test is given it
        listener = endpoint.listen(port)
        assert listener is not None
        server = Server(listener)
        server.start()
        try:
            yield server
        finally:
            server.close()


def lead(server: Server, run_id: str, leader: str, generation: int = 0, protocol: int = PROTOCOL) -> None:
    """Have it look as if a run were led there."""
    server.shelf.set(Keys.STATE, State(leader, 1, generation, called=False, outcome=Outcome.OPEN).encode())
    server.shelf.set(Keys.JOB, Job(run_id, leader, f"host-{leader}", leader, protocol=protocol).encode())


def place(server: Server) -> endpoint.Endpoint:
    return endpoint.Endpoint("127.0.0.1", server.port)
