"""Handlers over real stores: several nodes in one process, each with a thread that stands in for its agent."""

from __future__ import annotations

import contextlib
import datetime as dt
import select
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from conftest import held_port
from rendezvous_kit import PATIENCE, SECONDS, begun, end_without_a_word, eventually, meeting
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandlerRegistry,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier, synchronize

from ftrun.errors import UsageError
from ftrun.launch.nodes_group import Group
from ftrun.rendezvous import endpoint, torch_store
from ftrun.rendezvous.handler import BACKEND, Excluded, Handler, register
from ftrun.rendezvous.hosting import NotAdmitted
from ftrun.rendezvous.line import Line, settle
from ftrun.rendezvous.member import Timing
from ftrun.rendezvous.model import Outcome, Phase, Terms
from ftrun.rendezvous.round_store import RoundBroken
from ftrun.rendezvous.wire import LineDown, Silent

if TYPE_CHECKING:
    from pathlib import Path


def test_nodes_meet_use_the_store_of_the_round_and_finish_together() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        first, second = nodes.met(a, b)
        assert sorted((first.rank, second.rank)) == [0, 1]
        assert first.world_size == second.world_size == 2
        assert first.bootstrap_store_info is not None
        assert vars(first.bootstrap_store_info) == vars(second.bootstrap_store_info)
        assert a.round == b.round
        assert a.round is not None
        assert a.round.generation == 1
        # What torch's agent and ftrun's do with it, workers' clients included.
        gathered = [
            nodes.pool.submit(synchronize, each.store, bytes([65 + each.rank]), each.rank, 2, "k")
            for each in (first, second)
        ]
        assert [each.result(SECONDS) for each in gathered] == [[b"A", b"B"]] * 2
        barriers = [nodes.pool.submit(barrier, each.store, 2, "b") for each in (first, second)]
        assert [each.result(SECONDS) for each in barriers] == [None, None]
        PrefixStore("p", first.store).set("x", "1")
        assert second.store.get("p/x") == b"1"
        told = first.bootstrap_store_info
        worker = TCPStore(told.master_addr, told.master_port, is_master=False, wait_for_workers=False)
        assert worker.get("p/x") == b"1"
        assert not a.finished()
        eventually(lambda: a.finished() & b.finished())
        assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0


def test_every_round_has_a_store_of_its_own() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        (before, _) = nodes.met(a, b)
        before.store.set("stale", "1")
        again = nodes.meet(a)
        eventually(b.num_nodes_waiting)
        assert b.disturbance.endswith("starts again")
        # It rings a moment after there is something to say, and no more once that was asked for.
        eventually(lambda: b.num_nodes_waiting() and select.select([b.alarm], [], [], 0)[0] == [])
        (after,) = nodes.met(b)
        assert again[0].result(SECONDS).rank == before.rank
        assert not after.store.check(["stale"])
        assert a.round is not None
        assert a.round.generation == 2
        with pytest.raises(RoundBroken):
            before.store.get("stale")


def test_a_late_joiner_comes_behind_and_the_alarm_wakes_a_waiting_loop() -> None:
    with meeting(1, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a)
        assert a.num_nodes_waiting() == 0
        joining = nodes.meet(b)
        assert select.select([a.alarm], [], [], SECONDS)[0]
        assert a.num_nodes_waiting() == 1
        assert nodes.met(a)[0].rank == 0
        assert joining[0].result(SECONDS).rank == 1


def test_growth_is_held_until_it_costs_little() -> None:
    with meeting(1, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        a.hold_growth(hold=True)  # before or after it leads
        nodes.met(a)
        joining = nodes.meet(b)
        eventually(lambda: b._pulse is not None and b._pulse.known.state is not None)
        time.sleep(0.3)  # nothing is what should happen
        assert a.num_nodes_waiting() == 0
        a.hold_growth(hold=False)
        eventually(a.num_nodes_waiting)
        nodes.met(a)
        assert joining[0].result(SECONDS).world_size == 2


def test_a_member_that_leaves_is_replaced_by_the_spare_and_an_unused_spare_ends_well() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        spare, idle = nodes.node(), nodes.node()
        (taking,) = nodes.meet(spare)
        eventually(lambda: spare._pulse is not None and spare._pulse.known.state is not None)
        (idling,) = nodes.meet(idle)
        eventually(lambda: idle._pulse is not None and idle._pulse.known.state is not None)
        b.leave("maintenance")
        eventually(a.num_nodes_waiting)
        nodes.met(a)
        assert taking.result(SECONDS).rank == 1
        eventually(lambda: a.finished() & spare.finished())
        with pytest.raises(RendezvousGracefulExitError, match="all nodes have finished, and this node was not needed"):
            idling.result(SECONDS)


def test_one_that_stops_the_run_is_quoted_by_the_others() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        b.close(Outcome.FAILED, "node b: exit code 3")
        b.shutdown()
        eventually(a.num_nodes_waiting)
        assert a.disturbance == "node b: exit code 3"
        with pytest.raises(RendezvousClosedError, match="node b: exit code 3"):
            a.next_rendezvous()
        assert a.is_closed()


def test_shutdown_of_a_member_ends_the_run_as_under_torchrun() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        b.shutdown()
        eventually(a.is_closed)
        assert a.num_nodes_waiting() == 1


def test_waiting_in_a_round_that_breaks_ends_at_once() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        first, _second = nodes.met(a, b)
        waiting = nodes.pool.submit(first.store.get, "never")
        again = nodes.meet(b)
        with pytest.raises(RoundBroken, match=r"starts again|lost"):
            waiting.result(SECONDS)  # which is not as long as it waits for a node that is only late
        nodes.met(a)
        again[0].result(SECONDS)


def test_a_wait_in_vain_is_torchs_own_error_and_the_store_goes_on() -> None:
    with meeting(1, 1) as nodes:
        (info,) = nodes.met(nodes.node())
        with pytest.raises(RuntimeError, match="timeout"):
            info.store.wait(["never"], dt.timedelta(seconds=0.1))
        info.store.set("x", "1")
        assert info.store.get("x") == b"1"
        # What another node should have written, for far less than torch's five minutes: the nodes meet again.
        assert info.store.timeout <= dt.timedelta(minutes=2)
        info.store.set_timeout(dt.timedelta(seconds=0.1))
        with pytest.raises(RoundBroken, match=r"has not come as far as this one within 0\.1 s \(.*never"):
            info.store.multi_get(["x", "never"])


def test_nodes_that_do_not_fit_are_refused_by_name() -> None:
    with meeting(1, 3, traits={"torch": "2.13.0"}) as nodes:
        nodes.met(nodes.node())
        with pytest.raises(NotAdmitted, match=r"torch is 2\.12\.0 on .* and 2\.13\.0 on"):
            nodes.node(traits={"torch": "2.12.0"}).next_rendezvous()
        with pytest.raises(NotAdmitted, match="is the endpoint of another run, 'a-run', and this is 'b-run'"):
            nodes.node(run_id="b-run").next_rendezvous()
        assert issubclass(NotAdmitted, UsageError)


def test_an_excluded_node_leaves_and_the_others_go_on() -> None:
    with meeting(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        name = socket.gethostname()
        refused = nodes.meet(nodes.node())
        a.exclude({name: "its memory is bad"})  # all of them have that name here, the host included
        with pytest.raises(Excluded, match="its memory is bad"):
            refused[0].result(SECONDS)
        eventually(b.num_nodes_waiting)
        with pytest.raises(Excluded, match="its memory is bad"):
            b.next_rendezvous()


@pytest.mark.slow
def test_too_few_nodes_and_nobody_at_all() -> None:
    with meeting(2, 2, join_timeout=1.0) as nodes:
        alone = nodes.node()
        eventually(lambda: begun(alone).known.lobby.startswith("1 of"))
        with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2 nodes are here \(.*\) within 1 s"):
            alone.next_rendezvous()
        lonely = nodes.node(is_host=False, where=endpoint.Endpoint("localhost", 1))
        with pytest.raises(RendezvousConnectionError, match=r"no rendezvous was reached at localhost:1 within 1 s"):
            lonely.next_rendezvous()
        nameless = nodes.node(where=endpoint.Endpoint("nobody.invalid", 29400))
        eventually(lambda: begun(nameless).known.trouble)
        with pytest.raises(RendezvousConnectionError, match=r"the name nobody\.invalid doesn't resolve"):
            nameless.next_rendezvous()


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["nothing", "closes"])
def test_something_else_at_the_endpoint(answers: str) -> None:
    hurried = meeting(1, 1, join_timeout=0.5, timing=Timing())
    with socket.create_server(("127.0.0.1", 0)) as other, hurried as nodes:
        if answers == "closes":

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        other.accept()[0].close()

            threading.Thread(target=serve, daemon=True).start()
        node = nodes.node(where=endpoint.Endpoint("127.0.0.1", other.getsockname()[1]))
        with pytest.raises(RendezvousConnectionError, match="no rendezvous was reached"):
            node.next_rendezvous()
        other.shutdown(socket.SHUT_RDWR)


def test_a_store_of_somebody_else_at_the_endpoint() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with meeting(1, 1, join_timeout=0.5, timing=Timing(patience=0.3)) as nodes:
        node = nodes.node(where=endpoint.Endpoint("127.0.0.1", store.port))
        eventually(lambda: begun(node).known.trouble)
        with pytest.raises(RendezvousConnectionError, match=r"no answer within|connection is lost"):
            node.next_rendezvous()


def test_a_host_that_is_asked_for_and_cannot_be() -> None:
    with socket.create_server(("", 0)) as other, meeting(1, 1) as nodes:
        node = nodes.node(where=endpoint.Endpoint("localhost", other.getsockname()[1]), is_host=True)
        with pytest.raises(NotAdmitted, match="something else listens at that port"):
            node.next_rendezvous()


def test_a_host_that_comes_back_goes_on_where_the_nodes_are() -> None:
    with meeting(2, 2, failover=False) as nodes:
        # The member that is gone is waited for until it is lost.
        nodes.settings = replace(nodes.settings, terms=replace(nodes.settings.terms, lost_after=1.0))
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        end_without_a_word(a)
        eventually(lambda: b.disturbance.startswith("this node is cut off"))
        assert b.num_nodes_waiting()
        meets = {b: nodes.meet(b)[0]}
        a = nodes.node(is_host=True)
        meets[a] = nodes.meet(a)[0]

        def together() -> bool:
            # As agents do: one that gets no processor for a second is lost for a moment, and they meet once more.
            for each in [each for each in meets if meets[each].done() and each.num_nodes_waiting()]:
                meets[each] = nodes.meet(each)[0]
            return all(each.done() for each in meets.values()) and a.round == b.round

        eventually(together)
        assert meets[b].result().world_size == 2
        assert b.round is not None
        assert b.round.generation > 1


@pytest.mark.parametrize("how", ["leaves", "ends"])
def test_another_node_leads_when_the_host_is_gone(how: str) -> None:
    with meeting(2, 3, traits={"torch": "2.13.0"}) as nodes:
        terms = Terms(2, 3, last_call=60.0, lost_after=PATIENCE)  # all three or none
        nodes.settings = replace(nodes.settings, terms=terms)
        a, b, c = nodes.node(), nodes.node(), nodes.node()
        first = nodes.met(a, b, c)[0]
        assert (a.hosts, b.hosts, c.hosts) == (True, False, False)
        assert first.rank == 0
        if how == "leaves":
            a.leave("maintenance")
        else:
            end_without_a_word(a)
        eventually(lambda: b.num_nodes_waiting() and c.num_nodes_waiting())
        nodes.met(b, c)
        assert b.round is not None
        assert b.round == c.round
        assert b.round.generation == 2  # one round, formed by the new host
        eventually(lambda: b.hosts != c.hosts)  # a leader that has given way may have to end yet
        assert len(b.round.members) == 2
        b.finished()
        c.finished()
        eventually(lambda: b.finished() and c.finished())


@pytest.mark.slow
@pytest.mark.parametrize(("quorum", "shared"), [(True, False), (False, False), (True, True)])
def test_of_two_nodes_the_one_without_the_host_goes_on_where_it_may(quorum: bool, shared: bool, tmp_path: Path) -> None:
    with meeting(1, 2, notes=tmp_path if shared else None) as nodes:
        terms = Terms(1, 2, last_call=60.0, lost_after=PATIENCE, quorum=quorum)
        nodes.settings = replace(nodes.settings, terms=terms)
        a, b = nodes.node(), nodes.node()
        nodes.met(a, b)
        end_without_a_word(a)
        eventually(b.num_nodes_waiting)
        if quorum and not shared:
            pulse = begun(b)
            pulse.meet()
            eventually(lambda: "more than half" in pulse.known.lobby)
            b._settings = replace(b._settings, join_timeout=1.0)
            with pytest.raises(RendezvousTimeoutError, match=r"more than half have to be \(--rdzv-conf quorum=0 lets"):
                b.next_rendezvous()
        else:
            assert nodes.met(b)[0].world_size == 1
            assert b.hosts


def test_torch_finds_it_by_its_name() -> None:
    registry = RendezvousHandlerRegistry()
    register(registry, {"torch": "2.13.0"}, print)
    given = {"last_call_timeout": "7", "join_timeout": "9", "is_host": "0", "lost_timeout": "2.5"}
    parameters = RendezvousParameters(BACKEND, "[fd00::1]:77", "r", 1, 2, local_addr="10.0.0.1", **given)
    handler = registry.create_handler(parameters)
    assert isinstance(handler, Handler)
    assert handler.get_backend() == BACKEND
    assert handler.get_run_id() == "r"
    settings = handler._settings
    assert (settings.where, settings.terms.last_call, settings.terms.lost_after) == (
        endpoint.Endpoint("fd00::1", 77),
        7.0,
        2.5,
    )
    assert (settings.join_timeout, settings.is_host, settings.local_addr) == (9.0, False, "10.0.0.1")
    assert handler.shutdown()
    for conf, says in [
        ({"join_timeout": "soon"}, "join_timeout=soon is no number of seconds"),
        ({"nope": "1"}, "nope"),
    ]:
        with pytest.raises(UsageError, match=says):
            registry.create_handler(RendezvousParameters(BACKEND, "x", "r", 1, 2, **conf))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("n1", "n1", 29400),
        ("n1:5", "n1", 5),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("fd00::1", "fd00::1", 29400),
        ("[fd00::1]:9", "fd00::1", 9),
        ("[::1]", "::1", 29400),
        ("n1:", "n1", 29400),
    ],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    where = endpoint.Endpoint.parse(text)
    assert where == endpoint.Endpoint(host, port)
    assert endpoint.Endpoint.parse(str(where)) == where


@pytest.mark.parametrize("text", ["", ":5", "n1:x", "n1:70000", "[::1", "[::1]9"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        endpoint.Endpoint.parse(text)


# --- lines


class Relay:
    """Passes bytes on between a client and a store, until it is told to hold them."""

    def __init__(self, port: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self._target = port
        self._sockets: list[socket.socket] = []
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self.server.accept()[0]
                store = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, store]
                for one, other in ((client, store), (store, client)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.open.wait(60)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.open.set()
        for each in (self.server, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def lines() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "a-line"]


def test_a_call_that_is_not_answered_ends_in_time_and_so_does_its_thread() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(store.port)
    line = Line("127.0.0.1", relay.port, "a-line", SECONDS)
    line.open()
    line.call(lambda each: each.set("x", "1"))
    assert store.get("x") == b"1"
    relay.open.clear()
    line.patience = 0.8
    began = time.monotonic()
    with pytest.raises(Silent, match="no answer within"):
        line.call(lambda each: each.get("x"))
    assert time.monotonic() - began < SECONDS
    eventually(lambda: not lines())
    with pytest.raises(LineDown, match="not connected"):
        line.call(lambda each: each.get("x"))
    # A host that accepts a connection and says nothing.
    with pytest.raises(LineDown):
        Line("127.0.0.1", relay.port, "a-line", 0.8).open()
    assert settle(SECONDS)
    assert not lines()
    relay.close()


def test_a_wait_ends_when_nothing_is_left_to_wait_for() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = Line("127.0.0.1", store.port, "a-line", SECONDS)
    line.open()
    began = time.monotonic()
    with pytest.raises(LineDown):
        line.call(lambda each: each.wait(["never"], dt.timedelta(seconds=600)), 600, until=lambda: True)
    assert time.monotonic() - began < SECONDS
    line.close()
    eventually(lambda: not lines())
    refused = Line("127.0.0.1", 1, "a-line", SECONDS)
    with pytest.raises(LineDown, match="refused"):
        refused.open()
    eventually(lambda: not lines())


def test_a_line_that_connected_in_vain_leaves_those_after_it_alone() -> None:
    with held_port() as port:
        failed = Line("127.0.0.1", port, "a-line", SECONDS)
        with pytest.raises(LineDown):
            failed.open(look=False)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        line = Line("127.0.0.1", port, "a-line", SECONDS)
        line.open()
        eventually(lambda: failed.ends(0.0))
        assert failed.ends(0.0)  # as often as that is asked
        line.call(lambda each: each.set("x", "1"))
        assert store.get("x") == b"1"
        line.close()


@pytest.mark.parametrize(("address", "families"), [("10.0.0.1", 1), ("fd00::1", 2), ("a-node", 2)])
def test_a_store_for_ipv4_alone_meets_no_address_that_the_hosts_file_does_not_know(address: str, families: int) -> None:
    store = torch_store.serve(address, SECONDS)
    reached = 0
    for loopback in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            endpoint.probe(loopback, store.port, SECONDS)
            reached += 1
    assert reached == min(families, 1 + endpoint.is_mine("::1"))  # a machine may be without IPv6
    line = Line("127.0.0.1", store.port, "a-line", SECONDS)
    line.open()
    line.call(lambda each: each.set("x", "1"))
    assert store.get("x") == b"1"
    line.close()
    port = store.port
    del store
    with pytest.raises(OSError, match="refused"):
        endpoint.probe("127.0.0.1", port, SECONDS)


def test_the_phases_that_torch_sees() -> None:
    with meeting(1, 1) as nodes:
        node = nodes.node()
        assert node.num_nodes_waiting() == 0
        assert not node.is_closed()
        assert node.finished()  # of nothing
        nodes.met(node)
        assert node._pulse is not None
        assert node._pulse.phase is Phase.RUNNING
        with node.absent():
            assert node._pulse._watched is False
        assert node._pulse._watched is True


def test_whoever_waits_for_a_word_is_woken_by_it_and_stays_absent() -> None:
    with meeting(1, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a)
        group = Group(a)
        assert a._pulse is not None
        with group.absent():
            assert group.await_word(0.05) == ""
            assert a._pulse._watched is False  # evidence may follow, a kill and a long pause
            joining = nodes.meet(b)
            assert group.await_word(SECONDS).endswith(" joins")
            assert a._pulse._watched is False
        assert a._pulse._watched is True
        nodes.met(a)
        joining[0].result(SECONDS)
