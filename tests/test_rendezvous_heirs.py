"""What an heir has to know of a leader that leaves or vanishes, so that no round is formed twice or by too few."""

from __future__ import annotations

from rendezvous_desk import Desk, come, inherited, members, who

from ftrun.rendezvous.actions import Called, Formed
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.model import Beat, Phase, Round, Terms


def test_who_left_on_purpose_is_not_called_lost_by_an_heir() -> None:
    heir = inherited("n1", "n2", "n3")
    heir.leader = Leader(heir.terms, who("n2"))
    heir.leader.inherit(Round(7, tuple(map(who, ("n1", "n2", "n3"))), ""), "n1", ("n1",))
    assert heir.look() == [Called(7, "the rendezvous has a new host, host-n1 left", ("n1",))]


def test_who_leaves_after_the_call_is_named_by_a_further_one() -> None:
    desk = Desk(Terms(1, 4)).started("n1", "n2", "n3", "n4")
    desk.set(Phase.GONE, "n4")
    assert desk.look() == [Called(1, "host-n4 left", ("n4",))]
    desk.set(Phase.GONE, "n1")  # the host itself, while the others stop their workers
    assert desk.look() == [Called(1, "host-n4 left, host-n1 left", ("n4", "n1"))]
    assert desk.look(seconds=0.5) == []  # once
    # With both known to have left, one of the two that stay is half of them, and two are all.
    heir = Desk(Terms(1, 4))
    heir.leader = Leader(heir.terms, who("n2"))
    heir.leader.inherit(Round(1, tuple(map(who, ("n1", "n2", "n3", "n4"))), ""), "n1", ("n4", "n1"))
    heir.beats = {node: Beat(5, Phase.READY, 1) for node in ("n2", "n3")}
    assert members(heir.look(who("n2"), who("n3"))) == ["n2", "n3"]


def test_a_host_that_leaves_while_nodes_meet_hands_the_round_over() -> None:
    desk = Desk(Terms(1, 3)).started("n1", "n2", "n3")
    desk.set(Phase.READY, "n2")
    assert desk.look() == [Called(1, "host-n2 starts again")]
    for _ in range(200):  # long after the call
        desk.look(seconds=0.05)
    desk.set(Phase.GONE, "n1")
    desk.set(Phase.READY, "n3")
    assert members(desk.look(seconds=3)) == []  # whoever leads then would have to form it once more
    assert members(desk.look(seconds=3)) == ["n2", "n3"]  # nobody has come to lead


def test_those_who_had_left_before_the_leader_was_lost_are_told_by_its_heir() -> None:
    heir = inherited("n1", "n2", "n3", "n4")
    heir.leader.inherit(Round(8, tuple(map(who, ("n1", "n2", "n3", "n4"))), ""), "n1", ("n4",))
    (called,) = [each for each in heir.look() if isinstance(each, Called)]
    assert (called.generation, called.left) == (8, ("n4",))


def test_after_a_silent_host_a_number_is_passed_over_that_it_may_have_used() -> None:
    last = Round(7, tuple(map(who, ("n1", "n2", "n3"))), "")
    found = {}
    for silent in (True, False):
        desk = inherited("n1", "n2", "n3")
        desk.leader = Leader(desk.terms, who("n2"))
        desk.leader.inherit(last, "n1", silent=silent)
        come(desk, "n2", "n3")
        desk.look(seconds=2)
        desk.run("n2", "n3")
        desk.look()
        desk.set(Phase.READY, "n3")
        desk.look()
        desk.set(Phase.READY, "n2")
        desk.look()
        found[silent] = [each.round.generation for each in desk.log if isinstance(each, Formed)]
    assert found == {True: [9, 10], False: [8, 9]}


def test_members_of_a_round_carry_no_traits_which_all_would_have_to_read() -> None:
    desk = Desk(Terms(2, 2)).started("n1", "n2")
    (formed,) = [each.round for each in desk.log if isinstance(each, Formed)]
    assert [each.traits for each in formed.members] == [{}, {}]
    assert [(each.node, each.name, each.address, each.port) for each in formed.members] == [
        (each.node, each.name, each.address, each.port) for each in map(who, ("n1", "n2"))
    ]
