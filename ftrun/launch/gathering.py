"""Before an attempt begins, nodes say what lies in their memories, and the leader has it committed where it is whole.

A snapshot that was split over the ranks of several nodes is of use to each of them only as a whole. Their keepers bring
it to the checkpoint root anyway: the leader waits for that while bytes move. Then it is a checkpoint like any other,
which each node reads from the nearest place that has the same bytes. What can't become one is given up, and said.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint.holdings import Holding
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store

_HELD, _MOVED, _CARD, _ADOPT = "ftrun/held/{}", "ftrun/moved/{}", "ftrun/card/{}", "ftrun/adopt/{}"
_REPORT_SECONDS = 10.0
"""Within which every node has said what it has; one that hasn't is taken to have nothing."""
_DECISION_SECONDS = 420.0
"""Within which the leader has decided: it may wait for the checkpoint root, and for keepers."""
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.2


class Gathering:
    """One round's words between its nodes, on what each of them has. Main thread of the agent.

    Args:
        store: of the round.
        node: number of this node.
        nodes: how many there are.

    Attributes:
        node: number of this node.
    """

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store, self.node, self._nodes = store, node, nodes
        self._held: list[Holding] | None = None
        self._orders = 0
        self._silent: set[int] = set()

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        return self._nodes == 1

    @property
    def complete(self) -> bool:
        """Whether every node has said what it has."""
        return not self._silent

    # What others than the leader do

    def report(self, held: Sequence[Holding], moved: str) -> None:
        """Say what this node has, and how far its keeper is."""
        self._store.set(_MOVED.format(self.node), moved)
        self._store.set(_HELD.format(self.node), json.dumps([each.to_json() for each in held]))

    def await_decision(self, key: str, moved: Callable[[], str], adopt: Callable[[str], None]) -> bytes:
        """Wait for what the leader publishes, and meanwhile show how far this node's keeper is.

        Args:
            key: where it publishes.
            moved: says how far: another text whenever something has moved.
            adopt: called with the name of an attempt that the leader wants brought to the root from copies here.

        Raises:
            CheckpointError: it has not decided for too long.
        """
        deadline = time.monotonic() + _DECISION_SECONDS
        before, pauses = None, _pauses()
        # Looked at again and again: torch's own wait with a short limit logs each time that it was in vain.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the first node has not said within {_DECISION_SECONDS:g} s how the attempt begins: look into "
                    "its output"
                )
            if (now := moved()) != before:
                self._store.set(_MOVED.format(self.node), now)
                before = now
            self._obey(adopt)
            time.sleep(next(pauses))
        return self._store.get(key)

    def _obey(self, adopt: Callable[[str], None]) -> None:
        key = _ADOPT.format(self._orders)
        if self._store.check([key]):
            self._orders += 1
            attempt, nodes = json.loads(self._store.get(key))
            if self.node in nodes:
                adopt(attempt)

    # What every node does

    def introduce(self, card: str) -> None:
        """Show the others by what they find this node."""
        self._store.set(_CARD.format(self.node), card)

    def next_card(self) -> str:
        """That of the next node; empty where there is none, or it shows none."""
        key, pauses = _CARD.format((self.node + 1) % self._nodes), _pauses()
        deadline = time.monotonic() + _REPORT_SECONDS
        while not self.alone:
            if self._store.check([key]):
                return bytes(self._store.get(key)).decode(errors="replace")
            if time.monotonic() > deadline:
                break
            time.sleep(next(pauses))
        return ""

    # What the leader does

    def require_standing(self) -> None:
        """See that the round isn't over.

        Raises:
            RoundBroken: it is: the others may have gone on without this node.
        """
        if not self.alone:
            self._store.check([_HELD.format(self.node)])

    def order(self, attempt: str, nodes: Sequence[int]) -> None:
        """Have nodes bring a lost node's part of an attempt to the root, from the copies that they have."""
        self._store.set(_ADOPT.format(self._orders), json.dumps([attempt, list(nodes)]))
        self._orders += 1

    def collect(self, own: Sequence[Holding]) -> list[Holding]:
        """What all nodes have; asked of the others once, however often this is called.

        Args:
            own: what this node has now.
        """
        if self._held is None:
            self._held = []
            deadline = time.monotonic() + _REPORT_SECONDS
            for node in range(self._nodes):
                if node != self.node:
                    self._held += self._held_by(node, deadline)
        return [*own, *self._held]

    def _held_by(self, node: int, deadline: float) -> list[Holding]:
        key, pauses = _HELD.format(node), _pauses()
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                self._silent.add(node)
                return []
            time.sleep(next(pauses))
        try:
            return [replace(Holding.from_json(each), node=node) for each in json.loads(self._store.get(key))]
        except (ValueError, TypeError):
            self._silent.add(node)
            return []

    def moved(self) -> str:
        """How far the other nodes' keepers are, as one text: another one whenever something has moved."""
        keys = [_MOVED.format(node) for node in range(self._nodes) if node not in {self.node, *self._silent}]
        return "\n".join(bytes(self._store.get(key)).decode(errors="replace") for key in keys)


def _pauses() -> Iterator[float]:
    """Between looks: short ones first, as the others are seldom far behind."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(_LAST_PAUSE, 1.5 * pause)
