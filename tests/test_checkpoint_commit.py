"""The writing side: drain, commit, failures, kills at every point, retention."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ftrun.checkpoint import reader, restore, retention
from ftrun.checkpoint.epochs import claim
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root, attempt_key, rank_json, rank_shard
from ftrun.checkpoint.manifest import Manifest
from ftrun.checkpoint.state import encode
from ftrun.checkpoint.writer import Owner, Place, Snapshot, Writer, stage
from ftrun.errors import AgreementTimeout, CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALONE = Place(0, 1, 0, 0, 1)
OWNER = Owner("run", 1, 1, None)
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "ftrun.checkpoint.writer", "ftrun.checkpoint.restore"])


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def value_of(step: int, rank: int = 0) -> dict[str, Any]:
    shared = torch.full((1000,), float(step))
    return {"model": {"w": shared, "tied": shared, "own": torch.tensor([rank, step])}, "lr": 0.1 * step, "rank": rank}


def snapshot_of(value: Any, step: int, suffix: str, data: Any = None) -> Snapshot:
    encoded = encode(value)
    return Snapshot(step, "interval", 100, encoded.tree, stage(encoded), data, suffix)


def save(root: Root, step: int, *, owner: Owner = OWNER, keep_last: int = 3, events: Events | None = None) -> str:
    """One committed checkpoint of one rank."""
    writer = Writer(root, ALONE, owner, keep_last=keep_last, on_event=events, timeout=20)
    suffix = secrets.token_hex(4)
    writer.submit(snapshot_of(value_of(step), step, suffix, {"samples": step}))
    assert writer.wait(30) is None
    writer.close(10)
    return str(AttemptName(owner.epoch, step, suffix))


@contextlib.contextmanager
def ranks(root: Root, world_size: int, per_node: int = 1, timeout: float = 20) -> Iterator[list[tuple[Writer, Events]]]:
    """Writers of several ranks in this process, each with its own thread."""
    group = []
    for rank in range(world_size):
        events = Events()
        place = Place(rank, world_size, rank // per_node, rank % per_node, per_node)
        group.append((Writer(root, place, OWNER, on_event=events, timeout=timeout), events))
    yield group
    for writer, _ in group:
        writer.close(30)


def same_value(a: Any, b: Any) -> bool:
    model = all(torch.equal(a["model"][key], b["model"][key]) for key in ("w", "tied", "own"))
    return model and (a["lr"], a["rank"]) == (b["lr"], b["rank"])


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.open(tmp_path / "root with space % and ü")


def test_what_was_saved_is_what_is_loaded(root: Root) -> None:
    events = Events()
    name = save(root, 7, events=events)
    choice = reader.latest(root, "run")
    assert choice.commit is not None
    assert str(choice.commit.name) == name
    state = restore.load(root, name, 0, 1)
    assert same_value(state.value, value_of(7))
    assert state.value["model"]["w"] is state.value["model"]["tied"]
    assert (state.step, state.total, state.data, state.own) == (7, 100, {"samples": 7}, True)
    assert root.read("LATEST") == f"{name}\n".encode()
    assert events.kinds() == ["drained", "committed"]
    size = sum(root.files(AttemptName.of(name)).values())
    manifest = Manifest.from_bytes(root.read(attempt_key(AttemptName.of(name), MANIFEST)))
    outside = {MANIFEST, "done/n0000.json"}
    assert events[1][1]["bytes"] == manifest.size
    assert manifest.size == size - sum(root.files(AttemptName.of(name))[file] for file in outside)
    assert json.loads(root.read(attempt_key(AttemptName.of(name), MANIFEST)))["run_id"] == "run"


def work_as_rank(path: str, rank: int, suffix: str, results: Any) -> None:
    events = Events()
    writer = Writer(Root.open(path), Place(rank, 2, rank, 0, 1), OWNER, on_event=events, timeout=30)
    writer.submit(snapshot_of(value_of(5, rank), 5, suffix, {"samples": 50}))
    failure = writer.wait(40)
    writer.close(5)
    results.put((rank, str(failure) if failure else None, events.kinds()))


def test_two_processes_make_one_checkpoint_and_store_shared_tensors_once(root: Root) -> None:
    results = processes.Queue()
    workers = [
        processes.Process(target=work_as_rank, args=(str(root.path), rank, "0123abcd", results)) for rank in (1, 0)
    ]
    for worker in workers:
        worker.start()
    outcome = sorted(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(20)
    assert outcome == [(0, None, ["drained", "committed"]), (1, None, ["drained", "committed"])]
    name = AttemptName(1, 5, "0123abcd")
    sizes = root.files(name)
    assert sizes[rank_shard(0)] > 4000 > 500 > sizes[rank_shard(1)], "rank 1 wrote only the tensor that is its own"
    for rank in (0, 1):
        assert same_value(restore.load(root, name, rank, 2).value, value_of(5, rank))
    third = restore.load(root, name, 2, 3)
    assert not third.own
    assert same_value(third.value, value_of(5, 0))


def test_a_rank_that_shares_everything_writes_no_shard_and_nodes_vouch_for_their_ranks(root: Root) -> None:
    with ranks(root, 4, per_node=2) as group:
        for writer, _ in group:
            writer.submit(snapshot_of(value_of(3), 3, "00000000"))
        assert [writer.wait(30) for writer, _ in group] == [None] * 4
    files = set(root.files(AttemptName(1, 3, "00000000")))
    expected = {rank_json(rank) for rank in range(4)} | {rank_shard(0), MANIFEST}
    assert files == expected | {"done/n0000.json", "done/n0001.json"}
    assert reader.latest(root, "run").commit.manifest.nodes == 2


def test_ranks_at_different_data_positions_commit_nothing(root: Root) -> None:
    first = save(root, 1)
    with ranks(root, 3, timeout=60) as group:
        began = time.monotonic()
        for rank, (writer, _) in enumerate(group):
            writer.submit(snapshot_of(value_of(2), 2, "00000000", {"samples": 20 if rank != 1 else 21}))
        failures = [str(writer.wait(30)) for writer, _ in group]
        assert time.monotonic() - began < 20, "the others heard of it and did not wait for the deadline"
    assert 'ranks 0, 2 at {"samples":20}; ranks 1 at {"samples":21}' in failures[0]
    assert "rank 0 gave up" in failures[1]
    assert [events.kinds()[-1] for _, events in group] == ["save_failed"] * 3
    choice = reader.latest(root, "run")
    assert str(choice.commit.name) == first
    assert choice.skipped == ()


def test_a_rank_that_cannot_write_stops_the_others_at_once_and_the_next_save_works(root: Root) -> None:
    obstacle = root.path / attempt_key(AttemptName(1, 2, "00000000"), rank_shard(1))
    obstacle.mkdir(parents=True)
    with ranks(root, 2, timeout=60) as group:
        began = time.monotonic()
        for rank, (writer, _) in enumerate(group):
            writer.submit(snapshot_of(value_of(2, rank), 2, "00000000"))
        failures = [writer.wait(30) for writer, _ in group]
        assert time.monotonic() - began < 20
        assert all(isinstance(failure, CheckpointError) for failure in failures)
        assert "rank 1 gave up" in str(failures[0])
        left = root.files(AttemptName(1, 2, "00000000"))
        assert set(left) == {"r00000.failed.json", "r00001.failed.json"} or set(left) == {"r00001.failed.json"}
        assert obstacle.is_dir(), "only its own files are removed"
        for rank, (writer, _) in enumerate(group):
            writer.submit(snapshot_of(value_of(3, rank), 3, "00000001"))
        assert [writer.wait(30) for writer, _ in group] == [None, None]
        assert [writer.last_failure for writer, _ in group] == [None, None]
    assert reader.latest(root, "run").commit.manifest.step == 3


def test_at_the_deadline_the_missing_ranks_are_named(root: Root) -> None:
    events = Events()
    writer = Writer(root, Place(0, 3, 0, 0, 1), OWNER, on_event=events, timeout=0.3)
    writer.submit(snapshot_of(value_of(1), 1, "00000000"))
    failure = writer.wait(20)
    writer.close(5)
    assert isinstance(failure, AgreementTimeout)
    assert "no r00001.json from rank 1, r00002.json from rank 2" in str(failure)
    assert events.kinds() == ["drained", "save_failed"]
    assert reader.latest(root, "run").commit is None


def test_wait_has_a_deadline_of_its_own_and_submit_waits_for_the_one_before(root: Root) -> None:
    writer = Writer(root, Place(0, 2, 0, 0, 1), OWNER, timeout=0.5)
    writer.submit(snapshot_of(value_of(1), 1, "00000000"))
    assert writer.busy
    with pytest.raises(AgreementTimeout, match="not committed after"):
        writer.wait(0.01)
    began = time.monotonic()
    writer.submit(snapshot_of(value_of(2), 2, "00000001"))
    assert time.monotonic() - began > 0.2
    writer.close(20)
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(snapshot_of(value_of(3), 3, "00000002"))


def test_a_name_is_never_written_twice(root: Root) -> None:
    name = AttemptName.of(save(root, 4))
    before = {file: root.read(attempt_key(name, file)) for file in root.files(name)}
    writer = Writer(root, ALONE, OWNER, timeout=5)
    writer.submit(snapshot_of(value_of(5), 4, name.suffix))
    assert writer.wait(20) is not None
    writer.close(5)
    assert {file: root.read(attempt_key(name, file)) for file in root.files(name)} == before


def test_an_observer_that_raises_costs_nothing(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    def observer(kind: str, fields: dict[str, Any]) -> None:
        raise RuntimeError(kind)

    writer = Writer(root, ALONE, OWNER, on_event=observer, timeout=20)
    writer.submit(snapshot_of(value_of(1), 1, "00000000"))
    assert writer.wait(20) is None
    writer.close(5)
    assert "observer of committed events" in caplog.text


def test_a_data_position_that_is_no_json_fails_the_save(root: Root) -> None:
    writer = Writer(root, ALONE, OWNER, timeout=5)
    writer.submit(snapshot_of(value_of(1), 1, "00000000", {"loss": float("nan")}))
    assert isinstance(writer.wait(20), CheckpointError)
    writer.close(5)


@dataclass(frozen=True)
class FragileRoot(Root):
    """Kills its process by SIGKILL when the fuse has burnt down: one unit before and after each visible change."""

    fuse: list[int]

    def _burn(self) -> None:
        self.fuse[0] -= 1
        if self.fuse[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, change: Callable[..., Any], *arguments: Any) -> Any:
        self._burn()
        result = change(*arguments)
        self._burn()
        return result

    def create(self, key: str, data: bytes) -> None:
        self._around(super().create, key, data)

    def write(self, key: str, data: bytes) -> None:
        self._around(super().write, key, data)

    def delete(self, key: str) -> None:
        self._around(super().delete, key)

    def make_attempt(self, name: AttemptName) -> None:
        self._around(super().make_attempt, name)

    def remove_attempt(self, name: AttemptName) -> bool:
        return bool(self._around(super().remove_attempt, name))

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Any]:
        with super().writing(key) as file:
            self._burn()
            yield file
            file.flush()
            self._burn()


class ShortRoot(Root):
    """Storage that says yes and keeps one byte less."""

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Any]:
        with super().writing(key) as file:
            yield file
        os.truncate(self.path / key, (self.path / key).stat().st_size - 1)


def test_storage_that_keeps_less_than_it_was_given_is_found_before_the_commit(root: Root) -> None:
    first = save(root, 1)
    writer = Writer(ShortRoot(root.path), ALONE, OWNER, timeout=20)
    writer.submit(snapshot_of(value_of(2), 2, "00000000"))
    failure = writer.wait(20)
    writer.close(5)
    assert "r00000.0.safetensors has" in str(failure)
    assert str(reader.latest(root, "run").commit.name) == first


def save_until_killed(path: Path, fuse: int, step: int) -> None:
    save(FragileRoot(path, [fuse]), step, keep_last=2)


def test_a_kill_at_any_point_leaves_the_previous_or_the_new_checkpoint_whole(root: Root) -> None:
    names = [save(root, step, keep_last=2) for step in (1, 2)]
    seen = set()
    for fuse in range(60):
        step = 10 + fuse
        worker = processes.Process(target=save_until_killed, args=(root.path, fuse, step))
        worker.start()
        worker.join(30)
        commit = reader.latest(root, "run").commit
        assert commit is not None
        assert same_value(restore.load(root, commit.name, 0, 1).value, value_of(commit.manifest.step))
        committed = [info for info in reader.attempts(root) if info.status == "committed"]
        assert not [info for info in reader.attempts(root) if info.status == "invalid"]
        assert len(committed) >= 2
        assert commit.manifest.step == step or str(commit.name) == names[-1]
        seen.add((worker.exitcode, commit.manifest.step == step))
        if commit.manifest.step == step:
            names.append(str(commit.name))
        if worker.exitcode == 0:
            break
    assert seen == {(-9, False), (-9, True), (0, True)}, "killed before the commit, after it, and at last not at all"
    assert 15 < fuse < 59


def save_and_wait_for_a_missing_rank(path: Path) -> None:
    writer = Writer(Root(path), Place(0, 2, 0, 0, 1), OWNER, timeout=60)
    writer.submit(snapshot_of(value_of(9), 9, "00000000"))
    writer.wait(60)


def test_killed_while_it_waits_for_another_rank(root: Root) -> None:
    first = save(root, 1)
    worker = processes.Process(target=save_and_wait_for_a_missing_rank, args=(root.path,))
    worker.start()
    deadline = time.monotonic() + 30
    while root.size(attempt_key(AttemptName(1, 9, "00000000"), "done/n0000.json")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    assert str(reader.latest(root, "run").commit.name) == first
    assert [info.status for info in reader.attempts(root)] == ["uncommitted", "committed"]


def save_beyond_the_limit(path: Path, results: Any) -> None:
    """Files may not grow beyond 100 kB for a while, as on a full disk."""
    events = Events()
    writer = Writer(Root(path), ALONE, OWNER, on_event=events, timeout=20)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    writer.submit(snapshot_of({"big": torch.ones(1_000_000)}, 2, "00000000"))
    failure = writer.wait(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    left = sorted(Root(path).files(AttemptName(1, 2, "00000000")))
    latest = reader.latest(Root(path), "run").commit
    writer.submit(snapshot_of(value_of(3), 3, "00000001"))
    results.put((str(failure), left, latest.manifest.step, writer.wait(30), events.kinds()))
    writer.close(5)


def test_a_file_that_may_not_grow_fails_the_save_and_nothing_else(root: Root) -> None:
    save(root, 1)
    results = processes.Queue()
    worker = processes.Process(target=save_beyond_the_limit, args=(root.path, results))
    worker.start()
    failure, left, previous, second, kinds = results.get(timeout=60)
    worker.join(10)
    assert "File too large" in failure
    assert left == ["r00000.failed.json"]
    assert previous == 1
    assert second is None
    assert kinds == ["save_failed", "drained", "committed"]


FULL_DISK = """
import json, sys, torch
sys.path.insert(0, sys.argv[2])
from test_checkpoint_commit import *
root, events = Root.open(sys.argv[1]), Events()
first = save(root, 1)
writer = Writer(root, ALONE, OWNER, on_event=events, timeout=20)
writer.submit(snapshot_of({"big": torch.ones(4_000_000)}, 2, "00000000"))
failure = str(writer.wait(30))
same = str(reader.latest(root, "run").commit.name) == first
writer.submit(snapshot_of(value_of(3), 3, "00000001"))
print(json.dumps([failure, same, writer.wait(30), events.kinds()]))
writer.close(5)
"""


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=4m tmpfs "$1" 2>/dev/null || exit 99; shift; exec "$@"'
    script = [sys.executable, "-c", FULL_DISK, str(tmp_path), os.path.dirname(__file__)]
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), *script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode in (1, 99) and not done.stdout and "Traceback" not in done.stderr:
        pytest.skip(f"no private mount here: {done.stderr.strip() or 'mount failed'}")
    assert done.returncode == 0, done.stderr
    failure, same, second, kinds = json.loads(done.stdout)
    assert "No space left" in failure
    assert same
    assert second is None
    assert kinds == ["save_failed", "drained", "committed"]


def test_a_newer_epoch_keeps_latest_and_old_checkpoints_for_itself(root: Root) -> None:
    record = claim(root, "run", fresh=False, parent=None)
    old = [save(root, step, owner=Owner.of(record)) for step in (1, 2, 3)]
    claim(root, "run", fresh=False, parent=old[-1])
    events = Events()
    late = save(root, 4, owner=Owner.of(record), keep_last=2, events=events)
    assert events.kinds() == ["drained", "committed", "save_warning"]
    assert root.read("LATEST").decode().strip() == old[-1]
    assert [str(info.name) for info in reader.attempts(root)] == [late, *reversed(old)]


def test_retention_keeps_the_newest_and_the_parent_and_what_it_does_not_understand(root: Root) -> None:
    parent = save(root, 1)
    owner = Owner("run", 2, 1, parent)
    other = save(root, 2, owner=Owner("other run", 1, 1, None))
    before = save(root, 3)
    damaged = save(root, 4)
    root.delete(attempt_key(AttemptName.of(damaged), rank_shard(0)))
    (root.path / "ckpt" / "notes").mkdir()
    (root.path / "ckpt" / before / "note.txt").write_text("mine")
    names = [save(root, step, owner=owner, keep_last=2) for step in (5, 6, 7)]
    assert [str(info.name) for info in reader.attempts(root)] == [names[2], names[1], damaged, before, other, parent]
    assert os.listdir(root.path / "ckpt" / before) == ["note.txt"]
    assert not (root.path / "ckpt" / names[0]).exists()
    assert (root.path / "ckpt" / "notes").is_dir()


def test_a_latest_that_cannot_be_written_is_a_warning(root: Root) -> None:
    (root.path / "LATEST").mkdir(parents=True)
    events = Events()
    name = save(root, 3, events=events)
    assert events.kinds() == ["drained", "committed", "save_warning"]
    assert str(reader.latest(root, "run").commit.name) == name


def test_a_failed_save_does_not_keep_its_snapshot_in_memory(root: Root) -> None:
    root.path.mkdir()
    (root.path / "ckpt").write_text("in the way")
    writer = Writer(root, ALONE, OWNER, timeout=5)
    snapshot = snapshot_of(value_of(1), 1, "00000000")
    memory = weakref.ref(snapshot.tensors["model/w"])
    writer.submit(snapshot)
    del snapshot
    assert isinstance(writer.wait(20), CheckpointError)
    gc.collect()
    assert memory() is None
    writer.close(5)


@pytest.mark.parametrize(
    ("steps", "keep_last", "parent", "gone"),
    [
        ([3, 2, 1], 3, None, []),
        ([4, 3, 2, 1], 2, None, [1, 2]),
        ([4, 3, 2, 1], 1, None, [1, 2]),
        ([4, 3, 2, 1], 2, 1, [2]),
        ([4], 2, None, []),
        ([], 2, None, []),
    ],
)
def test_what_is_superfluous(steps: list[int], keep_last: int, parent: int | None, gone: list[int]) -> None:
    def info(step: int) -> reader.AttemptInfo:
        name = AttemptName(5, step, "00000000")
        manifest = Manifest(1, "0", "2", "3", "run", 5, str(name), None, step, None, 1, 1, "", None, {}, "now")
        return reader.AttemptInfo(name, "committed", "", manifest, 0)

    infos = [info(step) for step in steps]
    spared = None if parent is None else str(AttemptName(5, parent, "00000000"))
    doomed = retention.superfluous(infos, run_id="run", since=5, parent=spared, keep_last=keep_last)
    assert [item.name.step for item in doomed] == gone
    assert retention.superfluous(infos, run_id="run", since=6, parent=None, keep_last=2) == []


def test_keeping_one_is_refused(root: Root) -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.keep\.last"):
        Writer(root, ALONE, OWNER, keep_last=1)
