"""Nodes of a rendezvous in one process, each with a thread that stands in for its agent's main thread."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conftest import held_port

from ftrun.rendezvous import endpoint
from ftrun.rendezvous.handler import Handler
from ftrun.rendezvous.model import Terms
from ftrun.rendezvous.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.elastic.rendezvous.api import RendezvousInfo


SECONDS = 20.0


def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


class Meeting:
    """Nodes that meet at a port of their own. The first one hosts."""

    def __init__(self, least: int, most: int, **more: Any) -> None:
        self._held = contextlib.ExitStack()  # also while nobody listens there, lest another test is given it
        port = self._held.enter_context(held_port())
        self.settings = Settings(
            endpoint.Endpoint("localhost", port),
            "a-run",
            Terms(least, most, last_call=0.2),
            report=self.hear,
            **{"join_timeout": SECONDS, **more},
        )
        self.said: list[str] = []
        self.nodes: list[Handler] = []
        self.pool = ThreadPoolExecutor(8)

    def hear(self, text: str) -> None:
        self.said.append(text)

    def node(self, **more: Any) -> Handler:
        first = {} if not self.nodes else {"is_host": False}
        self.nodes.append(Handler(replace(self.settings, **{**first, **more})))
        return self.nodes[-1]

    def meet(self, *nodes: Handler) -> list[Future[RendezvousInfo]]:
        return [self.pool.submit(each.next_rendezvous) for each in nodes]

    def met(self, *nodes: Handler) -> list[RendezvousInfo]:
        return [each.result(SECONDS) for each in self.meet(*nodes)]

    def close(self) -> None:
        for each in reversed(self.nodes):
            each.shutdown()
        self.pool.shutdown()
        self._held.close()


@contextlib.contextmanager
def meeting(least: int, most: int, **more: Any) -> Iterator[Meeting]:
    before = set(threading.enumerate())  # other tests of this process may have left one that goes on
    nodes = Meeting(least, most, **more)
    try:
        yield nodes
    finally:
        nodes.close()
    ours = [each.name for each in set(threading.enumerate()) - before if each.name.startswith("ftrun-")]
    assert not ours, "threads are left"
