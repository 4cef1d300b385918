"""Half of a round's members are left: which half goes on, and that one at most does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from rendezvous_desk import LOOK, Desk, come, inherited, members, who

from ftrun.rendezvous.actions import Formed
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.model import Beat, Job, Phase, Round, Terms
from ftrun.rendezvous.note import Board, Note
from ftrun.rendezvous.noting import Noting
from ftrun.rendezvous.tie import HEIR_WAITS, Claim

if TYPE_CHECKING:
    from pathlib import Path

FOUR = Round(7, tuple(map(who, ("n1", "n2", "n3", "n4"))), "")
HEIR = Job("a-run", "a-leader", "host-n3", "n3")


def halved() -> Desk:
    """The leader and another member; two more are lost, and all that are left have stopped their workers."""
    desk = Desk(Terms(1, 4, witness=True)).started("n1", "n2", "n3", "n4")
    desk.silent |= {"n3", "n4"}
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1", "n2")
    return desk


def heir(*, silent: bool = False) -> Desk:
    """A leader that has taken over, with another member; two are lost, the former leader among them."""
    desk = Desk(Terms(1, 4, witness=True))
    desk.leader = Leader(desk.terms, who("n3"))
    desk.leader.inherit(FOUR, "n1", silent=silent)
    desk.beats = {node: Beat(5, Phase.READY, 7) for node in ("n3", "n4")}
    desk.look(who("n3"), who("n4"))
    return desk


def test_the_leaders_half_asks_at_once_and_goes_on_when_it_may() -> None:
    desk = halved()
    (last,) = [each.round for each in desk.log if isinstance(each, Formed)]
    assert members(desk.look(seconds=1)) == []
    assert desk.leader.wanted == last.key
    assert members(desk.look(claim=Claim(last.key, won=True))) == ["n1", "n2"]
    assert desk.leader.wanted == ""
    # And so does the half of that half: it is another round, and another claim.
    desk.run("n1", "n2")
    desk.silent.add("n2")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1")
    assert members(desk.look(seconds=1)) == []
    assert desk.leader.wanted not in ("", last.key)


def test_the_others_half_leaves_it_some_seconds_for_that() -> None:
    desk = heir()
    desk.look(seconds=1.2)  # until the fourth is lost
    assert members(desk.look(seconds=HEIR_WAITS - 1.5)) == []
    assert desk.leader.wanted == ""
    desk.look(seconds=1.7)
    assert desk.leader.wanted == FOUR.key
    assert desk.leader.lobby().split(";")[0].endswith("or half of them, for which the shared directory is asked")
    assert members(desk.look(claim=Claim(FOUR.key, won=True))) == ["n3", "n4"]


def test_where_the_other_half_was_first_this_one_waits_and_says_so() -> None:
    desk = heir()
    desk.look(seconds=5)
    assert members(desk.look(seconds=30, claim=Claim(FOUR.key, won=False))) == []
    assert desk.leader.wanted == ""
    assert desk.leader.lobby().split(";")[0].endswith("4 members more than half have to be, as the others may go on")
    # Most of the last round need nobody's word.
    assert members(come(desk, "n2")) == ["n3", "n4", "n2"]


def test_nothing_is_claimed_by_fewer_or_by_too_few_or_where_there_is_no_directory() -> None:
    few = inherited("n1", "n2", "n3", "n4", "n5", witness=True)
    come(few, "n2", "n3")
    few.look(seconds=20)
    assert few.leader.wanted == ""
    short = inherited("n1", "n2", least=2, witness=True)
    come(short, "n2")
    short.look(seconds=20)
    assert short.leader.wanted == ""
    come(short, "n7")  # one that stood by
    short.look(seconds=HEIR_WAITS + 2 * LOOK)
    assert short.leader.wanted
    assert members(short.look(claim=Claim(short.leader.wanted, won=True))) == ["n2", "n7"]
    alone = inherited("n1", "n2")
    come(alone, "n2")
    assert members(alone.look(seconds=20)) == []
    assert alone.leader.wanted == ""


@pytest.mark.parametrize("witness", [True, False])
def test_a_round_that_a_member_may_not_have_seen_does_not_take_the_place_of_the_one_before(witness: bool) -> None:
    desk = Desk(Terms(1, 4, witness=witness)).started("n1", "n2", "n3")
    desk.silent.add("n3")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1", "n2")
    assert members(desk.look()) == ["n1", "n2"]
    desk.set(Phase.RUNNING, "n1", generation=2)
    desk.silent.add("n2")  # cut off before it has read that: with the third one it is most of the first round
    assert members(desk.look(seconds=1.5)) == []
    desk.set(Phase.READY, "n1")
    assert members(desk.look(seconds=5)) == []
    assert desk.leader.wanted == ""
    desk.silent.discard("n2")
    assert members(desk.look(seconds=desk.terms.last_call + 0.2)) == ["n1", "n2"]


def test_of_two_the_one_that_has_not_seen_the_last_round_asks_for_the_same_as_the_leader() -> None:
    desk = Desk(Terms(1, 2, witness=True)).started("n1", "n2")
    first = next(each.round for each in desk.log if isinstance(each, Formed))
    desk.set(Phase.READY, "n1", "n2")
    desk.look(seconds=0.2)
    second = next(each.round for each in desk.log if isinstance(each, Formed) and each.round.generation == 2)
    desk.set(Phase.RUNNING, "n1", generation=2)
    desk.silent.add("n2")
    desk.look(seconds=1.5)
    desk.set(Phase.READY, "n1")
    desk.look(seconds=0.2)
    assert desk.leader.wanted == first.key
    assert members(desk.look(claim=Claim(first.key, won=True), seconds=0.2)) == []
    assert desk.leader.wanted == second.key  # it may have seen it, too
    assert members(desk.look(claim=Claim(second.key, won=True))) == ["n1"]


def test_a_round_has_a_key_of_its_own_in_every_life_of_a_run() -> None:
    assert FOUR.key == replace(FOUR, reason="another").key
    anew = replace(FOUR, members=(*FOUR.members[:3], replace(who("n4"), node="n4b")))
    assert len({FOUR.key, replace(FOUR, generation=8).key, anew.key}) == 3
    assert Round.decode(FOUR.encode()).key == FOUR.key


def test_of_many_that_claim_a_round_one_is_first_and_stays_it(tmp_path: Path) -> None:
    boards = [Board(tmp_path / "notes", "a-run") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: boards[number].claim(FOUR.key, f"n{number}"), range(8)))
    assert won.count(True) == 1
    first = won.index(True)
    assert boards[first].claim(FOUR.key, f"n{first}")
    assert not boards[0].claim(FOUR.key, "n9")
    assert [each.name for each in (tmp_path / "notes").iterdir()] == [f"half-{FOUR.key}"]
    (tmp_path / "blocked").touch()
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system says
        Board(tmp_path / "blocked", "a-run").claim(FOUR.key, "n1")


@dataclass
class Wishes:
    """As the leader of half of the seventh round, for so many looks."""

    looks: int = 2
    wanted: str = FOUR.key
    claim: Claim | None = None
    generation: int = 7
    latest: int = 7
    port: int = 77
    over: bool = False
    formed: Round = FOUR
    job: Job = HEIR

    @property
    def leads(self) -> bool:
        self.looks -= 1
        return self.looks >= 0


@pytest.mark.parametrize("others", [7, 8])
def test_half_of_a_round_that_most_have_gone_on_from_is_not_claimed(tmp_path: Path, others: int) -> None:
    board, leader = Board(tmp_path / "notes", "a-run"), Wishes()
    board.write(Note("a-run", "another", "host-n1", "10.0.0.1", 77, others, 1))
    Noting(board, leader, "10.0.0.3")._run()  # type: ignore[arg-type]
    assert leader.claim == Claim(FOUR.key, won=others == 7)
    assert (tmp_path / "notes" / f"half-{FOUR.key}").exists() is (others == 7)


def test_where_the_storage_is_not_mounted_nothing_is_claimed(tmp_path: Path) -> None:
    leader = Wishes()
    Noting(Board(tmp_path / "runs" / "job" / "rendezvous", "a-run"), leader, "10.0.0.3")._run()  # type: ignore[arg-type]
    assert leader.claim is None
    assert not list(tmp_path.iterdir())
