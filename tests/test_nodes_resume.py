"""What an attempt of several nodes resumes from: snapshots whose parts lie in several memories, and who has which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from conftest import eventually
from nodes_kit import run_fixture, snapshot  # noqa: F401 - a fixture
from rendezvous_kit import unhurried

from ftrun import events
from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.keeper import seats
from ftrun.checkpoint.layout import AttemptName, attempt_key, done_json
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.errors import CheckpointError, UsageError
from ftrun.launch import bringing_in, rounds
from ftrun.launch.gathering import Gathering
from ftrun.rendezvous.round_store import RoundBroken

if TYPE_CHECKING:
    from nodes_kit import Launcher, Run

pytestmark = pytest.mark.slow


def named(epoch: int, step: int) -> AttemptName:
    return AttemptName(epoch, step, f"{step:08x}")


def pair(run: Run, *options: str) -> tuple[Launcher, Launcher]:
    one, two = run.launcher(*options), run.launcher(*options)
    first, second = run.meet(one, two)
    assert (first, second.resume) == (second, None)
    return one, two


def half_committed(run: Run) -> tuple[Launcher, Launcher, AttemptName]:
    """Two nodes, and a snapshot of both of which node 1 has brought its part to the root."""
    one, two = pair(run)
    made = snapshot(named(1, 10))
    one.seal(made, [0])
    two.seal(made, [1])
    two.keep()
    root = one.rounds._root
    eventually(lambda: root.size(attempt_key(made.name, done_json(1))), 60, "the word of node 1")
    return one, two, made.name


def test_a_snapshot_in_several_memories_is_resumed_from(run: Run) -> None:
    one, two = pair(run)
    older, newer = (snapshot(named(1, step)) for step in (10, 20))
    for slot, made in enumerate((older, newer)):
        one.seal(made, [0], slot)
        two.seal(made, [1], slot)
    # No keeper runs yet: the workers died a moment after they sealed.
    first, second = run.meet(one, two)
    assert first == second
    assert (first.resume, first.resume_sealed, first.epoch) == (str(newer.name), False, 2)
    assert run.committed() == [str(newer.name), str(older.name)]
    assert one.warned == two.warned == ""


def test_each_node_reads_from_where_it_is_nearest(run: Run) -> None:
    one, two = pair(run)
    made = snapshot(named(1, 10))
    one.seal(made, [0])
    two.seal(made, [1])
    (begun, _) = run.meet(one, two)
    two.tier.drop(1)  # a node that is new, or was switched off and on
    root = one.rounds._root
    for launcher, sealed in ((one, [0]), (two, [])):
        stored = open_stored(root, begun.resume, 0, 2, tier=launcher.tier)
        opened = [each for each in stored._files._nearer if each.where == "memory"]
        assert [sorted(each.seals) for each in opened] == ([sealed] if sealed else [])
        assert torch.equal(stored.value("tracked")["w"], torch.arange(100_000.0) + 10)
        assert stored.notes == ()
        stored.close()


def test_what_lay_on_a_lost_node_alone_is_given_up_and_the_one_before_is_used(run: Run) -> None:
    one, two = pair(run)
    older, newer = snapshot(named(1, 10)), snapshot(named(1, 20))
    for each, rank in ((one, 0), (two, 1)):
        each.seal(older, [rank])
    run.meet(one, two)
    later = snapshot(named(2, 20))
    assert newer.name < later.name
    two.kill_keeper()  # before it looks again: it would bring its part to the root
    one.seal(later, [0], 1)
    two.seal(later, [1], 1)
    one.keep()
    two.tier.remove()  # with its node: what wasn't drained is gone
    (begun,) = run.meet(one)
    assert begun.resume == str(older.name)
    assert f"checkpoint {later.name} is passed over: the part of rank 1 lies on no node that is here" in one.warned
    root = one.rounds._root
    assert "done/n0000.failed.json" in root.files(later.name), "nobody waits for it any more"
    assert one.keeping.finish(60), "nor does the end of the run"


def test_keepers_that_stand_still_are_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringing_in, "STILL", 0.5)
    one, two = pair(run)
    made = snapshot(named(1, 10))
    for rank, each in enumerate((one, two)):
        each.keep("root.file:hang*9" if rank else "")
        each.seal(made, [rank])
    (begun, _) = run.meet(one, two)
    assert begun.resume is None
    assert f"checkpoint {made.name} is passed over: its parts were not drained in time: " in one.warned
    two.kill_keeper()  # another one goes on
    eventually(lambda: two.keep() or run.committed(), 60, "its commit, late as it is")


def test_a_lost_node_that_had_done_its_part_loses_nothing(run: Run) -> None:
    one, two, made = half_committed(run)
    two.kill_keeper()
    two.tier.remove()
    (begun,) = run.meet(one)
    assert (begun.resume, begun.resume_sealed) == (str(made), False)
    assert one.warned == ""


def test_the_next_leader_commits_what_the_lost_one_was_about_to(run: Run) -> None:
    one, two = pair(run)
    made = snapshot(named(1, 10))
    one.seal(made, [0])
    two.seal(made, [1])
    two.keep()
    one.keep("manifest:kill")
    root = one.rounds._root
    eventually(lambda: root.size(attempt_key(made.name, done_json(0))), 60, "the word of node 0")
    eventually(lambda: one.keeping._keeper._process.poll() is not None, 60, "the end of its keeper")  # type: ignore[union-attr]
    assert run.committed() == []
    (begun,) = run.meet(two)
    assert begun.resume == str(made.name)
    assert two.keeping.finish(60)


def test_numbers_change_hands_and_each_save_knows_its_own(run: Run) -> None:
    one, two = pair(run)
    two.keep()
    eventually(lambda: seats._is_kept(two.tier), 60, "its keeper")
    three = run.launcher()
    run.meet(one, three)  # two stands still, and three gets its number
    assert three.tier.path != two.tier.path, "which lives on this machine"
    made = snapshot(named(2, 10))
    one.seal(made, [0])
    three.seal(made, [1])
    begun = run.meet(three, two, one)  # another leader, and two is back with another tier's number
    assert [each.resume for each in begun] == [str(made.name)] * 3
    more = snapshot(named(3, 20), 3)
    for rank, each in enumerate((three, two, one)):
        each.seal(more, [rank], 1)
        each.keep()
    root = one.rounds._root
    eventually(lambda: root.size(attempt_key(more.name, done_json(0))), 60, "the word of the node that leaves")
    (last, _) = run.meet(two, one)
    assert last.resume == str(more.name)
    words = {file for file in root.files(more.name) if file.startswith("done/")}
    assert words == {"done/n0000.json", "done/n0001.json", "done/n0002.json"}
    assert {each.warned for each in (one, two, three)} == {""}


def test_nodes_that_all_start_again_in_another_order_find_what_they_had(run: Run) -> None:
    one, two = pair(run)
    made = snapshot(named(1, 10))
    for rank, each in enumerate((one, two)):
        each.keep()
        each.kill_keeper()  # with its launcher, and all that ran in that container
        each.seal(made, [rank])
    paths = {one.tier.path, two.tier.path}
    second, first = run.launcher(), run.launcher()
    (begun, _) = run.meet(second, first)
    assert begun.resume == str(made.name)
    assert {first.tier.path, second.tier.path} == paths


def test_a_node_that_comes_back_from_the_dead_commits_nothing(run: Run) -> None:
    one, two, made = half_committed(run)
    root = one.rounds._root
    # Node 0 stood still when the others went on: its keeper wakes up, and all that is missing is its own part.
    later = epochs.claim(root, one.rounds._plan.run_id, fresh=False, parent=None)
    one.keep()
    outcome = eventually(lambda: outcome_of(one, made), 60, "what its keeper says")
    assert not outcome.committed
    assert f"epoch {later.epoch} has begun without this node" in outcome.reason
    assert run.committed() == []
    assert not [file for file in root.files(made) if "failed" in file], "whoever leads may still find it whole"
    (begun,) = run.meet(two)
    assert begun.resume == str(made)
    assert reader.resume_point(root, one.rounds._plan.run_id).commit is not None


def outcome_of(launcher: Launcher, name: AttemptName) -> Outcome | None:
    launcher.keep()
    return Outcomes(launcher.tier).get(str(name))


def left_with_a_copy(run: Run) -> tuple[Launcher, AttemptName]:
    """A node that has a copy of what the other one had when it was lost, before any of it was on the root."""
    one, two = pair(run, "--set", "checkpoint.peer_copies=1")
    one.keep()
    two.keep("root.file:hang")
    made = snapshot(named(1, 10))
    for rank, each in enumerate((one, two)):
        each.seal(made, [rank])
    eventually(lambda: [seal.rank for _, seal in one.tier.copies.sealed()] == [1], 60, "the copy")
    two.kill_keeper()
    two.tier.remove()
    return one, made.name


def test_what_another_node_has_a_copy_of_is_not_lost(run: Run) -> None:
    one, made = left_with_a_copy(run)
    copies = one.tier.copies
    (begun,) = run.meet(one)
    assert (begun.resume, run.committed(), one.warned) == (str(made), [str(made)], "")
    root = one.rounds._root
    assert {"done/n0000.json", "done/n0001.json"} <= root.files(made).keys()
    assert one.keeping.finish(60)
    assert not copies.path.exists()


def test_copies_are_kept_where_the_run_ends_without_the_commit(run: Run) -> None:
    one, made = left_with_a_copy(run)
    assert not one.keeping.finish(1.0), "nobody brings the other part"
    assert [seal.rank for _, seal in one.tier.copies.sealed()] == [1]
    again = run.launcher("--set", "checkpoint.peer_copies=1")
    (begun,) = run.meet(again)
    assert begun.resume == str(made)


def test_a_leader_whose_round_is_over_takes_no_epoch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_ROOT_PAUSE", 0.1)
    one, _ = pair(run)
    events_file = one.rounds._plan.run_dir.events()
    events.EventLog(events_file).write(events.Committed(10, "away", 0.1, 1))  # it isn't in the root: is that mounted?
    with unhurried(2, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        first, second = nodes.met(a, b)
        Gathering(second.store, 1, 2).report([], "")
        begun = nodes.pool.submit(one.rounds.begin, first.store, 0, 2)
        eventually(lambda: "the restart waits for it" in one.warned, 60, "it to wait for the root")
        again = nodes.meet(b)  # the others don't
        eventually(a.num_nodes_waiting, 60, "the end of the round")
        events_file.unlink()  # as good as a root that is back
        with pytest.raises(RoundBroken, match="starts again"):
            begun.result(60)
        assert one.rounds._root.epochs() == [1]
        nodes.met(a)
        again[0].result(60)


def test_all_nodes_say_whose_fault_it_is_that_there_is_no_attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_ROOT_SECONDS_OF_MANY", 0.0)
    one, two = pair(run)
    path = one.rounds._root.path
    path.rename(path.with_name("aside"))
    path.write_text("")
    away = [each.exception() for each in run.begun(one, two)]
    assert [type(each) for each in away] == [CheckpointError] * 2
    path.unlink()
    emptied = [each.exception() for each in run.begun(one, two)]
    assert [isinstance(each, UsageError) for each in emptied] == [True] * 2
    for said in (away, emptied):
        assert str(said[0]) == str(said[1])
