"""The last steps of a save, in this process: many nodes, object stores, dead leaders."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from keeper_kit import RUN, Node, name_of, nodes_fixture, payload_of  # noqa: F401

from ftrun.checkpoint import reader
from ftrun.checkpoint.checksums import FileRecord
from ftrun.checkpoint.keeper.commit import Ballot, Verdict, give_up, roll_forward
from ftrun.checkpoint.keeper.decide import Known, Stage
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.keeper.jobs import Jobs
from ftrun.checkpoint.keeper.local import LocalTier
from ftrun.checkpoint.keeper.rate import Limiter
from ftrun.checkpoint.keeper.results import Moved, Over, Waits
from ftrun.checkpoint.keeper.scan import Scanner
from ftrun.checkpoint.keeper.work import works
from ftrun.checkpoint.layout import (
    MANIFEST,
    AttemptName,
    Root,
    attempt_key,
    done_failed_json,
    done_json,
    rank_json,
    rank_shard,
)
from ftrun.checkpoint.manifest import Manifest
from ftrun.checkpoint.records import About, DoneRecord, Word

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Node]

A, B = AttemptName.of(name_of(1, 10)), AttemptName.of(name_of(1, 20))
NOBODY = Faults()


def about(world: int, run_id: str = RUN, step: int = 10) -> About:
    return About(run_id, world, step, None, "interval", {"samples": 3}, None, "2.13.0")


def speak(root: Root, name: AttemptName, node: int, ranks: range, world: int, **changes: Any) -> None:
    """Write a node's files and its word for them."""
    files = {}
    for rank in ranks:
        for file in (rank_json(rank), rank_shard(rank)):
            path = root.path / attempt_key(name, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
            files[file] = FileRecord(1, rank, (rank,))
    words = {rank: Word("here", {f"0-{world - 1}": "same"} if world > 1 else {}) for rank in ranks}
    record = DoneRecord(node, files, words, about(world, step=name.step, **changes))
    root.create(attempt_key(name, done_json(node)), record.to_bytes())


def test_ranks_of_many_nodes_are_waited_for_by_identity(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    ballot = Ballot(root, A, NOBODY)
    assert ballot.look(leads=True) == "there is still no done record"
    for node in range(40):
        if node != 17:
            speak(root, A, node, range(node * 4, node * 4 + 4), 160)
    missing = ballot.look(leads=True)
    assert isinstance(missing, str)
    assert "rank 68, 69, 70, 71:" in missing
    assert (
        Ballot(root, A, NOBODY).look(leads=False)
        == f"there is still no {MANIFEST} from the node of rank 0: look into its log"
    )
    speak(root, A, 17, range(68, 72), 160)
    verdict = ballot.look(leads=True)
    assert verdict == Verdict(True, size=320)
    manifest = Manifest.from_bytes(root.read(attempt_key(A, MANIFEST)))
    assert (manifest.nodes, manifest.world_size, len(manifest.files), manifest.data) == (40, 160, 320, {"samples": 3})
    assert Ballot(root, A, NOBODY).look(leads=False) == verdict
    assert reader.latest(root, RUN).commit is not None


def test_records_of_ranks_that_the_world_does_not_have(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    speak(root, A, 0, range(2), 2)
    speak(root, A, 1, range(2, 4), 2)
    verdict = Ballot(root, A, NOBODY).look(leads=True)
    assert isinstance(verdict, Verdict)
    assert verdict.reason == "rank 2, 3 is none of its 2 ranks"


def test_a_torn_record_is_none_yet(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    speak(root, A, 0, range(1), 1)
    key = attempt_key(A, done_json(0))
    content = root.read(key)
    root.write(key, content[:-20])
    assert isinstance(Ballot(root, A, NOBODY).look(leads=True), str)
    root.write(key, content)
    assert isinstance(Ballot(root, A, NOBODY).look(leads=True), Verdict)


def test_a_torn_manifest_is_none_yet(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    root.write(attempt_key(A, MANIFEST), b"{")
    assert Ballot(root, A, NOBODY).look(leads=False) == f"{MANIFEST} is not whole"


def test_giving_up_is_said_once_and_never_after_a_commit(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    give_up(root, A, 3, "no room")
    give_up(root, A, 3, "again")
    assert json.loads(root.read(attempt_key(A, done_failed_json(3)))) == {"node": 3, "reason": "no room"}
    speak(root, A, 0, range(1), 1)
    assert Ballot(root, A, NOBODY).look(leads=True) == Verdict(False, "node 3 gave up: no room", given_up=True)
    speak(root, B, 0, range(1), 1)
    assert Ballot(root, B, NOBODY).look(leads=True) == Verdict(True, size=2)
    give_up(root, B, 0, "too late")
    assert root.size(attempt_key(B, done_failed_json(0))) is None


# --- roll forward


def rolled(root: Root, *, before: int = 2, since: int = 1) -> list[AttemptName]:
    return roll_forward(root, RUN, since=since, before=before, faults=NOBODY)


def test_an_attempt_for_which_all_have_spoken_is_rolled_forward(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    speak(root, A, 0, range(2), 4)
    assert rolled(root) == []
    speak(root, A, 1, range(2, 4), 4)
    assert rolled(root, before=1) == []
    assert rolled(root, since=2) == []
    assert rolled(root) == [A]
    assert rolled(root) == []
    assert reader.latest(root, RUN).commit is not None


@pytest.mark.parametrize("why", ["gave up", "foreign", "file gone", "bad", "older than a commit"])
def test_what_is_not_rolled_forward(tmp_path: Path, why: str) -> None:
    root = Root.open(tmp_path)
    speak(root, A, 0, range(1), 1, **({"run_id": "other"} if why == "foreign" else {}))
    if why == "gave up":
        give_up(root, A, 0, "no")
    elif why == "file gone":
        root.delete(attempt_key(A, rank_shard(0)))
    elif why == "bad":
        reader.mark_bad(root, A, "bytes")
    elif why == "older than a commit":
        speak(root, B, 0, range(1), 1)
        assert Ballot(root, B, NOBODY).look(leads=True) == Verdict(True, size=2)
    assert rolled(root) == []
    assert root.size(attempt_key(A, MANIFEST)) is None


# --- an object store


def test_a_save_to_an_object_store(nodes: Make) -> None:
    node = nodes(root=f"memory://{uuid.uuid4().hex}/checkpoints", world=2)
    node.begin()
    node.seal(str(A))
    jobs = Jobs(node.tier, node.config, None, Limiter(None), NOBODY)
    known = Known(Scanner(node.tier).scan()[str(A)], Stage.SEALED, 0.0)
    moved = jobs.upload(known)
    assert isinstance(moved, Moved)
    assert node.is_free(str(A))
    assert jobs.upload(known) == Moved(Stage.DONE, known.work)  # as a keeper does that comes after
    verdict = jobs.settle(Known(moved.work, Stage.DONE, 0.0))
    assert isinstance(verdict, Verdict)
    assert verdict.committed
    assert jobs.tidy(Known(moved.work, Stage.COMMITTED, 0.0), node.begin()) == Over()
    node.assert_whole(str(A))


def test_files_that_a_dead_keeper_left_are_written_anew(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(str(A))
    key = attempt_key(A, rank_shard(0))
    node.root.write(key, b"half of it")
    temporary = attempt_key(A, f".{rank_shard(0)}.1234abcd.tmp")
    node.root.write(temporary, b"half of it")
    jobs = Jobs(node.tier, node.config, None, Limiter(None), NOBODY)
    moved = jobs.upload(Known(Scanner(node.tier).scan()[str(A)], Stage.SEALED, 0.0))
    assert isinstance(moved, Moved)
    assert node.root.read(key) == payload_of(str(A), 0)
    assert node.root.size(temporary) is None


def test_an_attempt_that_is_removed_behind_the_keepers_back_is_over(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(str(A))
    jobs = Jobs(node.tier, node.config, None, Limiter(None), NOBODY)
    known = Known(Scanner(node.tier).scan()[str(A)], Stage.SEALED, 0.0)
    moved = jobs.upload(known)
    assert isinstance(moved, Moved)
    node.root.delete_files(A, node.root.files(A))
    node.root.remove_attempt(A)
    known = Known(moved.work or known.work, Stage.DONE, 0.0)
    found = jobs.settle(known)
    assert isinstance(found, Verdict)
    assert not found.committed
    assert "not in the root any more" in found.reason
    hidden = node.root.path.with_name("hidden")
    node.root.path.rename(hidden)  # a root that isn't mounted holds nothing either
    assert isinstance(jobs.settle(known), Waits)
    hidden.rename(node.root.path)


def test_a_slot_that_is_gone_is_waited_for_not_copied(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(str(A))
    known = Known(Scanner(node.tier).scan()[str(A)], Stage.SEALED, 0.0)
    node.seal(str(B))
    jobs = Jobs(node.tier, node.config, None, Limiter(None), NOBODY)
    assert isinstance(jobs.upload(known), Waits)
    assert node.root.files(A) == {}


def test_the_local_tier_keeps_the_last_two_commits_and_nothing_foreign(nodes: Make, tmp_path: Path) -> None:
    node = nodes(local=str(tmp_path / "nvme"))
    node.tier.create()
    local = LocalTier(node.config.local, 0, RUN)
    other = LocalTier(node.config.local, 1, RUN)
    foreign = LocalTier(node.config.local, 0, "other")
    for tier, step in ((local, 1), (local, 2), (other, 1), (foreign, 3), (local, 4), (local, 5)):
        attempt = name_of(1, step)
        node.seal(attempt, run_id="other" if tier is foreign else RUN)
        work = works([(node.tier.slots(0)[0], node.tier.slots(0)[0].read_seal())])[attempt]  # type: ignore[list-item]
        files = {file: FileRecord(1, 0, (0,)) for file in work.sealed}
        for file in files:
            tier.storage.write(f"{attempt}/{file}", b"x")
        tier.record(type(work)(work.name, work.seals, files=files))
        if step != 2:
            tier.keep(work)
    assert sorted(path.name for path in (tmp_path / "nvme").iterdir()) == [name_of(1, step) for step in (1, 2, 3, 4, 5)]
    assert [(work.name.step, work.committed) for work in local.works()] == [(2, False), (4, True), (5, True)]
    assert [work.name.step for work in foreign.works()] == [3]
    assert [work.name.step for work in other.works()] == [1]
