"""What a keeper decides, from tables: no process, no storage."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from keeper_kit import a_seal, name_of

from ftrun.checkpoint.keeper import book, scan
from ftrun.checkpoint.keeper.decide import GONE, Action, Known, Stage, View, decide
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.keeper.rate import Limiter, Meter
from ftrun.checkpoint.keeper.results import Waits
from ftrun.checkpoint.keeper.votes import Split, absent, some, splits
from ftrun.checkpoint.keeper.work import NodeWork, works
from ftrun.checkpoint.memory.tier import Slot, Tier, put
from ftrun.checkpoint.records import Word
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = name_of(5, 10), name_of(5, 20), name_of(5, 30)
OLD = name_of(4, 90)
ALL = frozenset(("local", "root", "commit"))


def work(attempt: str, ranks: tuple[int, ...] = (0,), world: int = 1, **changes: Any) -> NodeWork:
    seals = [a_seal(attempt, rank, world, **changes) for rank in ranks]
    return works((), seals)[attempt]


def known(attempt: str, stage: Stage = Stage.SEALED, **changes: Any) -> Known:
    return replace(Known(work(attempt), stage, 0.0), **changes)


def view(*each: Known, **changes: Any) -> View:
    plain = View(
        known=each,
        now=100.0,
        run_id="run",
        epoch=5,
        lineage=1,
        idle=ALL,
        busy=frozenset(),
        local=False,
        closing=False,
        timeout=60.0,
    )
    return replace(plain, **changes)


def half(attempt: str, **changes: Any) -> Known:
    """Rank 1 of the node's two has not sealed."""
    return replace(Known(work(attempt, (0,), 2), Stage.SEALED, 90.0), **changes)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(view(), [], id="nothing"),
        pytest.param(view(known(A)), [("upload", A)], id="to the root"),
        pytest.param(view(known(A), local=True), [("copy", A)], id="to the local tier first"),
        pytest.param(view(known(A, skip_local=True), local=True), [("upload", A)], id="local tier is full"),
        pytest.param(view(known(A, Stage.LOCAL), local=True), [("upload", A)], id="from the local tier"),
        pytest.param(view(known(A, Stage.DONE)), [("settle", A)], id="commit"),
        pytest.param(view(known(A, Stage.COMMITTED)), [("tidy", A)], id="retention"),
        pytest.param(view(known(A, Stage.FAILED)), [("note", A)], id="tell the others"),
        pytest.param(view(known(B), known(A)), [("upload", A)], id="oldest first"),
        pytest.param(view(known(B), known(OLD)), [("upload", OLD)], id="an older epoch's first"),
        pytest.param(
            view(known(A, Stage.DONE), known(B, Stage.LOCAL), known(C), local=True),
            [("copy", C), ("settle", A), ("upload", B)],
            id="all lanes at once",
        ),
        pytest.param(view(known(A, due=101.0), known(B)), [], id="nobody overtakes"),
        pytest.param(
            view(known(A, Stage.DONE, due=101.0), known(B, Stage.DONE)),
            [("settle", B)],
            id="commits don't wait for others",
        ),
        pytest.param(view(known(A), busy=frozenset([A])), [], id="busy with it"),
        pytest.param(view(known(A), known(B), busy=frozenset([A]), idle=ALL - {"root"}), [], id="lane is busy"),
        pytest.param(view(half(A)), [], id="waits for a rank"),
        pytest.param(view(half(A), known(B)), [("upload", B)], id="an incomplete set stops nobody"),
        pytest.param(view(half(A, since=39.0)), [("drop", A)], id="waited long enough for a rank"),
        pytest.param(view(half(OLD)), [("drop", OLD)], id="incomplete, of an older epoch"),
        pytest.param(view(half(A), closing=True), [("drop", A)], id="incomplete, and nobody will seal any more"),
        pytest.param(view(known(OLD)), [("upload", OLD)], id="complete, of an older epoch"),
        pytest.param(view(known(OLD), lineage=5), [("drop", OLD)], id="the run was started over"),
        pytest.param(view(known(A), run_id="other"), [("drop", A)], id="another run's"),
        pytest.param(view(known(A, told="torn")), [("drop", A)], id="somebody said that it is torn"),
        pytest.param(view(known(A, Stage.FAILED, told="torn")), [("note", A)], id="said already"),
        pytest.param(view(known(A, gone=100.0 - GONE)), [("drop", A)], id="replaced"),
        pytest.param(view(known(A, gone=99.9)), [], id="perhaps replaced"),
        pytest.param(view(known(A, trouble="down", troubled=41.0)), [("upload", A)], id="patient"),
        pytest.param(view(known(A, trouble="down", troubled=39.0)), [("drop", A)], id="patient no more"),
        pytest.param(
            view(known(A, trouble="full", full=True, troubled=89.0)), [("drop", A)], id="full for ten seconds"
        ),
        pytest.param(
            view(known(A, Stage.DONE, trouble="rank 3", troubled=39.0)), [("drop", A)], id="waited for a node"
        ),
        pytest.param(
            view(known(OLD, Stage.DONE, trouble="rank 3", others=True, troubled=94.0)), [("settle", OLD)], id="others"
        ),
        pytest.param(
            view(known(OLD, Stage.DONE, trouble="rank 3", others=True, troubled=41.0), closing=True, closed_for=5.0),
            [("drop", OLD)],
            id="others, who may be lost",
        ),
        pytest.param(
            view(known(OLD, Stage.DONE, trouble="rank 3", others=True, troubled=41.0), closing=True, closed_for=4.0),
            [("settle", OLD)],
            id="others, who may have done it",
        ),
        pytest.param(
            view(known(A, Stage.DONE, trouble="rank 3", others=True, troubled=94.0), closing=True, closed_for=9.0),
            [("settle", A)],
            id="others, who are at it",
        ),
        pytest.param(
            view(known(A, Stage.DONE, trouble="epoch 6", stale=True, troubled=94.0)), [("drop", A)], id="left behind"
        ),
        pytest.param(view(unrolled=True), [("roll", "")], id="roll forward"),
        pytest.param(view(known(A, Stage.DONE), unrolled=True), [("settle", A)], id="roll forward later"),
    ],
)
def test_what_is_next(seen: View, expected: list[tuple[str, str]]) -> None:
    assert sorted((action.do, action.attempt) for action in decide(seen)) == expected


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (view(half(OLD)), "rank 1 ended before its part was copied"),
        (
            view(replace(half(A), work=replace(half(A).work, superseded=frozenset([1])))),
            "rank 1 never completed its part",
        ),
        (view(known(A), run_id="other"), "it belongs to the run 'run'"),
        (view(known(A, trouble="down", troubled=39.0)), "down (after 60 s)"),
    ],
)
def test_a_drop_says_why(seen: View, reason: str) -> None:
    assert decide(seen) == [Action("drop", next(iter(seen.known)).attempt, reason)]


# --- what is seen


def test_seals_are_grouped_by_attempt(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    slots = {rank: tier.slots(rank) for rank in (0, 1)}
    found = works(
        [
            (slots[1][0], a_seal(A, 1, 2)),
            (slots[0][0], a_seal(A, 0, 2)),
            (slots[0][1], a_seal(B, 0, 2)),
        ]
    )
    assert [each.rank for each in found[A].seals] == [0, 1]
    assert found[A].slots == (slots[0][0], slots[1][0])
    assert (found[A].missing, found[B].missing) == ((), (1,))
    assert found[B].superseded == frozenset()
    assert found[A].alone
    assert found[A].leads


def test_a_rank_that_sealed_a_newer_one_will_not_seal_the_older() -> None:
    found = works((), [a_seal(A, 0, 2), a_seal(B, 1, 2)])
    assert found[A].superseded == frozenset([1])
    assert found[B].superseded == frozenset()


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 7},
        {"node_ranks": (0, 0)},
        {"node_ranks": (0, 9)},
        {"step": 11},
        {"attempt": "../../etc"},
        {"attempt": 7},
        {"files": {}},
        {"files": {"r00000.json": ("/x", 1), "../up": ("/x", 1)}},
    ],
)
def test_a_seal_that_cannot_be_is_no_seal(changes: dict[str, Any]) -> None:
    assert works((), [a_seal(A, 0, 2)])
    assert not works((), [replace(a_seal(A, 0, 2), **changes)])


def test_seals_that_contradict_each_other_are_no_set() -> None:
    found = works((), [a_seal(A, 0, 2), a_seal(A, 1, 2, run_id="other")])
    assert found[A].missing == (1,)


def test_work_survives_as_bytes() -> None:
    one = replace(work(A, (0, 1), 2), committed=True)
    assert NodeWork.from_bytes(one.to_bytes()) == one
    for bad in (b"", b"{}", one.to_bytes()[:-5]):
        with pytest.raises(ValueError, match=r"."):
            NodeWork.from_bytes(bad)


def test_what_is_known_follows_what_is_seen() -> None:
    drained = replace(work(C), drained=frozenset([0]))
    first = book.see({}, {A: work(A), B: work(B), C: drained}, over={B}, now=1.0)
    assert {name: each.stage for name, each in first.items()} == {A: Stage.SEALED}
    gone = book.see(first, {}, over=set(), now=2.0)
    assert gone[A].gone == 2.0
    assert book.see(gone, {}, over=set(), now=3.0)[A].gone == 2.0
    assert book.see(gone, {A: work(A)}, over=set(), now=3.0)[A].gone is None
    done = {A: known(A, Stage.DONE)}
    assert book.see(done, {}, over=set(), now=4.0) == done


def test_slots_are_freed_that_a_dead_keeper_forgot() -> None:
    memory = {A: work(A), B: work(B), C: work(C)}
    freed = book.to_free({A: known(A), B: known(B, Stage.DONE)}, memory, over={C})
    assert [str(each.name) for each in freed] == [B, C]


def test_patience_grows() -> None:
    each = known(A)
    pauses = []
    for _ in range(12):
        each = book.waited(each, Waits("down"), 0.0)
        pauses.append(each.due)
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.05
    assert pauses[-1] == 15.0
    assert (each.trouble, each.troubled, each.tries) == ("down", 0.0, 12)


# --- slots that somebody else wants


def sealed_slot(tmp_path: Path, attempt: str) -> tuple[Slot, NodeWork]:
    tier = Tier(tmp_path)
    slot = tier.slots(0)[0]
    slot.directory.mkdir(parents=True)
    put(slot.seal, a_seal(attempt).to_bytes())
    return slot, scan.Scanner(tier).scan()[attempt]


def test_a_slot_that_was_taken_is_not_held(tmp_path: Path) -> None:
    slot, found = sealed_slot(tmp_path, A)
    put(slot.seal, a_seal(B).to_bytes())
    assert not scan.hold(found)
    assert not slot.draining.exists()
    slot.seal.unlink()
    assert not scan.hold(found)


def test_a_held_slot_says_so(tmp_path: Path) -> None:
    slot, found = sealed_slot(tmp_path, A)
    assert scan.hold(found)
    assert slot.is_marked(slot.draining, A)
    scan.free(found)
    assert slot.is_marked(slot.drained, A)
    assert not slot.draining.exists()
    assert slot.read_seal() == a_seal(A, sealed_at=found.first.sealed_at)


def test_a_seal_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    slot, _ = sealed_slot(tmp_path, A)
    scanner = scan.Scanner(Tier(tmp_path))
    assert list(scanner.scan()) == [A]
    put(slot.seal, a_seal(B).to_bytes())
    assert list(scanner.scan()) == [B]
    slot.seal.write_bytes(slot.seal.read_bytes()[:40])
    assert list(scanner.scan()) == []


def test_either_the_keeper_or_the_worker_has_a_slot(tmp_path: Path) -> None:
    """Both go for it at once, many times: never do both believe that it is theirs."""
    slot, found = sealed_slot(tmp_path, A)
    content = slot.seal.read_bytes()
    aside = slot.seal.with_name("aside")
    wins = {"keeper": 0, "worker": 0}
    for _ in range(300):
        for marker in (slot.draining, aside):
            marker.unlink(missing_ok=True)
        put(slot.seal, content)
        taken: list[bool] = []
        start = threading.Barrier(2)

        def take(start: threading.Barrier = start, taken: list[bool] = taken) -> None:
            start.wait()
            slot.seal.rename(aside)
            mine = not slot.is_marked(slot.draining, A)
            if not mine:
                aside.rename(slot.seal)
            taken.append(mine)

        worker = threading.Thread(target=take)
        worker.start()
        start.wait()
        held = scan.hold(found)
        worker.join()
        assert not (held and taken[0])
        wins["keeper"] += held
        wins["worker"] += taken[0]
    assert wins["keeper"] or wins["worker"]


# --- whether ranks fit together


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({0: Word("a", {}), 1: Word("a", {})}, []),
        ({0: Word("a", {}), 1: Word("b", {}), 2: Word("a", {})}, [Split("", ((0, 2), (1,)))]),
        ({0: Word("a", {"0-1": "x"}), 1: Word("a", {"0-1": "x"})}, []),
        ({0: Word("a", {"0-1": "x"}), 1: Word("a", {"0-1": "y"})}, [Split("0-1", ((0,), (1,)))]),
        ({0: Word("a", {"0-1": "x"}), 1: Word("a", {})}, [Split("0-1", ((0,), (1,)))]),
        (
            {0: Word("a", {"1-2": "x"}), 1: Word("a", {"1-2": "x"}), 2: Word("a", {"1-2": "x"})},
            [Split("1-2", ((0, 1, 2), (0,)))],
        ),
    ],
)
def test_ranks_that_disagree(words: dict[int, Word], expected: list[Split]) -> None:
    assert splits(words) == expected


def test_ranks_are_waited_for_by_identity() -> None:
    assert absent({0, 1, 9}, 4) == [2, 3]
    assert some(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


# --- scripted faults, rates


def test_faults_happen_where_and_as_often_as_they_say() -> None:
    faults = Faults.from_environment({"FTRUN_KEEPER_FAULT": "done@2:enospc*2,manifest:raise"})
    faults.hit("done")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            faults.hit("done")
    faults.hit("done")
    with pytest.raises(OSError, match="scripted at manifest"):
        faults.hit("manifest")
    faults.hit("manifest")


@pytest.mark.parametrize("text", ["nowhere:kill", "done:explode", "done", "done@x:kill"])
def test_a_fault_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="FTRUN_KEEPER_FAULT"):
        Faults.from_environment({"FTRUN_KEEPER_FAULT": text})


def test_a_limit_is_kept_by_all_threads_together() -> None:
    limiter = Limiter(4_000_000)
    began = time.monotonic()
    threads = [threading.Thread(target=lambda: [limiter.take(100_000) for _ in range(8)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 2_400_000 / 4_000_000 - 0.26


def test_a_meter_never_passes_its_total() -> None:
    meter = Meter(10)
    meter.add(8)
    meter.add(8)
    assert meter.done == 10
