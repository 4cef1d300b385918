"""A keeper in its own process: sealed snapshots become checkpoints, whatever happens to it and around it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from conftest import eventually, kill_tree
from keeper_kit import Node, a_seal, manifest_of, name_of, nodes_fixture  # noqa: F401

import ftrun.checkpoint.keeper as package
from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.layout import LATEST, AttemptName, attempt_key, done_failed_json, done_json
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.records import DoneRecord, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[..., Node]

A, B, C, D = (name_of(1, step) for step in (10, 20, 30, 40))


def test_what_is_sealed_is_committed(nodes: Make) -> None:
    node = nodes(world=2)
    node.begin()
    node.seal(A, data={"samples": 7})
    keeper = node.keeper()
    outcome = node.outcome(A)
    assert (outcome.committed, outcome.step, outcome.reason) == (True, 10, ""), node.log()
    node.assert_whole(A)
    manifest = manifest_of(node, A)
    assert (manifest["world_size"], manifest["nodes"], manifest["data"]) == (2, 1, {"samples": 7})
    assert (manifest["torch"], manifest["run_id"], manifest["reason"]) == ("2.13.0", "run", "interval")
    assert node.root.read(LATEST).decode().strip() == A
    assert keeper.finish(60)
    assert not node.tier.path.exists()
    assert [(each.kind, each.step, each.checkpoint) for each in node.events()] == [("committed", 10, A)]  # type: ignore[attr-defined]
    assert node.events()[0].size == outcome.size > 0  # type: ignore[attr-defined]


def test_it_needs_no_torch_and_little_memory(nodes: Make) -> None:
    modules = sorted(path.stem for path in Path(package.__path__[0]).glob("*.py"))
    names = [f"ftrun.checkpoint.keeper.{name}" for name in modules if name != "__init__"]
    assert len(names) > 15
    text = f"import sys, importlib\nfor each in {names}: importlib.import_module(each)\n"
    text += "assert not {'torch', 'numpy', 'fsspec'} & set(sys.modules), sorted(sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    node = nodes()
    node.seal(A)
    keeper = node.keeper()
    node.outcome(A)
    assert keeper.pid is not None
    process = psutil.Process(keeper.pid)
    assert process.memory_info().rss < 60 * 2**20
    assert os.getsid(keeper.pid) == keeper.pid
    assert process.nice() >= 10


def test_saves_follow_each_other_and_old_ones_go(nodes: Make) -> None:
    node = nodes(keep_last=2)
    node.begin()
    keeper = node.keeper()
    for number, attempt in enumerate((A, B, C, D)):
        eventually(lambda: node.is_free(attempt), what="a free slot")  # noqa: B023
        node.seal(attempt, number % 2)
        keeper.wake()
        assert node.outcome(attempt).committed
    assert keeper.finish(60)
    assert node.committed() == [D, C]
    assert [str(each) for each in node.root.attempts()] == [D, C]


def test_a_keeper_that_comes_late_takes_up_everything_in_order(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(B, 0)
    node.seal(A, 1)
    node.keeper()
    assert node.outcome(B).committed
    assert [each.checkpoint for each in node.events()] == [A, B]  # type: ignore[attr-defined]
    assert node.root.read(LATEST).decode().strip() == B


# --- what is not whole


def test_an_incomplete_set_of_an_earlier_epoch_is_dropped_and_a_complete_one_is_not(nodes: Make) -> None:
    node = nodes(world=2)
    node.begin()
    node.seal(A, 0)
    node.seal(B, 1, ranks=(0,))
    node.keeper()
    assert node.outcome(A).committed
    assert Outcomes(node.tier).get(B) is None
    node.begin(parent=A)
    outcome = node.outcome(B)
    assert not outcome.committed
    assert outcome.reason == "rank 1 ended before its part was copied"
    eventually(lambda: node.is_free(B), what="a free slot")
    failed = [each for each in node.events() if isinstance(each, events.SaveFailed)]
    assert [each.error for each in failed] == [f"checkpoint {B} was not committed: {outcome.reason}"]


def test_a_lineage_that_was_left_is_dropped(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A)
    node.begin(fresh=True)
    node.keeper()
    assert node.outcome(A).reason == "the run was started over"


def test_a_torn_seal_is_no_seal(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A, 0)
    slot = node.tier.slots(0)[0]
    slot.seal.write_bytes(slot.seal.read_bytes()[:-9])
    node.seal(B, 1)
    node.keeper()
    assert node.outcome(B).committed
    assert Outcomes(node.tier).get(A) is None


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_snapshot_whose_bytes_are_not_there_fails_at_once(nodes: Make, damage: str) -> None:
    node = nodes()
    node.begin()
    node.seal(A, 0)
    payload = node.tier.slots(0)[0].payload
    payload.unlink() if damage == "gone" else os.truncate(payload, 100)
    node.seal(B, 1)
    keeper = node.keeper()
    outcome = node.outcome(A)
    assert not outcome.committed
    assert str(payload) in outcome.reason
    assert node.outcome(B).committed
    assert keeper.finish(60)
    assert [str(each) for each in node.root.attempts()] == [B]


def test_a_worker_may_say_that_its_snapshot_is_torn(nodes: Make) -> None:
    node = nodes(world=2)
    node.begin()
    node.seal(A, ranks=(0,))
    Outcomes(node.tier).put(Outcome(A, 10, False, "rank 1 found it torn", 0.0, 0))
    node.keeper()
    eventually(lambda: node.is_free(A), what="a free slot")
    failed = [each for each in node.events() if isinstance(each, events.SaveFailed)]
    assert [each.error for each in failed] == [f"checkpoint {A} was not committed: rank 1 found it torn"]
    outcome = node.outcome(A)
    assert outcome.heard
    assert outcome.reason == "rank 1 found it torn"


@pytest.mark.slow
def test_a_node_that_sealed_nothing_tells_the_others_too(nodes: Make) -> None:
    first, second = (nodes(number, world=2, ranks=(number,)) for number in (0, 1))
    first.begin()
    first.seal(A)
    first.keeper()
    second.tier.create()
    Outcomes(second.tier).put(Outcome(A, 10, False, "rank 1 found it torn", 0.0, 0))
    second.keeper()
    assert first.outcome(A).reason == "node 1 gave up: rank 1 found it torn"


def take(node: Node, attempt: str | None) -> bool:
    """Take the only slot as a worker does whose policy is to replace; False where the keeper reads it."""
    slot = node.tier.slots(0)[0]
    if attempt is None or slot.is_marked(slot.drained, attempt):
        return True
    aside = slot.seal.with_name("aside")
    slot.seal.rename(aside)
    if slot.is_marked(slot.draining, attempt):
        aside.rename(slot.seal)
        return False
    aside.unlink()
    Outcomes(node.tier).put(Outcome(attempt, AttemptName.of(attempt).step, False, "replaced", 0.0, 0))
    return True


def test_snapshots_replaced_from_under_the_keeper_are_whole_or_not_committed(nodes: Make) -> None:
    node = nodes(keep_last=100)
    node.begin()
    keeper = node.keeper()
    attempts = [name_of(1, step) for step in range(1, 40)]
    before = None
    for attempt in attempts:
        eventually(lambda: take(node, before), what="the slot")  # noqa: B023
        node.seal(attempt)
        keeper.wake()
        before = attempt
    # Before it is asked to end: it would call a snapshot lost that it is only then told of as replaced.
    assert node.outcome(attempts[-1]).committed
    assert keeper.finish(60)
    for attempt in node.committed():
        node.assert_whole(attempt)
    said = {each.checkpoint for each in node.events() if isinstance(each, events.Committed)}
    assert said == set(node.committed())


# --- storage


def blocked(node: Node) -> Path:
    """Something lies where the root should be; removing it is the repair."""
    path = Path(node.config.root).parent
    path.mkdir(parents=True, exist_ok=True)
    obstacle = Path(node.config.root)
    obstacle.write_text("in the way")
    return obstacle


def test_storage_that_is_away_delays_commits_and_nothing_else(nodes: Make, tmp_path: Path) -> None:
    node = nodes(local=str(tmp_path / "nvme"))
    obstacle = blocked(node)
    keeper = node.keeper()
    for number, attempt in enumerate((A, B, C)):
        node.seal(attempt, number % 2)
        keeper.wake()
        eventually(lambda: node.is_free(attempt), what="a free slot")  # noqa: B023
    # A slot is given back by one thread, and progress shown by another, which may be behind.
    progress = eventually(lambda: (each := Progress.read(node.tier)) and each.waiting and each.queued == 2 and each)
    assert (progress.attempt, progress.stage, progress.queued) == (A, "root", 2)
    assert "Not a directory" in progress.waiting or "exists" in progress.waiting
    obstacle.unlink()
    assert node.outcome(C).committed, node.log()
    assert [each.checkpoint for each in node.events()] == [A, B, C]  # type: ignore[attr-defined]
    node.assert_whole(A)
    node.assert_whole(C)
    assert keeper.finish(60)
    assert sorted(each.name for each in (tmp_path / "nvme").iterdir()) == [B, C]


def test_the_local_tier_holds_the_same_bytes(nodes: Make, tmp_path: Path) -> None:
    node = nodes(local=str(tmp_path / "nvme"))
    node.begin()
    node.seal(A)
    node.keeper()
    assert node.outcome(A).committed
    for file in manifest_of(node, A)["files"]:
        local = tmp_path / "nvme" / A / file
        assert local.read_bytes() == node.root.read(attempt_key(AttemptName.of(A), file))


def test_a_local_tier_that_cannot_be_used_is_skipped(nodes: Make, tmp_path: Path) -> None:
    node = nodes(local=str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    node.begin()
    node.seal(A)
    node.keeper()
    assert node.outcome(A).committed
    assert "skips the local tier" in node.log()


def test_a_damaged_local_file_is_not_committed(nodes: Make, tmp_path: Path) -> None:
    node = nodes(local=str(tmp_path / "nvme"))
    obstacle = blocked(node)
    node.seal(A)
    node.keeper()
    eventually(lambda: node.is_free(A), what="a free slot")
    payload = tmp_path / "nvme" / A / "r00000.0.safetensors"
    content = bytearray(payload.read_bytes())
    content[1000] ^= 1
    payload.write_bytes(content)
    obstacle.unlink()
    outcome = node.outcome(A)
    assert not outcome.committed
    assert "has changed since it was written" in outcome.reason
    assert node.committed() == []


@pytest.mark.slow
def test_storage_that_stays_away_ends_the_save_with_its_reason(nodes: Make) -> None:
    node = nodes(timeout=0.5)
    blocked(node)
    node.seal(A)
    node.keeper()
    outcome = node.outcome(A)
    assert not outcome.committed
    assert outcome.reason.endswith("(after 0.5 s)")
    eventually(lambda: node.is_free(A), what="a free slot")


@pytest.mark.slow
def test_flaky_storage_costs_tries(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A)
    node.keeper("root.file:raise*2,root.middle:raise*2,done:raise,manifest:raise*2")
    assert node.outcome(A).committed
    node.assert_whole(A)
    assert "Input/output error" in node.log()


@pytest.mark.slow
def test_a_full_disk(nodes: Make, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "none", mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no filesystem can be mounted here: {made.stderr.strip()}")
    try:
        node = nodes(root=str(mount / "root"), local=str(mount / "local"), timeout=1.0)
        node.begin()
        node.seal(A, size=900_000)
        node.keeper()
        outcome = node.outcome(A)
        assert not outcome.committed
        assert "No space left on device" in outcome.reason
        assert "skips the local tier" in node.log()
        # The word of it comes before its files go, and B is given up as well where it finds no room for a second.
        eventually(lambda: not node.root.files(AttemptName.of(A)), what="room")
        node.seal(B, 1, size=100_000)
        assert node.outcome(B).committed, node.log()
        node.assert_whole(B, 100_000)
    finally:
        for each in node.keepers:
            each.finish(5)
        subprocess.run(["umount", mount], check=True)


# --- several nodes


def test_two_nodes_commit_together_and_both_hear_of_it(nodes: Make) -> None:
    first, second = (nodes(number, world=2, ranks=(number,)) for number in (0, 1))
    first.begin()
    second.seal(A)
    second.keeper()
    eventually(lambda: second.is_free(A), what="a free slot")
    assert Outcomes(second.tier).get(A) is None
    first.seal(A)
    first.keeper()
    assert first.outcome(A).committed
    outcome = second.outcome(A)
    assert outcome.committed
    assert outcome.size == first.outcome(A).size
    first.assert_whole(A)
    second.assert_whole(A)
    assert manifest_of(first, A)["nodes"] == 2
    assert second.events() == []


@pytest.mark.slow
def test_a_node_that_gives_up_ends_the_save_everywhere(nodes: Make) -> None:
    first, second = (nodes(number, world=3, ranks=ranks) for number, ranks in ((0, (0,)), (1, (1, 2))))
    first.begin()
    first.seal(A)
    first.keeper()
    second.seal(A, ranks=(1,))
    keeper = second.keeper()
    eventually(lambda: first.is_free(A), what="a free slot")
    keeper.finish(60)
    outcome = first.outcome(A)
    assert outcome.reason == "node 1 gave up: rank 2 ended before its part was copied"
    assert first.root.size(attempt_key(AttemptName.of(A), done_failed_json(1))) is not None


@pytest.mark.slow
def test_a_node_that_says_nothing_is_waited_for_and_named(nodes: Make) -> None:
    node = nodes(world=2, ranks=(0,), timeout=1.0)
    node.begin()
    node.seal(A)
    node.keeper()
    outcome = node.outcome(A)
    assert outcome.reason.startswith("there is still no done record for the node of rank 1")
    eventually(lambda: node.root.size(attempt_key(AttemptName.of(A), done_failed_json(0))) is not None)


def test_waiting_for_a_node_delays_no_later_save(nodes: Make) -> None:
    node = nodes(world=2, ranks=(0,))
    node.begin()
    node.seal(A)
    node.keeper()
    eventually(lambda: node.is_free(A), what="a free slot")
    node.begin()
    later = replace(node, world=1)
    alone = name_of(2, 10)
    later.seal(alone, 1)
    assert later.outcome(alone).committed


@pytest.mark.parametrize(
    ("words", "datas", "reason"),
    [
        ((Word("a", {}), Word("b", {})), ({"at": 1}, {"at": 2}), "the ranks disagree on the data position"),
        ((Word("a", {"0-1": "x"}), Word("a", {"0-1": "y"})), (None, None), "should be the same on ranks 0-1"),
    ],
)
def test_ranks_that_differ_are_not_committed(
    nodes: Make, words: tuple[Word, ...], datas: tuple[Any, ...], reason: str
) -> None:
    first, second = (nodes(number, world=2, ranks=(number,)) for number in (0, 1))
    first.begin()
    for node, word, data in zip((first, second), words, datas, strict=True):
        node.seal(A, word=word, data=data, digest=word.groups.get("0-1"))
        node.keeper()
    outcome = first.outcome(A)
    assert not outcome.committed
    assert reason in outcome.reason
    assert outcome.differ == (("w",) if words[0].groups else ())
    assert outcome.final == (not words[0].groups), "ranks at different positions stay there"
    assert reason in second.outcome(A).reason
    assert first.committed() == []


@pytest.mark.slow
def test_what_a_dead_leader_left_is_rolled_forward(nodes: Make) -> None:
    """Both nodes had spoken, the leader's machine is gone with its memory, and a new leader starts."""
    first, second = (nodes(number, world=2, ranks=(number,)) for number in (0, 1))
    first.begin()
    for node in (first, second):
        node.seal(A)
        node.keeper("manifest:hang" if node is first else "")
    eventually(lambda: all(first.root.size(attempt_key(AttemptName.of(A), done_json(n))) for n in (0, 1)))
    first.close()
    assert reader.latest(first.root, "run").commit is None
    replacement = nodes(0, world=2, ranks=(0,))
    replacement.begin()
    replacement.keeper()
    assert second.outcome(A).committed
    replacement.assert_whole(A)


# --- what happens to keepers


def test_a_keeper_that_is_killed_is_replaced(nodes: Make) -> None:
    node = nodes()
    node.begin()
    keeper = node.keeper()
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    node.seal(A)
    assert node.outcome(A).committed
    assert keeper.pid not in (None, first)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.slow
def test_a_keeper_that_dies_again_and_again_is_started_less_and_less_often(
    nodes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    node.seal(A)
    monkeypatch.setenv("FTRUN_KEEPER_FAULT", "draining:kill")
    keeper = Keeper(node.tier, node.config)
    node.keepers.append(keeper)
    pids = set()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline or len(pids - {None}) < 2:  # a busy machine may need longer for the first death
        keeper.ensure()
        pids.add(keeper.pid)
        time.sleep(0.01)
    monkeypatch.delenv("FTRUN_KEEPER_FAULT")
    assert 2 <= len(pids - {None}) <= 6
    assert node.outcome(A).committed


def test_a_stopped_keeper_is_replaced_when_there_is_work(nodes: Make) -> None:
    node = nodes()
    node.begin()
    keeper = Keeper(node.tier, node.config, stalled_after=0.5)
    node.keepers.append(keeper)
    keeper.ensure()
    eventually((node.tier.path / "keeper.beat").exists)
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    node.seal(A)
    eventually(lambda: keeper.ensure() or keeper.pid not in (None, first), what="another keeper")
    keeper._stalled_after = 60.0  # the other one may need longer than that for its start
    assert node.outcome(A).committed
    assert keeper.pid != first
    assert not psutil.pid_exists(first)


def test_the_next_launchers_keeper_waits_for_the_one_before(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A)
    before = node.keeper("done:hang")
    slot = node.tier.slots(0)[0]
    # Its first beat comes before it looks whose the tier is: one that has begun nothing by then makes way.
    eventually(lambda: slot.is_marked(slot.draining, A), what="a keeper at work")
    after = node.keeper()
    assert after.pid is not None
    waiting = psutil.Process(after.pid)
    eventually(lambda: any(each.path.endswith("keeper.lock") for each in waiting.open_files()), what="a wait")
    assert Outcomes(node.tier).get(A) is None
    assert before.pid is not None
    kill_tree(before.pid)
    assert node.outcome(A).committed
    assert after.finish(60)
    before.finish(60)


def test_finish_drains_what_is_sealed(nodes: Make) -> None:
    node = nodes()
    node.begin()
    keeper = node.keeper()
    node.seal(A)
    node.seal(B, 1)
    assert keeper.finish(60)
    assert node.committed() == [B, A]
    assert keeper.pid is None


@pytest.mark.slow
def test_what_a_newer_snapshot_replaced_in_memory_is_no_loss(nodes: Make) -> None:
    node = nodes()
    obstacle = blocked(node)
    keeper = node.keeper()
    node.seal(A)
    node.seal(B, 1)
    eventually(lambda: (at := Progress.read(node.tier)) and at.queued == 1, 20, "the keeper knows of both")
    node.seal(C, 1)
    obstacle.unlink()
    assert keeper.finish(20), node.log()
    assert node.committed() == [C, A]
    (failed,) = (each for each in node.events() if isinstance(each, events.SaveFailed))
    assert failed.step == 20
    assert failed.error.endswith("a newer snapshot took its place in memory")


def test_finish_ends_even_if_storage_does_not_come_back(nodes: Make) -> None:
    node = nodes()
    obstacle = blocked(node)
    keeper = node.keeper()
    node.seal(A)
    pid = keeper.pid
    assert pid is not None
    assert not keeper.finish(1.0)
    assert not psutil.pid_exists(pid)
    obstacle.unlink()
    node.keeper()  # of the next start, which finds all that was left
    assert node.outcome(A).committed


def test_finish_does_not_wait_for_a_keeper_that_is_stopped(nodes: Make) -> None:
    node = nodes()
    node.begin()
    keeper = node.keeper()
    eventually((node.tier.path / "keeper.beat").exists)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGSTOP)
    node.seal(A)
    assert keeper.finish(60)
    assert "was killed" not in node.log()
    assert node.committed() == [A]


def test_finish_without_a_start_or_a_tier(nodes: Make) -> None:
    node = nodes()
    assert Keeper(node.tier, node.config).finish(1.0)


LAUNCHER = """
import json, os, sys, time
from pathlib import Path
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.memory.tier import Tier
fields = json.loads(sys.argv[2]) | {"parent": os.getpid()}
keeper = Keeper(Tier(Path(sys.argv[1])), KeeperConfig(**fields))
keeper.ensure()
print(keeper.pid, flush=True)
time.sleep(600)
"""


def launcher(node: Node, fault: str = "") -> tuple[subprocess.Popen[str], int]:
    """A launcher of its own, and its keeper."""
    import json

    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(node.tier.path), json.dumps(node.config.__dict__)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"FTRUN_KEEPER_FAULT": fault},
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.stdout.close()
    return process, pid


def finishes(node: Node, pid: int) -> None:
    """A keeper without a launcher does what is left to do, and ends with its tier."""
    eventually(lambda: not node.tier.path.exists(), what="the end of the tier")
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


@pytest.mark.slow
def test_it_outlives_a_launcher_that_is_killed_to_finish(nodes: Make) -> None:
    node = nodes(world=2)
    node.begin()
    process, pid = launcher(node, "draining:raise*5")  # so that there is something to finish
    try:
        eventually((node.tier.path / "keeper.beat").exists)
        # Not after the kill: a keeper that has nothing to do by then ends a second later, with its tier.
        node.seal(A)
        node.seal(B, 1, ranks=(0,))
        process.kill()
        process.wait(60)
        finishes(node, pid)
    finally:
        kill_tree(pid)
    assert node.committed() == [A]


@pytest.mark.slow
def test_a_stopped_keeper_of_a_launcher_that_is_killed_finishes(nodes: Make) -> None:
    node = nodes()
    node.begin()
    process, pid = launcher(node)
    try:
        eventually((node.tier.path / "keeper.beat").exists)
        os.kill(pid, signal.SIGSTOP)
        node.seal(A)
        process.kill()
        process.wait(60)
        finishes(node, pid)
    finally:
        kill_tree(pid)
    assert node.committed() == [A]


@pytest.mark.slow
def test_a_keeper_that_is_stopped_later_makes_way_for_the_next_launchers(nodes: Make) -> None:
    node = nodes()
    with waiting_alone(node) as (pid, repair):
        eventually(lambda: "the launcher is gone" in node.log(), what="its notice of that")
        os.kill(pid, signal.SIGSTOP)
        takes_over(node, pid, repair)


@pytest.mark.slow
def test_a_new_launcher_takes_over_from_a_dead_ones_keeper(nodes: Make) -> None:
    node = nodes()
    with waiting_alone(node) as (pid, repair):
        takes_over(node, pid, repair)


@contextlib.contextmanager
def waiting_alone(node: Node) -> Iterator[tuple[int, Callable[[], object]]]:
    """A keeper that waits for the storage when its launcher is killed, and what repairs the storage."""
    node.begin()
    obstacle = Path(node.config.root) / "ckpt"
    obstacle.write_text("in the way")
    process, pid = launcher(node)
    try:
        node.seal(A)
        eventually(lambda: (each := Progress.read(node.tier)) and each.waiting)
        process.kill()
        process.wait(60)
        yield pid, obstacle.unlink
    finally:
        kill_tree(pid)


def takes_over(node: Node, pid: int, repair: Callable[[], object]) -> None:
    """The next launcher's keeper commits what was left to the one of a dead launcher, which ends."""
    keeper = node.keeper()
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    assert node.tier.path.exists()
    repair()
    assert node.outcome(A).committed
    assert keeper.finish(60)


def test_a_seal_of_another_run_is_left_alone(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A, run_id="another")
    node.keeper()
    assert node.outcome(A).reason == "it belongs to the run 'another'"
    assert node.committed() == []


def test_the_done_record_says_what_the_manifest_needs(nodes: Make) -> None:
    node = nodes(world=2, ranks=(1,))
    node.begin()
    node.seal(A, total=99, parent=None, reason="last")
    node.keeper()
    key = attempt_key(AttemptName.of(A), done_json(0))
    eventually(lambda: node.root.size(key) is not None)
    record = DoneRecord.from_bytes(node.root.read(key))
    assert record.about is not None
    assert (record.about.world_size, record.about.total, record.about.reason) == (2, 99, "last")
    assert list(record.words) == [1]
    assert a_seal(A).word == record.words[1]
