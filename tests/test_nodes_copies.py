"""Copies of snapshots from one node's memory to another's: what arrives, and what is not taken for one."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from keeper_kit import RUN, name_of, nodes_fixture, payload_of  # noqa: F401 - a fixture

from ftrun.checkpoint import holdings
from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.keeper import peer_wire
from ftrun.checkpoint.keeper.peer_wire import PeerError, Refused
from ftrun.checkpoint.keeper.peers import Peers, listener
from ftrun.checkpoint.keeper.work import works
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keeper_kit import Node

    from ftrun.checkpoint.keeper.work import NodeWork

A, B, C = (name_of(1, step) for step in (10, 20, 30))


class Receiver:
    """Takes copies one after the other, and notes what came of each."""

    def __init__(self, tier: Tier, secret: str = "secret") -> None:
        self.tier = tier
        self.said: list[str] = []
        self._socket = listener()
        self.port = self._socket.getsockname()[1]
        self._peers = Peers(secret, own="b")
        self._over = False
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while not self._over:
            connection, _ = self._socket.accept()
            with connection:
                try:
                    self.said.append(str(peer_wire.receive(connection, self._peers, self.tier.copies, RUN)))
                except OSError as error:
                    self.said.append(str(error))

    def close(self) -> None:
        self._over = True
        socket.create_connection(("127.0.0.1", self.port), 5).close()
        self._thread.join(10)
        self._socket.close()

    def at(self, secret: str = "secret", target: str = "b") -> Peers:
        return Peers(secret, "a", target, ("127.0.0.1",), self.port)

    def copied(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for _, seal in self.tier.copies.sealed():
            found.setdefault(seal.attempt, []).append(seal.rank)
        return found


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(Tier(tmp_path / "memory" / "other"))
    made.tier.create()
    yield made
    made.close()


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Node:
    return nodes(1, world=3, ranks=(1, 2))


def part(node: Node, attempt: str) -> NodeWork:
    return works(node.tier.sealed())[attempt]


def give(node: Node, attempt: str, peers: Peers) -> None:
    peer_wire.send(peers, part(node, attempt), lambda _: None)


def test_a_copy_is_a_tier_like_any_other(node: Node, receiver: Receiver) -> None:
    node.seal(A)
    give(node, A, receiver.at())
    assert receiver.copied() == {A: [1, 2]}
    for slot, seal in receiver.tier.copies.sealed():
        assert slot.payload.read_bytes() == payload_of(A, seal.rank)
        for file, (path, record) in seal.files.items():
            assert path.startswith(str(receiver.tier.copies.path)), file
            with open(path, "rb") as content:
                assert record_of(content.read()) == record
    (held,) = holdings.of_node(receiver.tier.copies, None, RUN)
    assert (held.name, held.world_size, held.ranks) == (AttemptName.of(A), 3, (1, 2))


def test_the_newest_two_are_kept(node: Node, receiver: Receiver) -> None:
    for number, attempt in enumerate((A, B, C)):
        node.seal(attempt, number % 2)
        give(node, attempt, receiver.at())
    assert receiver.copied() == {B: [1, 2], C: [1, 2]}


@pytest.mark.parametrize("wrong", [{"secret": "another"}, {"target": "somebody else"}])
def test_who_does_not_belong_here_gives_nothing(node: Node, receiver: Receiver, wrong: dict[str, str]) -> None:
    node.seal(A)
    with pytest.raises(PeerError, match=r"can't be reached: 127\.0\.0\.1: "):
        give(node, A, receiver.at(**wrong))
    assert receiver.said == ["whoever calls means another node, or doesn't belong to this round of the run"]
    assert receiver.copied() == {}


def test_bytes_that_change_on_the_way_are_no_copy(node: Node, receiver: Receiver) -> None:
    node.seal(A)
    give(node, A, receiver.at())
    node.seal(B, 1)
    taken = part(node, B)
    node.tier.slots(2)[1].payload.write_bytes(payload_of(C, 2))  # the slot was filled anew meanwhile
    with pytest.raises(Refused, match=r"r00002\.0\.safetensors has changed on its way"):
        peer_wire.send(receiver.at(), taken, lambda _: None)
    assert receiver.copied() == {A: [1, 2]}


def test_a_sender_that_dies_half_way_leaves_what_was_there(node: Node, receiver: Receiver) -> None:
    node.seal(A)
    give(node, A, receiver.at())
    node.seal(B, 1)

    def die(_: int) -> None:
        raise ConnectionAbortedError("the node is off")

    with pytest.raises(PeerError, match="the node is off"):
        peer_wire.send(receiver.at(), part(node, B), die)
    give(node, B, receiver.at())
    assert receiver.said[1] == "its sender has hung up"
    assert receiver.copied() == {A: [1, 2], B: [1, 2]}


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" + 40 * b"x", (2**40).to_bytes(8, "little")])
def test_whatever_else_calls_is_sent_away(node: Node, receiver: Receiver, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", receiver.port), 5) as caller:
        caller.settimeout(10)
        with contextlib.suppress(OSError):  # sent away before all is said
            caller.sendall(sent)
            caller.shutdown(socket.SHUT_WR)
            while caller.recv(100):
                pass
    node.seal(A)
    give(node, A, receiver.at())
    assert receiver.copied() == {A: [1, 2]}


def test_what_is_being_drained_is_not_replaced(node: Node, receiver: Receiver) -> None:
    node.seal(A)
    give(node, A, receiver.at())
    (receiver.tier.copies.path / "keeper.json").write_text("{}")
    node.seal(B, 1)
    with pytest.raises(Refused, match="is being drained"):
        give(node, B, receiver.at())
    assert receiver.copied() == {A: [1, 2]}


def test_a_node_that_lacks_memory_says_how_much(node: Node, receiver: Receiver, monkeypatch: Any) -> None:
    node.seal(A)
    full = type("Full", (), {"f_bavail": 10, "f_frsize": 1000})()
    monkeypatch.setattr(peer_wire.os, "statvfs", lambda _: full)
    with pytest.raises(PeerError, match=r"lacks 5\d{5} bytes"):
        give(node, A, receiver.at())
    assert receiver.copied() == {}
