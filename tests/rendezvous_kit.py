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
from ftrun.rendezvous.member import Timing
from ftrun.rendezvous.model import Terms
from ftrun.rendezvous.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

    from ftrun.rendezvous.pulse import Pulse


SECONDS = 40.0
PATIENCE = 8.0
"""A thread that gets no processor for some seconds, be it a node's or a store's, passes for neither lost nor silent."""


def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


class Meeting:
    """Nodes that meet at a port of their own. The first one hosts."""

    def __init__(self, least: int, most: int, **more: Any) -> None:
        self._before = set(threading.enumerate())
        self._held = contextlib.ExitStack()  # also while nobody listens there, lest another test is given it
        port = self._held.enter_context(held_port())
        self.settings = Settings(
            endpoint.Endpoint("localhost", port),
            "a-run",
            Terms(least, most, last_call=0.2, lost_after=PATIENCE),
            report=self.hear,
            **{"join_timeout": SECONDS, **more},
        )
        if "timing" not in more:
            self.settings = replace(self.settings, timing=replace(self.settings.timing, patience=PATIENCE))
        self.said: list[str] = []
        self.nodes: list[Handler] = []
        self.pool = ThreadPoolExecutor(8)

    def hear(self, text: str) -> None:
        self.said.append(text)

    def node(self, **more: Any) -> Handler:
        first = {} if not self.nodes else {"is_host": False}
        self.nodes.append(Handler(replace(self.settings, **{**first, **more})))
        return self.nodes[-1]

    def host(self, least: int) -> Handler:
        """The first one, which waits for so many: those of a larger round may come later than its last call."""
        return self.node(terms=replace(self.settings.terms, min_nodes=least))

    def meet(self, *nodes: Handler) -> list[Future[RendezvousInfo]]:
        return [self.pool.submit(each.next_rendezvous) for each in nodes]

    def met(self, *nodes: Handler) -> list[RendezvousInfo]:
        return [each.result(SECONDS) for each in self.meet(*nodes)]

    def close(self) -> None:
        for each in reversed(self.nodes):
            each.shutdown()
        self.pool.shutdown()
        self._held.close()
        # Each was waited for some seconds, in which it may have got no processor.
        eventually(lambda: not [each for each in self.left() if each.name.startswith("ftrun-")])

    def left(self) -> set[threading.Thread]:
        return set(threading.enumerate()) - self._before


def begun(node: Handler) -> Pulse:
    """Have a node look for the others already: how long its main thread waits for them then is its own affair."""
    pulse, _ = node._start()
    return pulse


def end_without_a_word(node: Handler) -> None:
    """As a process that is killed: nobody hears that this node leaves."""
    pulse = node._pulse
    assert pulse is not None
    with pulse._changed:
        pulse._stopping = True
        pulse._changed.notify_all()
    pulse._thread.join(SECONDS)
    node._left = True
    node.shutdown()


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


@contextlib.contextmanager
def unhurried(least: int, most: int) -> Iterator[Meeting]:
    """The same with nodes none of which passes for lost, however long the machine or a thread of it stands still."""
    with meeting(least, most, timing=Timing(patience=SECONDS)) as nodes:
        nodes.settings = replace(nodes.settings, terms=replace(nodes.settings.terms, lost_after=3 * SECONDS))
        yield nodes
