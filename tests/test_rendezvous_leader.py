"""The leader's and the nodes' decisions, without a store: what happens in each case, and what never happens in any."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from rendezvous_desk import Desk, come, inherited, members, who

from ftrun.rendezvous.actions import Called, Ended, Formed, Observation, Refused
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.member import Known, Standing, heirs
from ftrun.rendezvous.model import Beat, Call, Ending, Outcome, Phase, Refusal, Round, State, Terms, Who
from ftrun.rendezvous.scout import Precedence


def test_the_first_round_waits_for_the_last_call_and_reaching_the_maximum_skips_it() -> None:
    desk = Desk(Terms(2, 3, last_call=5.0))
    assert desk.look(who("n1"), seconds=20) == []
    assert desk.look(who("n2"), seconds=4.9) == []
    assert members(desk.look(seconds=0.2)) == ["n1", "n2"]
    full = Desk(Terms(2, 3, last_call=5.0))
    assert members(full.look(who("n1"), who("n2"), who("n3"))) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("kind", ["lost", "gone", "stuck", "excluded"])
def test_a_member_that_is_out_brings_a_round_of_the_others_in_their_old_order(kind: str) -> None:
    desk = Desk(Terms(2, 4, last_call=0.2)).started("n1", "n2", "n3")
    more: dict[str, object] = {}
    if kind == "lost":
        desk.silent.add("n2")
        assert desk.look(seconds=0.9) == []
    elif kind == "gone":
        desk.set(Phase.GONE, "n2")
    elif kind == "stuck":
        desk.set(Phase.RUNNING, "n2", stuck=True)
        assert desk.look(seconds=1.9) == []  # others might follow
    else:
        more["excluded"] = {"host-n2": "it is bad"}
    did = desk.look(seconds=0.2, **more)
    words = {"lost": "is lost", "gone": "left", "stuck": "stands still", "excluded": "is excluded"}
    assert next(each.reason for each in did if isinstance(each, Called)).endswith(words[kind])
    assert [each.refusal for each in did if isinstance(each, Refused)] == (
        [Refusal(excluded=True, reason="it is bad")] if kind == "excluded" else []
    )
    desk.set(Phase.READY, "n3")
    assert desk.look(seconds=3, **more) == []  # n1 still stops its workers
    desk.set(Phase.READY, "n1")
    assert members(desk.look(**more)) == ["n1", "n3"]
    assert desk.leader.generation == 2


def test_a_spare_takes_the_seat_behind_the_others() -> None:
    desk = Desk(Terms(3, 3)).started("n1", "n2", "n3")
    assert desk.look(who("n4"), seconds=5) == []
    desk.silent.add("n1")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n2", "n3")
    assert members(desk.look()) == ["n2", "n3", "n4"]


def test_too_few_wait_for_a_replacement_and_then_make_a_last_call() -> None:
    desk = Desk(Terms(3, 4, last_call=1.0)).started("n1", "n2", "n3")
    desk.silent.add("n3")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1", "n2")
    assert desk.look(seconds=30) == []
    assert desk.leader.lobby() == "2 of at least 3 nodes are here (host-n1, host-n2); host-n3 is lost"
    assert desk.look(who("n5"), seconds=0.9) == []
    assert members(desk.look(seconds=0.3)) == ["n1", "n2", "n5"]


def test_a_newcomer_is_taken_in_behind_and_growth_can_be_held() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2")
    assert desk.look(who("n3"), seconds=5, hold_growth=True) == []
    (called,) = desk.look()
    assert called == Called(1, "host-n3 joins", growth=True)
    desk.set(Phase.READY, "n1", "n2")
    (formed,) = desk.look()
    assert isinstance(formed, Formed)
    assert formed.round.reason == "host-n3 joins"
    assert members([formed]) == ["n1", "n2", "n3"]


def test_some_that_come_one_after_the_other_call_one_round() -> None:
    desk = Desk(Terms(1, 9, last_call=0.1, gather=0.25)).started("n1", "n2")
    assert desk.look(who("n3"), seconds=0.2) == []
    assert desk.look(who("n4"), seconds=0.2) == []
    assert desk.look(seconds=0.15) == [Called(1, "host-n3 joins, host-n4 joins", growth=True)]
    busy = Desk(Terms(1, 99, last_call=0.1, gather=0.25)).started("n1", "n2")
    for number in range(3, 30):
        busy.look(who(f"n{number}"), seconds=0.15)
    assert [each.generation for each in busy.log if isinstance(each, Called)] == [1]  # not for ever


def test_a_member_that_is_lost_while_others_leave_in_order_makes_it_urgent() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2")
    assert desk.look(who("n3")) == [Called(1, "host-n3 joins", growth=True)]
    desk.set(Phase.READY, "n1")
    assert desk.look(seconds=0.5) == []
    desk.silent.add("n2")
    assert desk.look(seconds=1.2)[0] == Called(1, "host-n2 is lost")
    assert members(desk.log)[-2:] == ["n1", "n3"]


def test_nobody_is_taken_in_while_a_round_ends_or_begins() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2")
    desk.set(Phase.FINISHED, "n1")
    assert desk.look(who("n3"), seconds=5) == []
    young = Desk(Terms(1, 3, last_call=0.1))
    young.look(who("n1"), seconds=0.3)
    assert young.leader.generation == 1
    assert young.look(who("n2"), seconds=1) == []  # n1 has not taken its round up
    young.run("n1")
    assert young.look() == [Called(1, "host-n2 joins", growth=True)]


def test_a_member_whose_workers_fell_calls_the_others() -> None:
    desk = Desk(Terms(2, 2)).started("n1", "n2")
    desk.set(Phase.READY, "n2")
    assert desk.look() == [Called(1, "host-n2 starts again")]
    desk.set(Phase.READY, "n1")
    assert members(desk.look()) == ["n1", "n2"]
    assert desk.look(seconds=5) == []  # both are ready still: they haven't seen the new round


def test_one_that_does_not_stop_in_time_is_left_out_and_may_come_back() -> None:
    desk = Desk(Terms(1, 2, last_call=0.1, stop_within=60.0)).started("n1", "n2")
    desk.set(Phase.READY, "n1")
    assert len(desk.look(seconds=59)) == 1
    assert members(desk.look(seconds=2)) == ["n1"]
    desk.run("n1")
    assert desk.look(seconds=5) == []
    desk.set(Phase.READY, "n2")
    assert desk.look() == [Called(2, "host-n2 joins", growth=True)]


def test_who_is_excluded_counts_for_no_majority_not_even_the_host() -> None:
    desk = Desk(Terms(1, 2)).started("n1", "n2")
    did = desk.look(excluded={"host-n1": "bad memory"})
    assert did[1] == Called(1, "host-n1 is excluded", ("n1",))
    last = Round(1, (who("n1"), who("n2")), "")
    heir = Desk(Terms(1, 2))
    heir.leader.inherit(last, "n1", ("n1",))
    heir.look(who("n2"), seconds=0.1)
    heir.set(Phase.READY, "n2", generation=1)
    assert members(heir.look(seconds=0.2)) == ["n2"]


def test_a_host_that_leaves_leaves_the_round_to_its_heir() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2", "n3")
    desk.set(Phase.GONE, "n1")
    assert desk.look() == [Called(1, "host-n1 left", ("n1",))]
    desk.set(Phase.READY, "n2", "n3")
    assert desk.look(seconds=4.5) == []
    assert members(desk.look(seconds=1)) == ["n2", "n3"]  # it stays after all


def test_a_host_that_is_only_silent_is_given_the_time_to_stop() -> None:
    last = Round(1, (who("n1"), who("n2"), who("n3")), "")
    for silent, seconds in ((False, 0.1), (True, 0.35)):
        heir = Desk(Terms(1, 3))
        heir.leader.inherit(last, "n1", silent=silent)
        heir.look(who("n2"), who("n3"))
        heir.set(Phase.READY, "n2", "n3", generation=1)
        found = heir.look(seconds=seconds)
        assert bool(members(found)) is not silent
        assert members([*found, *heir.look(seconds=0.2)]) == ["n2", "n3"]


def test_a_lost_member_that_comes_back_is_a_newcomer() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2", "n3")
    desk.silent.add("n1")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n2", "n3")
    assert members(desk.look()) == ["n2", "n3"]
    desk.run("n2", "n3")
    desk.silent.clear()
    assert desk.look(seconds=3) == []  # it still has workers of the first round
    desk.set(Phase.READY, "n1")
    assert desk.look() == [Called(2, "host-n1 joins", growth=True)]
    desk.set(Phase.READY, "n2", "n3")
    assert members(desk.look()) == ["n2", "n3", "n1"]


def test_time_that_the_leader_slept_through_is_nobodys_silence() -> None:
    desk = Desk(Terms(2, 2)).started("n1", "n2")
    desk.silent |= {"n1", "n2"}
    desk.now += 600.0
    assert desk.look() == []
    desk.silent.clear()
    assert desk.look(seconds=5) == []


def test_the_run_ends_when_all_have_finished_and_not_before() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2")
    desk.set(Phase.FINISHED, "n1")
    assert desk.look(seconds=100) == []
    desk.set(Phase.FINISHED, "n2")
    (ended,) = desk.look()
    assert isinstance(ended, Ended)
    assert ended.ending.outcome is Outcome.FINISHED
    desk.silent.add("n2")
    assert desk.look(who("n3"), seconds=5) == []
    assert desk.leader.uninformed == ["n1", "n3"]
    desk.set(Phase.FINISHED, "n1", informed=True)
    desk.set(Phase.GONE, "n3")
    desk.look()
    assert desk.leader.uninformed == []


def test_one_that_had_finished_starts_again_when_another_is_lost() -> None:
    desk = Desk(Terms(1, 3, last_call=0.1)).started("n1", "n2")
    desk.set(Phase.FINISHED, "n1")
    desk.silent.add("n2")
    assert [type(each) for each in desk.look(seconds=1.2)] == [Called]
    desk.set(Phase.READY, "n1")
    assert members(desk.look()) == ["n1"]


def test_the_first_word_on_the_end_is_the_last() -> None:
    desk = Desk(Terms(1, 2, last_call=0.1)).started("n1", "n2")
    ending = Ending(Outcome.FAILED, "host-n2: exit code 1")
    assert desk.look(ending=ending) == [Ended(ending)]
    desk.set(Phase.READY, "n1", "n2")
    assert desk.look(seconds=5, ending=ending) == []


@pytest.mark.parametrize(
    ("traits", "says"),
    [
        ({"torch": "2.12.1"}, "torch is 2.12.1 on host-n2 and 2.13.0 on host-n1"),
        ({"job file": "ab12"}, "job file is ab12 on host-n2 and none on host-n1"),
    ],
)
def test_a_node_that_differs_is_refused_by_name(traits: dict[str, str], says: str) -> None:
    desk = Desk(Terms(1, 2, last_call=0.1))
    did = desk.look(who("n1"), who("n2", **traits), seconds=1)
    (refused,) = [each for each in did if isinstance(each, Refused)]
    assert refused.who.node == "n2"
    assert refused.refusal.reason.startswith(says)
    assert not refused.refusal.excluded
    assert members(did) == ["n1"]


def test_a_new_leader_goes_on_counting_where_the_nodes_are() -> None:
    desk = Desk(Terms(2, 2))
    desk.beats["n2"] = Beat(7, Phase.RUNNING, 41)
    assert desk.look(who("n1"), who("n2"), seconds=3) == []  # n2 has workers of another leader's round
    desk.set(Phase.READY, "n2")
    (formed,) = desk.look()
    assert isinstance(formed, Formed)
    assert formed.round.generation == 42


def test_what_is_written_is_read() -> None:
    one = who("n1")
    assert Who.decode(one.encode()) == one
    for beat in (Beat(3, Phase.FINISHED, 9), Beat(3, Phase.READY, 0, stuck=True, informed=True)):
        assert Beat.decode(beat.encode()) == beat
    formed = Round(4, (one, who("n2")), "because")
    assert Round.decode(formed.encode()) == formed
    assert (formed.rank_of("n2"), formed.rank_of("n3")) == (1, None)
    state = State("ab", 3, 4, called=True, outcome=Outcome.FAILED)
    assert State.decode(state.encode()) == state
    assert Ending.decode(Ending(Outcome.FAILED, "x").encode()) == Ending(Outcome.FAILED, "x")
    assert Refusal.decode(Refusal(excluded=True, reason="x").encode()) == Refusal(excluded=True, reason="x")


def test_where_a_node_stands() -> None:
    formed = Round(3, (who("n1"), who("n2")), "")
    state = State("ab", 1, 3, called=False, outcome=Outcome.OPEN)
    known = Known(state=state, round=formed)
    ready = Standing(Phase.READY, 2)
    assert ready.take_up("n1", known) == Standing(Phase.RUNNING, 3)
    assert ready.take_up("n1", replace(known, state=replace(state, called=True))) == Standing(Phase.READY, 3)
    assert ready.take_up("n9", known) == ready
    assert Standing(Phase.READY, 3).take_up("n1", known) == Standing(Phase.READY, 3)
    running = Standing(Phase.RUNNING, 3)
    assert running.take_up("n1", known) == running
    assert running.disturbance(known) == ""
    assert ready.disturbance(replace(known, trouble="away")) == ""
    assert running.disturbance(replace(known, trouble="away")) == "this node is cut off: away"
    called = replace(known, state=replace(state, called=True))
    assert running.disturbance(called) == "a new round is called"
    assert running.disturbance(replace(called, call=Call("n4 joins"))) == "n4 joins"
    assert (
        running.disturbance(replace(known, state=replace(state, generation=4)))
        == "the others went on without this node"
    )
    assert running.disturbance(replace(known, ending=Ending(Outcome.FAILED, "oh"))) == "oh"
    assert running.disturbance(replace(known, ending=Ending(Outcome.FINISHED, "fine"), trouble="away")) == ""
    assert running.disturbance(replace(known, refusal=Refusal(excluded=True, reason="bad"))) == "bad"


# --- random schedules


@dataclass
class Machine:
    """A node as the leader sees it, and as it is."""

    who: Who
    standing: Standing = field(default_factory=Standing)
    known: Known = field(default_factory=Known)
    count: int = 0
    dead: bool = False
    cut: bool = False
    stopping: float = 0.0
    announced: bool = False

    @property
    def reaches(self) -> bool:
        return not self.dead and not self.cut


class World:
    """A leader and nodes whose every step happens at a random time, among faults of every kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        least = self.random.randint(1, 3)
        self.terms = Terms(
            least,
            least + self.random.randint(0, 2),
            last_call=self.random.choice([0.0, 0.5]),
            stop_within=20.0,
            quorum=seed % 3 == 0,
        )
        self.leader = Leader(self.terms, who("n0"))
        self.machines: list[Machine] = []
        self.store: dict[str, Beat] = {}
        self.fresh: list[Who] = []
        self.rounds: list[Round] = []
        self.calls: list[int] = []
        self.growing = False
        self.named = 0
        self.heard: dict[str, float] = {}
        self.maybe_lost: set[str] = set()
        self.over = False
        self.left: set[str] = set()
        self.now = 0.0
        for _ in range(self.random.randint(least, least + 3) + 1):
            self.join()

    def join(self) -> None:
        self.machines.append(Machine(who(f"n{len(self.machines)}")))

    def state(self) -> State:
        return State("leader", 0, self.leader.generation, bool(self.leader.called), self.leader.outcome)

    def leader_looks(self) -> None:
        newcomers, self.fresh = tuple(self.fresh), []
        for action in self.leader.step(Observation(self.now, newcomers, dict(self.store))):
            assert not self.over
            if isinstance(action, Ended):
                self.over = True
                assert all(self.store[each.node].phase is Phase.FINISHED for each in self.rounds[-1].members)
            elif isinstance(action, Formed):
                self.check(action.round)
                self.rounds.append(action.round)
            elif isinstance(action, Called):
                assert action.generation == (self.rounds[-1].generation if self.rounds else 0)
                if action.generation in self.calls:  # again only to say more
                    more = len(action.left) > self.named
                    assert more or (self.growing and not action.growth), "called twice"
                self.growing, self.named = action.growth, len(action.left)
                self.calls.append(action.generation)

    def check(self, formed: Round) -> None:
        nodes = [each.node for each in formed.members]
        assert len(set(nodes)) == len(nodes)
        assert self.terms.min_nodes <= len(nodes) <= self.terms.max_nodes
        before = self.rounds[-1] if self.rounds else None
        assert formed.generation > (before.generation if before else 0)
        for node in nodes:
            assert self.store[node].phase is Phase.READY, "it has workers"
            assert self.now - self.heard[node] < self.terms.lost_after + 0.2, "it is lost"
        old = [each.node for each in before.members] if before else []
        voters = [node for node in old if node not in self.left]
        if self.terms.quorum and voters:
            assert 2 * len(set(voters) & set(nodes)) >= len(voters), "no quorum"
        stayed = [node for node in nodes if node in old and node not in self.maybe_lost]
        assert stayed == [node for node in old if node in stayed], "their order changed"
        behind = [nodes.index(node) for node in nodes if node not in old]
        assert all(nodes.index(node) < place for node in stayed for place in behind), "a newcomer is before old ones"
        self.maybe_lost.clear()

    def node_looks(self, machine: Machine) -> None:
        """What :class:`~ftrun.rendezvous.pulse.Pulse` does at one look, and the main loop after it."""
        if not machine.reaches:
            return
        node = machine.who.node
        if not machine.announced:
            machine.announced = True
            self.fresh.append(machine.who)
        machine.count += 1
        if self.now - self.heard.get(node, self.now) >= self.terms.lost_after - 0.3:
            self.maybe_lost.add(node)
        self.heard[node] = self.now
        self.store[node] = Beat(machine.count, machine.standing.phase, machine.standing.generation)
        formed = next((each for each in self.rounds if each.generation == self.leader.generation), None)
        machine.known = Known(state=self.state(), round=formed)
        machine.standing = machine.standing.take_up(node, machine.known)
        if machine.standing.disturbance(machine.known):
            machine.stopping += self.random.random()
            if machine.stopping > 2.0:
                machine.standing, machine.stopping = replace(machine.standing, phase=Phase.READY), 0.0

    def fault(self) -> None:
        # With a quorum, the leader's own node is the one that goes on.
        machine = self.random.choice(self.machines[1:] if self.terms.quorum else self.machines)
        kind = self.random.choice(["die", "cut", "heal", "heal", "fall", "join", "leave", "finish"])
        if kind == "die":
            machine.dead = True
        elif kind in ("cut", "heal"):
            machine.cut = kind == "cut"
        elif kind == "fall" and machine.reaches:
            machine.standing = replace(machine.standing, phase=Phase.READY)
        elif kind == "finish" and machine.standing.phase is Phase.RUNNING:
            machine.standing = replace(machine.standing, phase=Phase.FINISHED)
        elif kind == "join" and len(self.machines) < 12:
            self.join()
        elif kind == "leave" and machine.reaches and machine.announced:
            machine.dead = True
            self.store[machine.who.node] = Beat(machine.count + 1, Phase.GONE, machine.standing.generation)
            self.left.add(machine.who.node)

    def run(self, seconds: float, *, faults: bool) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.04
            for machine in self.machines:
                if self.random.random() < (0.3 if faults else 0.9):
                    self.node_looks(machine)
            self.leader_looks()
            if faults and self.random.random() < 0.03:
                self.fault()


@pytest.mark.parametrize("block", range(4))
def test_whatever_happens_rounds_are_sound_and_the_living_meet_in_the_end(block: int) -> None:
    formed = 0
    for seed in range(block * 25, block * 25 + 25):
        world = World(seed)
        world.run(24, faults=True)
        for machine in world.machines:
            machine.cut = False
        world.run(12, faults=False)
        alive = [each for each in world.machines if not each.dead]
        formed += len(world.rounds)
        if world.over or world.terms.quorum or len(alive) < world.terms.min_nodes:
            continue
        at_work = [each for each in alive if each.standing.phase is not Phase.READY]
        if all(each.standing.phase is Phase.RUNNING for each in at_work):  # or nobody is taken in any more
            assert len(at_work) == min(len(alive), world.terms.max_nodes), seed
        assert {each.standing.generation for each in at_work} == {world.leader.generation}, seed
        assert {each.who.node for each in at_work} == {each.node for each in world.rounds[-1].members}, seed
        assert not world.leader.called, seed
    assert formed > 50


# --- when the leader's host is lost


def test_an_heir_calls_at_once_and_goes_on_in_the_old_order() -> None:
    desk = inherited("n1", "n2", "n3", "n4")
    assert desk.look() == [Called(7, "the rendezvous has a new host, host-n1 is lost")]
    come(desk, "n3", "n4", phase=Phase.RUNNING)
    assert come(desk, "n2") == []
    desk.set(Phase.READY, "n3", "n4")
    (formed,) = desk.look()
    assert isinstance(formed, Formed)
    assert (formed.round.generation, members([formed])) == (8, ["n2", "n3", "n4"])


def test_an_heir_waits_for_members_as_long_as_for_silent_ones_and_for_newcomers_not_at_all() -> None:
    desk = inherited("n1", "n2", "n3", "n4", last_call=60.0, quorum=False)
    come(desk, "n2", "n3")
    assert desk.look(seconds=0.8) == []
    assert members(desk.look(seconds=0.3)) == ["n2", "n3"]


def test_no_round_without_most_of_the_last_one() -> None:
    desk = inherited("n1", "n2", "n3", "n4")
    come(desk, "n2", "n3")
    come(desk, "n8", "n9")  # newcomers have no vote
    assert desk.look(seconds=30) == []
    assert "of the last round's 4 members more than half have to be" in desk.leader.lobby()
    assert members(come(desk, "n4")) == ["n2", "n3", "n4", "n8", "n9"]


def test_half_is_enough_for_the_leader_that_is_in_it_and_not_for_an_heir() -> None:
    desk = Desk(Terms(1, 4)).started("n1", "n2", "n3", "n4")
    desk.silent |= {"n3", "n4"}
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1", "n2")
    assert members(desk.look()) == ["n1", "n2"]
    heir = inherited("n1", "n2", "n3", "n4", lost="n1", host="n3")
    come(heir, "n3", "n4")
    assert members(heir.look(seconds=30)) == []


def test_one_that_is_started_anew_stands_for_the_one_before_it() -> None:
    desk = inherited("n1", "n2", "n3")
    come(desk, "n2")
    assert desk.look(seconds=30) == []
    anew = replace(who("n3"), node="n3b")
    desk.beats["n3b"] = Beat(0, Phase.READY, 0)
    assert members(desk.look(anew)) == ["n2", "n3b"]


def test_members_that_left_on_purpose_are_not_counted() -> None:
    desk = Desk(Terms(1, 2)).started("n1", "n2")
    desk.set(Phase.GONE, "n1")
    (called,) = desk.look()
    assert called == Called(1, "host-n1 left", ("n1",))
    heir = Leader(Terms(1, 2), who("n2"))
    heir.inherit(Round(1, (who("n1"), who("n2")), ""), "n1", ("n1",))
    did = heir.step(Observation(0.0, (who("n2"),), {"n2": Beat(1, Phase.READY, 1)}))
    assert members(did) == ["n2"]


def test_those_who_stay_are_most_of_those_who_have_not_left() -> None:
    desk = Desk(Terms(1, 4)).started("n1", "n2", "n3", "n4")
    desk.set(Phase.GONE, "n3", "n4")
    desk.silent.add("n2")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1")
    assert members(desk.look()) == ["n1"]


def test_an_heir_that_knew_less_learns_from_those_who_come() -> None:
    desk = inherited("n1", "n2", "n3", "n4")
    newer = Round(8, tuple(map(who, ("n1", "n3", "n4", "n5"))), "")
    desk.beats |= {node: Beat(1, Phase.READY, 8) for node in ("n3", "n4", "n5")}
    did = desk.look(who("n3"), who("n4"), who("n5"), last=newer)
    assert [each.generation for each in did if isinstance(each, Called)] == [8]
    desk.look(seconds=1.2)
    (formed,) = [each for each in desk.log if isinstance(each, Formed)]
    assert (formed.round.generation, members([formed])) == (9, ["n3", "n4", "n5"])


def test_who_takes_over() -> None:
    formed = Round(3, tuple(map(who, ("n1", "n2", "n3", "n4"))), "")
    known = Known(round=formed, call=Call("host-n3 left", ("n3",)))
    assert [each.node for each in heirs(known, "n1")] == ["n2", "n4"]
    assert [each.node for each in heirs(replace(known, call=None), "n2")] == ["n1", "n3", "n4"]
    assert heirs(Known(), "n1") == []
    later, earlier = Precedence(8, 2, "x"), Precedence(8, 0, "a")
    assert Precedence(9, 5, "a").goes_before(later)
    assert earlier.goes_before(later)
    assert not later.goes_before(earlier)
