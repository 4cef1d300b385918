"""Half of a round's members are left: which half goes on, and that one at most does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from rendezvous_desk import LOOK, Desk, come, inherited, members, who

from ftrun.rendezvous.actions import Called, Formed
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.model import Beat, Job, Phase, Round, Terms
from ftrun.rendezvous.note import Board, Note
from ftrun.rendezvous.noting import Noting
from ftrun.rendezvous.tie import HEIR_WAITS, Claim, Findings, Half, Wish

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.rendezvous.actions import Action

FOUR = Round(7, tuple(map(who, ("n1", "n2", "n3", "n4"))), "")
HEIR = Job("a-run", "a-leader", "host-n3", "n3")


def said(desk: Desk, *claims: Claim, rival: str = "", rivals_round: int = 0, noted: bool = True) -> Findings:
    """What the directory says now, just after this leader's note was written."""
    return Findings(desk.now + 0.01, claims, desk.now + 0.01 if noted else 0.0, rival, rivals_round)


def halved(**terms: float) -> Desk:
    """The leader and another member; two more are lost, and all that are left have stopped their workers."""
    desk = Desk(Terms(1, 4, witness=True, **terms)).started("n1", "n2", "n3", "n4")  # type: ignore[arg-type]
    desk.silent |= {"n3", "n4"}
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1", "n2")
    return desk


def heir(*, silent: bool = False, **terms: float) -> Desk:
    """A leader that has taken over, with another member; two are lost, the former leader among them."""
    desk = Desk(Terms(1, 4, witness=True, **terms))  # type: ignore[arg-type]
    desk.leader = Leader(desk.terms, who("n3"))
    desk.leader.inherit(FOUR, "n1", silent=silent)
    desk.beats = {node: Beat(5, Phase.READY, 7) for node in ("n3", "n4")}
    desk.look(who("n3"), who("n4"))
    return desk


def test_the_leaders_half_asks_at_once_and_goes_on_when_it_may() -> None:
    desk = halved()
    (last,) = [each.round for each in desk.log if isinstance(each, Formed)]
    assert members(desk.look(seconds=1)) == []
    assert desk.leader.wish == Wish(last.key)
    assert members(desk.look(findings=said(desk, Claim(last.key)))) == ["n1", "n2"]
    assert desk.leader.wish is None
    # And so does the half of that half: it is another round, and another claim.
    desk.run("n1", "n2")
    desk.silent.add("n2")
    desk.look(seconds=1.2)
    desk.set(Phase.READY, "n1")
    assert members(desk.look(seconds=1)) == []
    assert desk.leader.wish not in (None, Wish(last.key))


def test_the_others_half_leaves_it_some_seconds_for_that() -> None:
    desk = heir()
    desk.look(seconds=1.2)  # until the fourth is lost
    assert members(desk.look(seconds=HEIR_WAITS - 1.5)) == []
    assert desk.leader.wish is None
    desk.look(seconds=1.7)
    assert desk.leader.wish == Wish(FOUR.key)
    assert desk.leader.lobby().split(";")[0].endswith("or half of them, for which the shared directory is asked")
    assert members(desk.look(findings=said(desk, Claim(FOUR.key)))) == ["n3", "n4"]


def test_where_the_other_half_was_first_this_one_waits_and_says_so() -> None:
    desk = heir()
    desk.look(seconds=5)
    assert members(desk.look(seconds=30, findings=said(desk, Claim(FOUR.key, mine=False)))) == []
    assert desk.leader.wish is None
    assert desk.leader.lobby().split(";")[0].endswith("4 members more than half have to be, as the others may go on")
    # Most of the last round need nobody's word.
    assert members(come(desk, "n2")) == ["n3", "n4", "n2"]


def test_nothing_is_claimed_by_fewer_or_by_too_few_or_where_there_is_no_directory() -> None:
    few = inherited("n1", "n2", "n3", "n4", "n5", witness=True)
    come(few, "n2", "n3")
    few.look(seconds=20)
    assert few.leader.wish is None
    short = inherited("n1", "n2", least=2, witness=True)
    come(short, "n2")
    short.look(seconds=20)
    assert short.leader.wish is None
    come(short, "n7")  # one that stood by
    short.look(seconds=HEIR_WAITS + 2 * LOOK)
    assert short.leader.wish is not None
    assert members(short.look(findings=said(short, Claim(short.leader.wish.key)))) == ["n2", "n7"]
    alone = inherited("n1", "n2")
    come(alone, "n2")
    assert members(alone.look(seconds=20)) == []
    assert alone.leader.wish is None


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
    assert desk.leader.wish is None
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
    assert desk.leader.wish == Wish(first.key)
    assert members(desk.look(findings=said(desk, Claim(first.key)), seconds=0.2)) == []
    assert desk.leader.wish == Wish(second.key)  # it may have seen it, too
    assert members(desk.look(findings=said(desk, Claim(second.key)))) == ["n1"]


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
    wish: Wish | None = Wish(FOUR.key)  # noqa: RUF009 - frozen
    asked: tuple[str, ...] = (FOUR.key,)
    unheard: bool = True
    findings: Findings | None = None
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
    assert leader.findings is not None
    assert leader.findings.claims == (Claim(FOUR.key, int(others == 7), mine=others == 7),)
    # Also where this leader has written its own note over it since.
    assert (leader.findings.rival, leader.findings.rivals_round) == ("another 1", others)
    assert (board.read() or board).leader == ("another" if others == 8 else HEIR.leader)  # type: ignore[union-attr]
    assert (tmp_path / "notes" / f"half-{FOUR.key}").exists() is (others == 7)


def test_where_the_storage_is_not_mounted_nothing_is_claimed(tmp_path: Path) -> None:
    leader = Wishes()
    Noting(Board(tmp_path / "runs" / "job" / "rendezvous", "a-run"), leader, "10.0.0.3")._run()  # type: ignore[arg-type]
    assert leader.findings is not None
    assert leader.findings.claims == (Claim(FOUR.key, 0, mine=False),)
    assert leader.findings.noted == 0.0
    assert not list(tmp_path.iterdir())


# A claim is a lease


def went_on() -> tuple[Desk, Half]:
    """Half of the first round is at work by its claim, which lasts for 60 s."""
    desk = halved(claim_lasts=60.0)
    (last,) = [each.round for each in desk.log if isinstance(each, Formed)]
    desk.look(seconds=0.2)
    (formed,) = [each.round for each in desk.look(findings=said(desk, Claim(last.key))) if isinstance(each, Formed)]
    desk.run("n1", "n2")
    assert formed.halves == (Half(last.key, 1, ("host-n3 10.0.0.3", "host-n4 10.0.0.4")),)
    assert Round.decode(formed.encode()) == formed
    desk.look(seconds=0.2)
    return desk, formed.halves[0]


def called(actions: list[Action]) -> list[str]:
    return [each.reason for each in actions if isinstance(each, Called)]


def test_the_half_that_goes_on_stops_once_the_other_one_has_claimed_the_round() -> None:
    desk, half = went_on()
    assert desk.leader.asked == (half.key,)
    for _ in range(100):
        assert not called(desk.look(seconds=1, findings=said(desk, Claim(half.key))))
    over = said(desk, Claim(half.key, 2, mine=False), rival="another 1", rivals_round=4)
    assert "the other nodes go on without these" in called(desk.look(findings=over))[0]
    desk.set(Phase.READY, "n1", "n2")
    assert members(desk.look(seconds=30, findings=over)) == []
    assert "the other nodes go on without these" in desk.leader.lobby()
    # With all of them here nobody can go on elsewhere.
    desk.silent.clear()
    desk.set(Phase.READY, "n3", "n4")
    assert members(desk.look(seconds=1, findings=over)) == ["n1", "n2", "n3", "n4"]
    desk.run("n1", "n2", "n3", "n4")
    assert not called(desk.look(seconds=100, findings=over))
    assert desk.leader.asked == ()


def test_it_stops_before_that_if_it_cannot_renew_its_claim_and_goes_on_when_it_can() -> None:
    desk, half = went_on()
    last = said(desk, Claim(half.key))
    assert not called(desk.look(seconds=44, findings=last))
    assert "was not renewed in the shared directory in time" in called(desk.look(seconds=2, findings=last))[0]
    desk.set(Phase.READY, "n1", "n2")
    assert members(desk.look(seconds=10, findings=last)) == []
    assert (
        members(desk.look(seconds=2, findings=said(desk, Claim(half.key), noted=False))) == []
    )  # it reads, and no more
    assert members(desk.look(findings=said(desk, Claim(half.key)))) == ["n1", "n2"]
    # One that was stopped, and whose clock went on, doesn't wait for a look at the directory.
    desk.run("n1", "n2")
    desk.look(findings=said(desk, Claim(half.key)))
    desk.now += 46
    assert called(desk.look())


def test_workers_that_are_about_to_leave_in_order_have_no_time_for_that_any_more() -> None:
    desk, half = went_on()
    assert called(desk.look(who("n5"), findings=said(desk, Claim(half.key)))) == ["host-n5 joins"]
    (again,) = [
        each for each in desk.look(findings=said(desk, Claim(half.key, 2, mine=False))) if isinstance(each, Called)
    ]
    assert (again.growth, "go on without these" in again.reason) == (False, True)


def test_an_heir_of_half_of_a_round_asks_before_it_goes_on() -> None:
    _, half = went_on()
    for number, goes_on in ((1, True), (2, False)):
        desk = Desk(Terms(1, 4, witness=True, claim_lasts=60.0))
        desk.leader = Leader(desk.terms, who("n5"))
        desk.leader.inherit(Round(8, tuple(map(who, ("n1", "n5", "n6"))), "", (half,)), "n1")
        desk.beats = {node: Beat(5, Phase.READY, 8) for node in ("n5", "n6")}
        assert members(desk.look(who("n5"), who("n6"))) == []
        assert members(desk.look(seconds=3)) == []
        found = Claim(half.key, number, mine=False)
        assert members(desk.look(seconds=1, findings=said(desk, found, noted=False))) == []
        assert members(desk.look(seconds=1, findings=said(desk, found))) == (["n5", "n6"] if goes_on else [])
        assert desk.leader.wish is None


def test_the_half_that_waits_claims_the_round_once_the_other_one_shows_no_sign_for_long() -> None:
    desk = heir(claim_lasts=60.0)
    desk.look(seconds=5)
    lost = Claim(FOUR.key, 1, mine=False)
    for count in range(100):  # it lives
        assert members(desk.look(seconds=1, findings=said(desk, lost, rival=f"another {count}", rivals_round=8))) == []
    assert desk.leader.wish is None
    assert "these may once the shared directory has shown no sign of them for 60 s" in desk.leader.lobby()
    desk.look(seconds=300)  # the directory can't be read
    desk.now += 300  # this one was stopped
    for _ in range(57):
        desk.look(seconds=1, findings=said(desk, lost, rival="another 99", rivals_round=8))
    assert desk.leader.wish is None
    for _ in range(3):
        desk.look(seconds=1, findings=said(desk, lost, rival="another 99", rivals_round=8))
    assert desk.leader.wish == Wish(FOUR.key, 2, "another 99")
    # Whoever is awake there has some seconds to see it.
    mine = said(desk, Claim(FOUR.key, 2), rival="another 99", rivals_round=8)
    assert members(desk.look(seconds=4.8, findings=mine)) == []
    (formed,) = [each.round for each in desk.look(seconds=0.5, findings=mine) if isinstance(each, Formed)]
    assert [each.node for each in formed.members] == ["n3", "n4"]
    assert formed.reason.endswith(", and the shared directory showed no sign of the others")
    assert formed.generation == 10  # the other half may have formed one more that nobody has seen
    assert formed.halves == (Half(FOUR.key, 2, ("host-n1 10.0.0.1", "host-n2 10.0.0.2")),)
    desk.run("n3", "n4")
    desk.look(findings=said(desk, Claim(FOUR.key, 2)))
    assert called(desk.look(findings=said(desk, Claim(FOUR.key, 3, mine=False))))


@pytest.mark.parametrize(("lasts", "number", "rival"), [(0.0, 1, "another 1"), (60.0, 1, ""), (60.0, 0, "another 1")])
def test_it_does_not_where_that_is_not_wanted_or_the_run_has_ended_or_most_have_gone_on(
    lasts: float, number: int, rival: str
) -> None:
    desk = heir(claim_lasts=lasts)
    desk.look(seconds=5)
    for _ in range(200):
        lost = Claim(FOUR.key, number, mine=False)
        assert members(desk.look(seconds=1, findings=said(desk, lost, rival=rival, rivals_round=8))) == []
    assert desk.leader.wish is None


def test_of_those_that_were_started_anew_nobody_knows_what_they_have_gone_on_to() -> None:
    desk = heir(claim_lasts=60.0)
    desk.look(seconds=5)
    lost = said(desk, Claim(FOUR.key, 1, mine=False))
    desk.look(findings=lost)
    for node in ("n2", "n1"):
        anew = replace(who(node), node=f"{node}b")
        desk.beats[anew.node] = Beat(5, Phase.READY, 0)
        goes_on = members(desk.look(anew, seconds=desk.terms.last_call + 1, findings=lost))
        # With the second one on their side, the first one may go on by the other half's claim. With both nobody can.
        assert goes_on == ([] if node == "n2" else ["n3", "n4", "n2b", "n1b"])


def test_half_of_a_round_is_no_half_by_those_that_were_started_anew() -> None:
    desk = heir(claim_lasts=60.0)
    desk.silent.add("n4")
    anew = replace(who("n2"), node="n2b")
    desk.beats[anew.node] = Beat(5, Phase.READY, 0)
    desk.look(anew, seconds=5)
    # Most may have gone on before with the second one, without a claim, and know nothing of a later one.
    for _ in range(100):
        desk.look(seconds=1, findings=said(desk, Claim(FOUR.key, 1, mine=False), rival="another 1", rivals_round=8))
    assert desk.leader.wish is None


def test_a_claim_that_was_won_long_ago_counts_for_nothing() -> None:
    desk = halved(claim_lasts=60.0)
    (last,) = [each.round for each in desk.log if isinstance(each, Formed)]
    desk.look(seconds=1)
    won = said(desk, Claim(last.key))
    desk.now += 50  # all of this process was stopped in between
    assert members(desk.look(seconds=1, findings=won)) == []
    assert desk.leader.wish == Wish(last.key)
    assert members(desk.look(seconds=1, findings=said(desk, Claim(last.key, 2, mine=False)))) == []


def test_later_claims_are_files_of_their_own_and_none_is_made_while_the_others_live(tmp_path: Path) -> None:
    board = Board(tmp_path / "notes", "a-run")
    assert board.claimed(FOUR.key, "n3") == Claim(FOUR.key, 0, mine=False)
    assert board.claim(FOUR.key, "n1")
    board.write(Note("a-run", "another", "host-n1", "10.0.0.1", 77, 8, 5))
    for rival, number in (("another 4", 1), ("another 5", 2)):
        leader = Wishes(looks=3, wish=Wish(FOUR.key, 2, rival))
        Noting(board, leader, "10.0.0.3", 60.0)._run()  # type: ignore[arg-type]
        assert leader.findings is not None
        assert leader.findings.claims == (Claim(FOUR.key, number, mine=number == 2),)
    assert board.claimed(FOUR.key, "n1") == Claim(FOUR.key, 2, mine=False)
    assert not board.claim(FOUR.key, "n4", 2)
