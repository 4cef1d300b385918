"""The rendezvous on several nodes, each in namespaces of its own: lost, cut off, stopped, replaced, joining late.

Each test prints for how many seconds the survivors stood still: from the fault to the moment at which the last of them
has met the others again in the store of the new round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from namespaces import Net
from namespaces.skipping import NET

if TYPE_CHECKING:
    from collections.abc import Callable

    from namespaces import Process

pytestmark = [pytest.mark.slow, NET]

AGENT = Path(__file__).parent / "namespaces" / "tiny_agent.py"
SECONDS = 60.0


class Agents:
    """Tiny agents on the nodes of a net. Node 1 has the endpoint's address."""

    def __init__(self, net: Net, least: int, most: int, *options: str, where: str = "node1:29400") -> None:
        self.net = net
        self.arguments = (where, str(least), str(most), "last_call_timeout=2", *options)
        self.process: dict[int, Process] = {}

    def start(self, *numbers: int, more: tuple[str, ...] = ()) -> None:
        for number in numbers:
            env = {**os.environ, "PYTHONPATH": str(AGENT.parents[2]), "OMP_NUM_THREADS": "1"}
            node = self.net.node(number)
            self.process[number] = node.start(sys.executable, AGENT, *self.arguments, *more, env=env)

    def lines(self, number: int, what: str = "") -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.process[number].text().splitlines() if line.startswith("{")]
        return [each for each in found if not what or each["what"] == what]

    def rounds(self, number: int) -> list[dict[str, Any]]:
        return self.lines(number, "round")

    def until(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                for number, process in self.process.items():
                    print(f"--- node {number}, exit code {process.poll()}\n{process.text()}")
                pytest.fail("it did not come true")
            time.sleep(0.02)

    def complete(self, count: int) -> list[int]:
        """Wait until node 1 is in a round of so many: some may miss the first one. Returns them, in order."""
        self.until(lambda: self.rounds(1) and len(self.rounds(1)[-1]["members"]) == count)
        return [int(name.removeprefix("node")) for name in self.rounds(1)[-1]["members"]]

    def meet(self, *numbers: int, after: int = 0, seconds: float = SECONDS) -> int:
        """Wait until these nodes, in this order, are in one round after a generation. Returns its generation."""
        names = [f"node{number}" for number in numbers]

        def met() -> bool:
            last = [(self.rounds(number) or [{}])[-1] for number in numbers]
            return all(
                each.get("members") == names
                and each["generation"] > after
                and each["generation"] == last[0]["generation"]
                and each["rank"] == place
                for place, each in enumerate(last)
            )

        self.until(met, seconds)
        return int(self.rounds(numbers[0])[-1]["generation"])

    def stood_still(self, what: str, since: float, *numbers: int) -> float:
        seconds: float = max(self.rounds(number)[-1]["at"] for number in numbers) - since
        print(f"{what}: {seconds:.2f} s")
        return seconds


def test_members_that_are_killed_stopped_or_cut_off_are_replaced_and_come_back() -> None:
    with Net(4) as net:
        agents = Agents(net, 2, 3)
        agents.start(1, 2, 3, 4)
        order = agents.complete(3)
        first = agents.rounds(1)[-1]
        assert order[0] == 1  # the host, whoever came first
        generation = agents.meet(*order)
        assert first["address"] == net.node(1).address
        (spare,) = {1, 2, 3, 4} - set(order)
        agents.until(lambda: agents.lines(spare, "ready"))

        # A spare takes over.
        lost, stays = order[1], order[2]
        began = time.monotonic()
        net.node(lost).power_off()
        generation = agents.meet(1, stays, spare, after=generation)
        agents.stood_still("a node is powered off, a spare takes over", began, 1, stays, spare)

        # Without a spare the others go on; one that is stopped comes back behind them.
        began = time.monotonic()
        agents.process[stays].stop()
        generation = agents.meet(1, spare, after=generation)
        agents.stood_still("a launcher is stopped, the others go on", began, 1, spare)
        began = time.monotonic()
        agents.process[stays].resume()
        generation = agents.meet(1, spare, stays, after=generation)
        agents.stood_still("the launcher goes on, and joins again", began, 1, spare, stays)

        # A cut: both sides notice, and the side without the rendezvous stops by itself.
        began = time.monotonic()
        net.cut(spare)
        generation = agents.meet(1, stays, after=generation)
        agents.stood_still("a node is cut off, the others go on", began, 1, stays)
        agents.until(lambda: "cut off" in (agents.lines(spare, "disturbed") or [{"why": ""}])[-1]["why"])
        noticed = agents.lines(spare, "disturbed")[-1]["at"] - began
        print(f"the node that is cut off stops: {noticed:.2f} s")
        assert agents.rounds(spare)[-1]["generation"] < generation
        began = time.monotonic()
        net.heal(spare)
        generation = agents.meet(1, stays, spare, after=generation)
        agents.stood_still("the cut heals", began, 1, stays, spare)

        # What one node sends to the host is lost, the other way is open.
        began = time.monotonic()
        net.cut_one_way(stays, 1)
        generation = agents.meet(1, spare, after=generation)
        agents.stood_still("one way is cut", began, 1, spare)
        agents.until(lambda: "cut off" in agents.lines(stays, "disturbed")[-1]["why"])
        net.heal_all()
        generation = agents.meet(1, spare, stays, after=generation)

        # A worker falls; a node leaves; all finish.
        began = time.monotonic()
        agents.process[spare].kill(signal.SIGUSR1)
        generation = agents.meet(1, spare, stays, after=generation)
        agents.stood_still("a worker falls", began, 1, spare, stays)
        began = time.monotonic()
        agents.process[stays].kill(signal.SIGTERM)
        generation = agents.meet(1, spare, after=generation)
        agents.stood_still("a node leaves", began, 1, spare)
        assert agents.process[stays].wait() == 0
        for number in (1, spare):
            agents.process[number].kill(signal.SIGUSR2)
        assert [agents.process[number].wait() for number in (1, spare)] == [0, 0]
        assert agents.lines(1, "finished")
        seen = [each["generation"] for each in agents.rounds(1)]
        assert seen == list(range(1, len(seen) + 1))


def test_two_and_two_are_cut_apart_and_one_side_goes_on() -> None:
    with Net(4) as net:
        agents = Agents(net, 2, 4)
        agents.start(1, 2, 3, 4)
        order = agents.complete(4)
        generation = agents.meet(*order)
        with_host = [number for number in order if number in (1, 2)]
        without = [number for number in order if number in (3, 4)]
        began = time.monotonic()
        net.part([1, 2], [3, 4])
        agents.until(lambda: all(agents.lines(number, "disturbed") for number in without))
        generation = agents.meet(*with_host, after=generation)
        agents.stood_still("two and two are cut apart, the host's side goes on", began, *with_host)
        time.sleep(3.0)  # nothing is what should happen
        assert all(agents.rounds(number)[-1]["generation"] < generation for number in without)
        began = time.monotonic()
        net.heal_all()
        agents.until(lambda: len({agents.rounds(number)[-1]["generation"] for number in (1, 2, 3, 4)}) == 1)
        agents.stood_still("the four meet again", began, 1, 2, 3, 4)
        assert agents.rounds(1)[-1]["members"][:2] == [f"node{number}" for number in with_host]


def test_half_that_has_claimed_a_round_and_stands_still_gives_way_to_the_other_half(tmp_path: Path) -> None:
    with Net(2) as net:
        agents = Agents(net, 1, 2, "last_call_timeout=5", "half_timeout=2", f"notes={tmp_path / 'notes'}")
        agents.start(1, 2)
        agents.until(lambda: agents.rounds(1))
        generation = agents.meet(1, 2)
        net.cut(2)
        generation = agents.meet(1, after=generation)
        assert len(agents.rounds(2)) == 1
        began = time.monotonic()
        agents.process[1].stop()
        generation = agents.meet(2, after=generation)
        assert agents.stood_still("the half that had claimed the round stands still", began, 2) > 2.0
        # It is still cut off: what tells it is its own clock, and the directory.
        before, met = len(agents.lines(1, "disturbed")), len(agents.rounds(1))
        began = time.monotonic()
        agents.process[1].resume()
        agents.until(lambda: len(agents.lines(1, "disturbed")) > before)
        noticed = agents.lines(1, "disturbed")[before]
        print(f"it goes on, and stops its workers after {noticed['at'] - began:.2f} s: {noticed['why']}")
        assert noticed["at"] < began + 30.0  # and not when the cut heals
        began = time.monotonic()
        net.heal_all()
        agents.meet(2, 1, after=generation)
        agents.stood_still("the cut heals", began, 1, 2)
        assert {tuple(each["members"]) for each in agents.rounds(1)[met:]} == {("node2", "node1")}


def test_the_host_is_lost_in_every_way_and_another_node_takes_over() -> None:
    with Net(5) as net:
        agents = Agents(net, 2, 5)
        agents.start(1, 2, 3, 4, 5)
        a, b, c, d, e = agents.complete(5)
        assert a == 1
        generation = agents.meet(a, b, c, d, e)

        began = time.monotonic()
        net.node(a).power_off()
        generation = agents.meet(b, c, d, e, after=generation)
        agents.stood_still("the host is powered off", began, b, c, d, e)

        # Started anew it would host an empty rendezvous at the endpoint: it is sent where the others are.
        net.node(a).power_on()
        agents.start(a)
        generation = agents.meet(b, c, d, e, a, after=generation)

        # The next host is cut off, with all that it leads alone; it comes back behind the others.
        began = time.monotonic()
        net.cut(b)
        generation = agents.meet(c, d, e, a, after=generation)
        agents.stood_still("the host is cut off", began, c, d, e, a)
        # Its leader may have said more since then.
        own = lambda: [each["what"] for each in agents.lines(b) if each["what"] != "leader"]  # noqa: E731
        agents.until(lambda: own()[-1] == "disturbed")
        assert agents.rounds(b)[-1]["generation"] < generation
        began = time.monotonic()
        net.heal(b)
        generation = agents.meet(c, d, e, a, b, after=generation)
        agents.stood_still("it comes back", began, c, d, e, a, b)

        # Two at once, the host and the one that would be next.
        began = time.monotonic()
        net.node(c).power_off()
        net.node(d).power_off()
        generation = agents.meet(e, a, b, after=generation)
        agents.stood_still("the host and the next are powered off", began, e, a, b)

        # The host stands still, and goes on later.
        began = time.monotonic()
        agents.process[e].stop()
        generation = agents.meet(a, b, after=generation)
        agents.stood_still("the host stands still", began, a, b)
        began = time.monotonic()
        agents.process[e].resume()
        generation = agents.meet(a, b, e, after=generation)
        agents.stood_still("it goes on", began, a, b, e)

        # The host leaves on purpose.
        began = time.monotonic()
        agents.process[a].kill(signal.SIGTERM)
        generation = agents.meet(b, e, after=generation)
        agents.stood_still("the host leaves", began, b, e)
        assert agents.process[a].wait() == 0
        for number in (b, e):
            agents.process[number].kill(signal.SIGUSR2)
        assert [agents.process[number].wait() for number in (b, e)] == [0, 0]


@pytest.mark.parametrize(
    ("own_name", "where"), [("127.0.1.1", "node1:29400"), ("", "[fd00:77::1]:29400"), ("", "node1:29400")]
)
def test_names_that_mean_nothing_elsewhere(own_name: str, where: str) -> None:
    with Net(2, own_name=own_name) as net:
        agents = Agents(net, 2, 2, "lost_timeout=60", where=where)
        agents.start(1, 2)
        agents.meet(1, 2)
        assert {agents.rounds(number)[-1]["address"] for number in (1, 2)} <= {
            net.node(1).address,
            net.node(1).address6,
        }
        agents.process[2].kill(signal.SIGUSR2)
        agents.process[1].kill(signal.SIGUSR2)
        assert [agents.process[number].wait() for number in (1, 2)] == [0, 0]


def test_two_nodes_that_do_not_reach_each_other_are_named_and_one_waits_until_they_do() -> None:
    with Net(3) as net:
        net.cut_one_way(3, 2)
        agents = Agents(net, 2, 3, "lost_timeout=60")
        agents.start(1, 2, 3)
        agents.until(lambda: agents.rounds(1))
        in_it = agents.rounds(1)[-1]["members"]
        assert in_it in (["node1", "node2"], ["node1", "node3"])
        generation = agents.meet(*(int(name.removeprefix("node")) for name in in_it))
        said = lambda: " ".join(each["text"] for each in agents.lines(1, "leader"))  # noqa: E731
        agents.until(lambda: "node3 can't reach node2 at 10.77.0.2:" in said())  # one of them may come late
        net.heal_all()
        late = 5 - int(in_it[1].removeprefix("node"))
        agents.meet(1, 5 - late, late, after=generation)


def test_packets_that_take_their_time_or_are_lost_cost_no_round() -> None:
    with Net(3, slow=True) as net:
        net.weather(delay=0.02)
        agents = Agents(net, 2, 3, "lost_timeout=3")
        agents.start(1, 2, 3)
        order = agents.complete(3)
        generation = agents.meet(*order)
        before = [agents.lines(number, "disturbed") for number in order]  # where one of them came late
        # Of a fifth, one call in 300 would take longer than a node has patience: five losses of the same packet.
        net.weather(delay=0.02, loss=0.1)
        time.sleep(3.0)  # nothing is what should happen
        assert [agents.lines(number, "disturbed") for number in order] == before
        began = time.monotonic()
        net.node(order[1]).power_off()
        agents.meet(1, order[2], after=generation)
        agents.stood_still("20 ms, a tenth of the packets lost, a node is powered off", began, 1, order[2])


def test_many_agents_lose_one_and_then_their_host() -> None:
    many = Path(__file__).parent / "namespaces" / "many.py"
    env = {**os.environ, "PYTHONPATH": str(many.parents[2])}
    command = (sys.executable, many, "24", "--steady", "0.1", "--both")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["what"] for each in said if "what" in each] == ["member", "host"]
    for each in said[-2:]:
        print(f"24 agents, a {each['what']} is lost: {each['last']} s")
