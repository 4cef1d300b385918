"""Who reaches whom: whom each node tries, who is left out, and what the leader makes of it."""

from __future__ import annotations

import random
import socket

import pytest
from conftest import held_port
from rendezvous_kit import SECONDS, eventually

from ftrun.rendezvous import trying as tries
from ftrun.rendezvous.actions import Asked, Called, Formed, Observation, Parted
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.model import Beat, Phase, Round, Terms, Who
from ftrun.rendezvous.preflight import ANSWER_SECONDS, Preflight, Report, Trial, partners
from ftrun.rendezvous.trying import Trying


def who(number: int) -> Who:
    return Who(f"n{number}", f"node{number}", f"10.0.{number // 256}.{number % 256}", 4711)


def nodes(count: int) -> list[Who]:
    return [who(number) for number in range(1, count + 1)]


def test_every_pair_of_a_few_and_some_of_many() -> None:
    for count in (2, 3, 32):
        for each in nodes(count):
            assert {other.node for other in partners(nodes(count), each.node)} == {
                other.node for other in nodes(count)
            } - {each.node}
    many = nodes(200)
    tried = {each.node: partners(many, each.node) for each in many}
    assert max(map(len, tried.values())) <= 4
    assert all(others and all(other.node != node for other in others) for node, others in tried.items())
    for each in many:  # everybody is tried by somebody, and not only by those beside it
        assert sum(each in others for others in tried.values()) >= 3
    assert partners(nodes(3), "nobody") == []
    # Addresses that mean nothing elsewhere, and nodes that serve no store, aren't tried.
    host = Who("h", "host", "127.0.1.1", 4711)
    assert partners([host, who(1), Who("x", "x", "10.0.0.9", 0)], "n1") == []
    assert partners([host, who(1)], "h") == [who(1)]
    for trial in (Trial(3, tuple(nodes(2))), Trial(4, (), anew=True)):
        assert Trial.decode(trial.encode()) == trial
    assert Report.decode(Report(3, {"a": "no route"}).encode()) == Report(3, {"a": "no route"})


def test_nobody_waits_for_what_is_found_of_one_that_is_gone() -> None:
    check = Preflight()
    assert check.ask(nodes(3), (), 100.0)
    assert not check.ask(nodes(3), (), 100.0)
    two = nodes(2)
    reports = {each.node: Report(1, pending=("n3",)) for each in two}
    assert not check.settled(two, {"n1": reports["n1"]}, (), 100.1)
    assert check.settled(two, reports, (), 100.1)
    assert not check.settled(nodes(3), {**reports, "n3": Report(1)}, (), 100.1)


def test_who_is_in_the_way_of_most_is_left_out() -> None:
    check = Preflight()
    four = nodes(4)
    reports = {
        "n1": Report(1, {"n3": "no route"}),
        "n2": Report(1, {"n3": "no route"}),
        "n3": Report(1),
        "n4": Report(1),
    }
    assert [each.node for each in check.fit(four, reports, (), "n1")] == ["n1", "n2", "n4"]
    assert str(check.broken[0]) == "node1 can't reach node3 at 10.0.0.3:4711: no route"
    # Of one pair the later one goes; never the leader's node, and a newcomer before an old member.
    pair = {"n2": Report(1, {"n3": "no route"})}
    assert [each.node for each in check.fit(four, pair, (), "n1")] == ["n1", "n2", "n4"]
    assert [each.node for each in check.fit(four, pair, (), "n3")] == ["n1", "n3", "n4"]
    assert [each.node for each in check.fit(four, pair, ("n3",), "n1")] == ["n1", "n3", "n4"]
    # Old members have met: what they say of each other is no news.
    assert check.fit(four, pair, ("n2", "n3"), "n1") == four


@pytest.mark.parametrize("seed", range(20))
def test_those_who_are_kept_reach_each_other(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 12)
    group = nodes(count)
    reports = {
        each.node: Report(1, {other.node: "-" for other in group if other != each and chance.random() < 0.2})
        for each in group
    }
    kept = {each.node for each in Preflight().fit(group, reports, (), "n1")}
    assert "n1" in kept
    assert not any(kept & set(reports[node].failed) for node in kept)


class Desk:
    """A leader, nodes whose records are always new, and who can't reach whom."""

    def __init__(self, least: int, most: int, *, answers: bool = True) -> None:
        self.leader = Leader(Terms(least, most, last_call=0.1, preflight=True), who(1))
        self.beats: dict[str, Beat] = {}
        self.broken: dict[str, dict[str, str]] = {}
        self.reports: dict[str, Report] = {}
        self.answers = answers
        self.now = 0.0

    def look(self, *new: int, seconds: float = 0.5) -> list[object]:
        did: list[object] = []
        newcomers = tuple(map(who, new))
        for each in newcomers:
            self.beats[each.node] = Beat(0, Phase.READY, 0)
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            for node, beat in self.beats.items():
                self.beats[node] = Beat(beat.count + 1, beat.phase, beat.generation)
            found = Observation(self.now, newcomers, dict(self.beats), reports=dict(self.reports))
            newcomers = ()
            did += self.leader.step(found)
            for each in self.leader.trial.nodes if self.answers else ():
                self.reports[each.node] = Report(self.leader.trial.number, self.broken.get(each.node, {}))
        return did

    def run(self, *numbers: int, phase: Phase = Phase.RUNNING) -> None:
        for number in numbers:
            self.beats[f"n{number}"] = Beat(0, phase, self.leader.generation)


def members(did: list[object]) -> list[str]:
    return [each.name for action in did if isinstance(action, Formed) for each in action.round.members]


def test_a_round_waits_for_the_answers_and_leaves_out_who_cannot_be_reached() -> None:
    desk = Desk(2, 3)
    desk.broken = {"n2": {"n3": "no route to host"}}
    did = desk.look(1, 2, 3)
    assert isinstance(did[0], Asked)
    assert members(did) == ["node1", "node2"]
    (parted,) = [each for each in did if isinstance(each, Parted)]
    assert parted.text == "node2 can't reach node3 at 10.0.0.3:4711: no route to host"
    assert "no route to host" in desk.leader.lobby()
    desk.run(1, 2)
    assert desk.look(seconds=3) == []  # it waits, and nobody stops for it
    desk.broken = {}
    assert [each for each in desk.look() if isinstance(each, Called)] == [Called(1, "node3 joins", growth=True)]
    desk.run(1, 2, phase=Phase.READY)
    assert members(desk.look()) == ["node1", "node2", "node3"]


def test_too_few_that_reach_each_other_wait_and_say_why() -> None:
    desk = Desk(2, 2)
    desk.broken = {"n2": {"n1": "no answer within 4 s"}}
    assert members(desk.look(1, 2, seconds=5)) == []
    assert "node2 can't reach node1 at 10.0.0.1:4711: no answer within 4 s" in desk.leader.lobby()
    desk.broken = {}
    assert members(desk.look()) == ["node1", "node2"]


def test_one_that_does_not_answer_is_not_waited_for_long_and_members_are_not_asked_when_another_is_gone() -> None:
    desk = Desk(2, 3, answers=False)
    assert members(desk.look(1, 2, 3, seconds=ANSWER_SECONDS)) == []
    assert members(desk.look()) == ["node1", "node2", "node3"]
    desk.run(1, 2)
    desk.run(3, phase=Phase.GONE)
    desk.look()
    desk.run(1, 2, phase=Phase.READY)
    assert members(desk.look(seconds=0.2)) == ["node1", "node2"]
    alone = Desk(1, 1, answers=False)
    assert members(alone.look(1)) == ["node1"]


def fallen(desk: Desk, *numbers: int) -> list[object]:
    """Workers of the last of them fall, and all of them meet again."""
    desk.run(*numbers)
    desk.look(seconds=0.1)
    desk.run(numbers[-1], phase=Phase.READY)
    did = desk.look(seconds=0.1)
    desk.run(*numbers, phase=Phase.READY)
    return [*did, *desk.look(seconds=0.3)]


def test_members_whose_workers_have_fallen_are_tried_anew_and_a_broken_pair_is_taken_apart() -> None:
    desk = Desk(2, 3)
    assert members(desk.look(1, 2, 3)) == ["node1", "node2", "node3"]
    did = fallen(desk, 1, 2, 3)
    assert [each.trial.anew for each in did if isinstance(each, Asked)] == [True]
    assert members(did) == ["node1", "node2", "node3"]
    # Of two that don't reach each other any more, while the leader hears both, one is left out.
    desk.broken = {"n2": {"n3": "no answer within 4 s"}, "n3": {"n2": "no answer within 4 s"}}
    did = fallen(desk, 1, 2, 3)
    assert [each.trial.number for each in did if isinstance(each, Asked)] == [3]
    assert members(did) == ["node1", "node2"]
    assert "node2 can't reach node3" in " ".join(each.text for each in did if isinstance(each, Parted))
    desk.run(1, 2)
    assert desk.look(seconds=3) == []
    desk.broken = {}
    assert [each for each in desk.look() if isinstance(each, Called)] == [Called(3, "node3 joins", growth=True)]
    desk.run(1, 2, phase=Phase.READY)
    assert members(desk.look()) == ["node1", "node2", "node3"]


def test_an_heir_whose_members_have_stopped_already_tries_nobody() -> None:
    desk = Desk(1, 3)
    desk.leader.inherit(Round(7, tuple(map(who, (4, 1, 2))), ""), "n4")
    desk.beats = {f"n{number}": Beat(0, Phase.READY, 7) for number in (1, 2)}
    did = desk.look(seconds=0.2)
    assert "node2 starts again" in next(each.reason for each in did if isinstance(each, Called))
    assert members(did) == ["node1", "node2"]
    assert not any(isinstance(each, Asked) for each in did)


def test_what_was_found_before_a_round_is_no_news_after_it() -> None:
    check = Preflight()
    two = nodes(2)
    assert check.ask(two, (), 1.0)
    check.trust()
    assert not check.ask(two, ("n1", "n2"), 2.0)
    check.doubt()
    assert check.ask(two, ("n1", "n2"), 2.0)
    assert not check.ask(two, ("n1", "n2"), 2.0)
    old = {"n1": Report(1), "n2": Report(1)}
    assert not check.settled(two, old, ("n1", "n2"), 2.1)
    assert check.settled(two, {"n1": Report(2), "n2": Report(2)}, ("n1", "n2"), 2.1)
    check.trust()
    assert check.settled(two, old, ("n1", "n2"), 2.1)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes a quarter of a second here, on a busy machine, is no report of its own."""
    monkeypatch.setattr(tries, "_SOON", SECONDS)


@pytest.mark.usefixtures("_patient")
def test_two_leaders_that_ask_the_same_are_both_answered() -> None:
    found: list[Report] = []
    with socket.create_server(("127.0.0.1", 0)) as listens:
        me, other = Who("me", "me", "127.0.0.1", 1), Who("a", "a", *listens.getsockname())
        trying = Trying("me", found.append)
        for times in (1, 2):
            trying.ask(Trial(1, (me, other)))
            eventually(lambda times=times: len(found) == times)  # type: ignore[misc]
        trying.close()
    assert found == [Report(1), Report(1)]


@pytest.mark.usefixtures("_patient")
def test_those_that_were_reached_are_tried_anew_where_that_is_asked() -> None:
    found: list[Report] = []
    with held_port() as port:
        with socket.create_server(("127.0.0.1", port)) as listens:
            me, other = Who("me", "me", "127.0.0.1", 1), Who("a", "a", *listens.getsockname())
            trying = Trying("me", found.append)
            trying.ask(Trial(1, (me, other)))
            eventually(lambda: found)
        trying.ask(Trial(2, (me, other)))
        eventually(lambda: len(found) == 2)
        trying.ask(Trial(3, (me, other), anew=True))
        eventually(lambda: len(found) == 3)
        trying.close()
    assert found == [Report(1), Report(2), Report(3, {"a": "connection refused"})]


@pytest.mark.slow
@pytest.mark.usefixtures("_patient")
def test_a_node_tries_and_reports() -> None:
    found: list[Report] = []
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        me = Who("me", "me", "127.0.0.1", 1)
        reached = Who("a", "a", *listens.getsockname())
        away = Who("b", "b", *deaf.getsockname())
        trying = Trying("me", found.append)
        trying.close()  # it was never asked
        trying = Trying("me", found.append)
        trying.ask(Trial(1, (me, reached, away)))
        while not found:
            trying._thread.join(0.01)
        deaf.listen()
        while len(found) < 2:  # it tries again
            trying._thread.join(0.05)
        trying.close()
    assert found == [Report(1, {"b": "connection refused"}), Report(1)]
    eventually(lambda: not trying._thread.is_alive())
