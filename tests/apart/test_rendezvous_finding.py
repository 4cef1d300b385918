"""A new agent finds the run wherever it is led by now, and begins no second one beside it."""

from __future__ import annotations

import itertools
import json
import socket
from typing import TYPE_CHECKING

import pytest
from conftest import held_port
from rendezvous_kit import SECONDS, begun, end_without_a_word, eventually, meeting
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from ftrun.errors import UsageError
from ftrun.rendezvous import endpoint, founding
from ftrun.rendezvous.founding import SILENT_SECONDS, TURN_SECONDS, Founding
from ftrun.rendezvous.model import Who
from ftrun.rendezvous.note import Board, Note

if TYPE_CHECKING:
    from pathlib import Path


def note(count: int, leader: str = "a", generation: int = 3) -> Note:
    members = (Who("x", "node1", "10.0.0.1", 7), Who("y", "node2", "10.0.0.2", 8))
    return Note("a-run", leader, "node1", "10.0.0.1", 7, generation, count, members)


def test_a_note_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    board = Board(tmp_path / "notes", "a-run")
    assert board.read() is None
    board.write(note(1))
    assert board.read() == note(1)
    assert note(1).places == [("10.0.0.1", 7), ("10.0.0.2", 8)]
    assert Board(tmp_path / "notes", "another-run").read() is None
    board.clear("b")
    assert board.read() == note(1)
    path = tmp_path / "notes" / "leader.json"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert board.read() == note(1)
    for damaged in ("", "{", "[]", "null", '{"members": 3}', '{"run_id": "a-run", "members": []}'):
        path.write_text(damaged)
        assert board.read() is None
    board.write(note(2))
    board.clear("a")
    assert not path.exists()


def test_who_begins_a_run_and_when() -> None:
    assert Founding(0).look(100.0, None, deserted=False)
    second = Founding(1)
    assert not second.look(100.0, None, deserted=False)
    assert "before this node's own" in second.reason
    assert second.look(100.0 + TURN_SECONDS, None, deserted=False)
    # A note that stands still was left behind; one that changes wasn't.
    still = Founding(0)
    assert not still.look(100.0, note(1), deserted=False)
    assert not still.look(100.0 + SILENT_SECONDS - 0.1, note(1), deserted=False)
    assert still.look(100.0 + SILENT_SECONDS, note(1), deserted=False)
    assert still.generation == 3
    lives = Founding(0)
    for second_ in range(60):
        assert not lives.look(100.0 + second_, note(second_), deserted=second_ > 0)
    assert "node1 leads it at 10.0.0.1:7" in lives.reason
    assert Founding(0).look(100.0, note(1), deserted=True)  # their machines say that nobody is there


def test_a_list_of_endpoints() -> None:
    assert endpoint.parse_list("n1,n2:5, [fd00::1]:6") == (
        endpoint.Endpoint("n1", 29400),
        endpoint.Endpoint("n2", 5),
        endpoint.Endpoint("fd00::1", 6),
    )
    assert endpoint.parse_list("n1:0") == (endpoint.Endpoint("n1", 0),)
    for wrong in ("n1,,n2", "n1:0,n2", ",", "n1,n2:x"):
        with pytest.raises(UsageError, match="--rdzv-endpoint"):
            endpoint.parse_list(wrong)


@pytest.mark.slow
def test_a_new_agent_and_the_old_hosts_new_agent_find_the_run_by_its_note(tmp_path: Path) -> None:
    with meeting(2, 4, notes=tmp_path / "rendezvous") as nodes:
        a, b, c = nodes.host(3), nodes.node(), nodes.node()
        nodes.met(a, b, c)
        end_without_a_word(a)
        eventually(lambda: b.num_nodes_waiting() and c.num_nodes_waiting())
        nodes.met(b, c)
        eventually(lambda: b.hosts != c.hosts)  # a leader that has given way may have to end yet
        fresh = nodes.meet(nodes.node())  # knows only the endpoint, where nobody is
        eventually(b.num_nodes_waiting)
        nodes.met(b, c)
        assert fresh[0].result(SECONDS).rank == 2
        again = nodes.node(is_host=None)
        back = nodes.meet(again)  # it has the endpoint's address, and could begin a run there
        eventually(b.num_nodes_waiting)
        nodes.met(b, c, nodes.nodes[3])
        assert back[0].result(SECONDS).rank == 3
        assert not again.hosts
        assert again.round == b.round
        for each in (b, c, nodes.nodes[3], again):
            each.finished()
        eventually(lambda: all(each.finished() for each in (b, c, nodes.nodes[3], again)))
    assert not list((tmp_path / "rendezvous").iterdir())  # the run is over


@pytest.mark.slow
def test_the_endpoint_says_where_the_leader_is_after_a_second_one_is_lost() -> None:
    with meeting(2, 3) as nodes:
        a, b, c = nodes.host(3), nodes.node(), nodes.node()
        nodes.met(a, b, c)
        end_without_a_word(a)
        eventually(lambda: b.num_nodes_waiting() and c.num_nodes_waiting())
        nodes.met(b, c)
        eventually(lambda: b.hosts != c.hosts)
        leads, follows = (b, c) if b.hosts else (c, b)
        again = nodes.node(is_host=None)  # it begins a run at the endpoint, and gives way when it is found
        back = nodes.meet(again)
        eventually(leads.num_nodes_waiting)
        nodes.met(leads, follows)
        assert back[0].result(SECONDS).rank == 2
        end_without_a_word(leads)
        eventually(lambda: follows.num_nodes_waiting() and again.num_nodes_waiting())
        nodes.met(follows, again)
        joining = nodes.meet(nodes.node())
        eventually(lambda: follows.num_nodes_waiting() and again.num_nodes_waiting())
        nodes.met(follows, again)
        assert joining[0].result(SECONDS).rank == 2


@pytest.mark.slow
def test_a_run_of_which_nobody_lives_is_begun_anew_and_counts_on(tmp_path: Path) -> None:
    with meeting(2, 2, notes=tmp_path) as nodes:
        first = [nodes.node(), nodes.node()]
        nodes.met(*first)
        board = Board(tmp_path, "a-run")
        eventually(lambda: (found := board.read()) is not None and found.generation == 1)
        for each in reversed(first):
            end_without_a_word(each)
        assert board.read() is not None
        nodes.nodes.clear()
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        assert a.hosts
        assert a.round is not None
        assert a.round.generation == 2


@pytest.mark.slow
def test_a_run_that_lives_out_of_reach_is_not_begun_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founding, "SILENT_SECONDS", 600.0)  # which this process may stand still for, too
    with meeting(1, 1, notes=tmp_path, join_timeout=0.5) as nodes, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        nobody.listen()  # and never answers
        place = nobody.getsockname()
        board = Board(tmp_path, "a-run")
        board.write(Note("a-run", "far", "far-node", *place, 7, 0))
        node = nodes.node()
        pulse = begun(node)
        for count in itertools.count(1):
            board.write(Note("a-run", "far", "far-node", *place, 7, count))
            if "the run goes on" in pulse.known.trouble:
                break
            pulse.wait(0.05)
        with pytest.raises(RendezvousConnectionError, match="the run goes on: far-node leads it"):
            node.next_rendezvous()


@pytest.mark.slow
def test_the_run_is_found_at_another_endpoint_of_the_list() -> None:
    with held_port() as port, meeting(2, 3, more=(second := endpoint.Endpoint("127.0.0.1", port),)) as nodes:
        a = nodes.node()
        b = nodes.node(is_host=None, where=second, more=(nodes.settings.where,))
        # Both are at the first address of a list here: one begins, the other one finds it.
        nodes.met(a, b)
        eventually(lambda: a.hosts != b.hosts)
        hosting, other = (a, b) if a.hosts else (b, a)
        gone, left = (nodes.settings.where, second) if a.hosts else (second, nodes.settings.where)
        c = nodes.node(where=gone, more=(left,))
        joining = nodes.meet(c)
        eventually(other.num_nodes_waiting)
        nodes.met(hosting, other)
        joining[0].result(SECONDS)
        end_without_a_word(hosting)
        eventually(lambda: other.num_nodes_waiting() and c.num_nodes_waiting())
        nodes.met(other, c)
        d = nodes.node(where=gone, more=(left,))  # the first address of its list answers no longer
        joining = nodes.meet(d)
        eventually(lambda: other.num_nodes_waiting() and c.num_nodes_waiting())
        nodes.met(other, c)
        assert joining[0].result(SECONDS).rank == 2
