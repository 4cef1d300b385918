"""Nodes without a shared run directory: the checkpoint root is what they have in common, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from conftest import eventually, held_port
from nodes_kit import run_fixture, snapshot  # noqa: F401 - a fixture

from ftrun import events
from ftrun.checkpoint import common, epochs
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.layout import AttemptName, Root
from ftrun.cli import status
from ftrun.errors import CheckpointError, UsageError
from ftrun.goodput import history
from ftrun.launch import nodes_traits, plan
from ftrun.launch.options import LaunchParser
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Runner, Started
    from nodes_kit import Launcher, Run

    from ftrun.launch.plan import LaunchPlan

SECONDS = 120.0
APART = ("--rdzv-endpoint", "localhost:0", "--set", "run_dir.shared=false")


def node(run: Run, disk: str, *options: str) -> Launcher:
    """A launcher of the run on a node with a disk of its own."""
    root = f"checkpoint.root={run.cwd}/shared"
    made = run.launcher("--run-dir", f"{disk}/run", *APART, "--set", root, *options)
    planned = made.rounds._plan
    planned.run_dir.create(planned.to_json())
    return made


def planned(cwd: Path, *options: str) -> LaunchPlan:
    (cwd / "train.py").touch()
    parser = LaunchParser()
    line = shlex.split(f"--nnodes 2 {shlex.join(options)} train.py")
    return plan.make(parser.parse(line), parser, os.environ, cwd=cwd)


def numbers(run: Run, disk: str) -> list[int]:
    return RunDir(run.cwd / disk / "run").attempt_numbers()


# What can't be


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--name", "x", *APART), r"run_dir\.shared is false: each node .* checkpoint\.root must be a place that all"),
        (("--name", "x", *APART, "--set", "checkpoint.root=runs/x/ckpt"), r"runs/x/ckpt lies in this node's own run"),
        (("--name", "x", *APART, "--rdzv-backend", "c10d"), r"needs ftrun's own rendezvous: .* leave out --rdzv-back"),
        (
            ("--name", "x", *APART, "--set", "checkpoint.root=/r", "--fresh"),
            r"--fresh: several nodes use the checkpoint root /r, .* Choose another --name and another checkpoint\.root",
        ),
        (("--name", "x", "--set", "run_dir.shared=false"), r"needs ftrun's own rendezvous: give --rdzv-endpoint"),
    ],
)
def test_what_cannot_be_done_without_a_shared_run_directory_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says):
        planned(tmp_path, *options)


def test_directories_of_nodes_may_have_any_names_where_an_id_names_the_run(tmp_path: Path) -> None:
    root = ("--set", f"checkpoint.root={tmp_path}/root")
    assert planned(tmp_path, "--run-dir", "disk1/a", "--rdzv-id", "van", *APART, *root).run_id == "van"
    assert planned(tmp_path, "--run-dir", "disk2/b", "--rdzv-id", "van", *APART, *root).run_id == "van"
    assert planned(tmp_path, "--run-dir", "disk1/a", *APART, *root).run_id == "a"
    assert planned(tmp_path, "--run-dir", "disk1/a", "--name", "n", "--rdzv-id", "van", *APART, *root).run_id == "n"


def test_one_node_alone_has_no_use_for_it(tmp_path: Path) -> None:
    made = planned(tmp_path, "--nnodes", "1", "--name", "x", "--set", "run_dir.shared=false")
    assert made.shares_run_dir
    assert made.root == str(tmp_path / "runs" / "x" / "checkpoints")


# What all nodes have to have in common; test_namespace_refused.py shows a node that is refused for it


def _traits(made: LaunchPlan) -> dict[str, str]:
    return nodes_traits.traits(made, 1, lambda text: None)


def _different(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def test_directories_that_were_not_said_to_be_apart_differ_in_words_that_tell_both_ways_out(tmp_path: Path) -> None:
    one, two = (_traits(planned(tmp_path, "--run-dir", f"{disk}/run", *APART[:2])) for disk in "ab")
    name, *others = _different(one, two)
    assert name.startswith("the mark in the run directory, which all nodes have to share")
    assert "give --run-dir on storage that all of them see, or run_dir.shared=false" in name
    assert others == ["the checkpoint root"]  # which lies in it: said only where the mark is the same
    apart = _traits(planned(tmp_path, "--run-dir", "c/run", *APART, "--set", f"checkpoint.root={tmp_path}/shared"))
    assert _different(one, apart)[0] == "run_dir.shared"


def test_nodes_with_disks_of_their_own_are_alike_where_they_see_one_root(tmp_path: Path) -> None:
    apart = (*APART, "--set", f"checkpoint.root={tmp_path}/shared")
    one, two = (_traits(planned(tmp_path, "--run-dir", f"{disk}/run", *apart)) for disk in "ab")
    assert _different(one, two) == []
    # On the third node something else is mounted there, or nothing.
    (tmp_path / "shared").rename(tmp_path / "away")
    (name,) = _different(_traits(planned(tmp_path, "--run-dir", "c/run", *apart)), two)
    assert name.startswith("the mark in the checkpoint root, which all nodes have to share")


def test_a_node_knows_a_root_again(tmp_path: Path) -> None:
    made = planned(tmp_path, "--run-dir", "a/run", *APART, "--set", f"checkpoint.root={tmp_path}/shared")
    before = _traits(made)
    made.run_dir.enter_attempt(1)
    (tmp_path / "shared").rename(tmp_path / "away")
    with pytest.raises(UsageError, match=rf"{tmp_path}/shared is not the checkpoint root that .* is it not mounted\?"):
        _traits(made)
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "away").rename(tmp_path / "shared")
    assert _traits(made) == before


def test_a_node_that_was_refused_for_its_root_may_come_back_with_the_right_one(tmp_path: Path) -> None:
    options = (*APART, "--set", f"checkpoint.root={tmp_path}/shared")
    first = _traits(planned(tmp_path, "--run-dir", "a/run", *options))
    (tmp_path / "shared").rename(tmp_path / "away")  # not mounted on the second node
    second = planned(tmp_path, "--run-dir", "b/run", *options)
    assert _different(_traits(second), first)
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "away").rename(tmp_path / "shared")
    assert _traits(second) == first


def test_a_mark_that_is_damaged_is_told_and_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_PAUSE", 0.0)
    root = Root.open(tmp_path)
    mark = common.mark(root)
    assert common.mark(root) == mark
    (tmp_path / common.MARK).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"mark\.json is torn.*: delete it, and start again on all nodes"):
        common.mark(root)


# What an attempt begins with


def test_an_attempt_has_one_number_on_all_nodes_whichever_leads(run: Run) -> None:
    one, two = node(run, "a"), node(run, "b")
    assert {each.attempt for each in run.meet(one, two)} == {1}
    assert {each.attempt for each in run.meet(two, one)} == {2}
    # All launchers are new, and a node leads that has an empty disk.
    begun = run.meet(node(run, "c"), node(run, "b"))
    assert {each.attempt for each in begun} == {3}
    assert {disk: numbers(run, disk) for disk in "abc"} == {"a": [1, 2], "b": [1, 2, 3], "c": [3]}
    assert os.readlink(run.cwd / "b" / "run" / "attempts" / "latest") == "0003"


def test_a_number_that_a_node_has_used_with_another_root_begins_empty(run: Run) -> None:
    one, two = node(run, "a"), node(run, "b")
    place = two.rounds._plan.run_dir.worker(1, 1, 1)
    place.mkdir(parents=True)
    (place / "error.json").write_text("{}")
    assert [each.attempt for each in run.meet(one, two)] == [1, 1]
    assert not place.exists()
    assert [path.name for path in place.parents[1].glob("*/r00001/error.json")] == ["error.json"]


@pytest.mark.slow
def test_nodes_with_empty_disks_find_the_newest_commit(run: Run) -> None:
    one, two = node(run, "a"), node(run, "b")
    run.meet(one, two)
    made = snapshot(AttemptName(1, 10, "0123abcd"))
    for rank, each in enumerate((one, two)):
        each.seal(made, [rank])
        each.keep()
    eventually(run.committed, 60, "the commit")
    for each in (one, two):
        each.kill_keeper()
        each.tier.remove()
    for disk in "ab":
        shutil.rmtree(run.cwd / disk)
    three, four = node(run, "c"), node(run, "d")
    assert three.rounds._plan.resume == str(made.name)
    assert {each.resume for each in run.meet(four, three)} == {str(made.name)}


@pytest.mark.slow
def test_of_two_halves_that_both_go_on_only_the_later_one_commits(run: Run) -> None:
    one, two = node(run, "a"), node(run, "b")
    run.meet(one, two)
    (ours,), (theirs,) = run.meet(one), run.meet(two)
    assert (ours.epoch, theirs.epoch) == (2, 3)
    # The later one first: until it has committed something, it takes over what the other one left whole.
    for each, begun in ((two, theirs), (one, ours)):
        each.seal(snapshot(AttemptName(begun.epoch, 10, f"{begun.epoch:08x}"), 1), [0])
        each.keep()
        eventually(run.committed, 60, "the later one's commit")

    def fenced() -> bool:
        shown = Progress.read(one.tier)
        return shown is not None and "epoch 3 has begun without this node" in shown.waiting

    eventually(fenced, 60, "the other half waits")
    assert [AttemptName.of(each).epoch for each in run.committed()] == [3]


def test_a_node_that_leads_for_the_first_time_begins_nothing_anew_where_the_root_was(run: Run) -> None:
    run.meet(node(run, "a"))
    spare = node(run, "b")
    _traits(spare.rounds._plan)
    (run.cwd / "shared").rename(run.cwd / "away")  # while it waits
    (begun,) = run.begun(spare)
    with pytest.raises(UsageError, match=r"is not the checkpoint root that this node found when it started"):
        begun.result()
    assert not (run.cwd / "shared").exists()
    (run.cwd / "away").rename(run.cwd / "shared")
    assert [each.epoch for each in run.meet(spare)] == [2]


# When all is done


def test_all_nodes_know_that_the_run_is_finished(run: Run) -> None:
    one, two = node(run, "a"), node(run, "b")
    run.meet(one, two)
    two.rounds.note_finished()
    assert not node(run, "b").rounds._plan.finished
    one.rounds.note_finished()
    assert [node(run, disk).rounds._plan.finished for disk in "abc"] == [True] * 3
    assert node(run, "c").rounds._plan.to_json()["state"] == "finished"
    (run.cwd / "shared/epochs/00000002.json").write_bytes(b"")  # another start has been tried since
    assert not node(run, "b").rounds._plan.finished


def _write(run_dir: RunDir, *lines: tuple[int, int, events.Event]) -> None:
    """Events of a run, one second after the other: the node's number, the attempt's, and what happened."""
    for at, (number, attempt, event) in enumerate(lines):
        with run_dir.events(number).open("ab") as file:
            file.write(events.encode(event, float(at), attempt, None))


STARTED = events.RunStarted("run", [], 1, "n", 1, continued=False, versions={})


def test_a_node_tells_the_history_that_it_has_seen(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create({"run_id": "run", "shared_run_dir": False})
    failed = events.Failed("killed", 1, -9, "rank 1 was killed", 4, 2, "restart", restart=True)
    _write(
        run_dir,
        (1, 0, STARTED),
        (1, 1, events.AttemptStarted(1, 2, None, 0, {})),
        (1, 1, failed),
        (0, 1, failed),  # the first node tells what another one decided; here it was itself
        (0, 2, events.AttemptStarted(2, 2, None, 2, {})),
        (0, 0, events.RunEnded("finished", 0)),
    )
    told = history.load(run_dir)
    assert (told.run_id, told.attempts, told.restarts, told.lost_steps, told.outcome) == ("run", 2, 1, 2, "finished")


def test_directories_that_are_one_after_all_are_those_of_the_first_node(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create({"run_id": "run", "shared_run_dir": False})
    met = [events.Met(1, "", ["m", "n"], node, "mn"[node], 10 + node) for node in range(2)]
    _write(run_dir, (0, 0, STARTED), (0, 1, met[0]), (1, 0, STARTED), (1, 1, met[1]))
    assert history.load(run_dir).node == 0


def test_a_node_that_is_not_the_first_one_says_what_it_does_not_know(tmp_path: Path) -> None:
    run_dir, root = RunDir(tmp_path / "run"), Root.open(tmp_path / "shared")
    run_dir.create({"run_id": "run", "shared_run_dir": False, "checkpoint_root": root.url})
    _write(
        run_dir,
        (1, 0, STARTED),
        (1, 1, events.Met(1, "", ["m", "n"], 1, "n", 1)),
        (1, 1, events.AttemptStarted(1, 2, None, 0, {})),
        (1, 0, events.RunEnded("finished", 0)),  # its workers had nothing left to do
    )
    epochs.claim(root, "run", fresh=False, parent=None)
    told = status.describe(run_dir, history.load(run_dir))
    assert (told["state"], told["node"]) == ("left", 1)
    assert "known on the first node; this one is number 1" in status._text(told)
    common.note_finished(root, "run", 1)
    assert status.describe(run_dir, history.load(run_dir))["state"] == "finished"


def test_one_that_goes_on_alone_asks_the_root_whether_all_is_done(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "shared")
    run_dir = RunDir(tmp_path / "b" / "run")
    run_dir.create({"run_id": "run", "shared_run_dir": False})
    _write(
        run_dir,
        (1, 0, STARTED),
        (1, 1, events.Met(1, "", ["m", "n"], 1, "n", 1)),
        (1, 1, events.AttemptStarted(1, 2, None, 0, {})),
        (1, 0, events.RunEnded("finished", 0)),  # for lack of time: the first node knows what is left
    )
    epochs.claim(root, "run", fresh=False, parent=None)
    alone = ("--nnodes", "1", "--run-dir", "b/run", "--set", f"checkpoint.root={root.url}")
    assert not planned(tmp_path, *alone).finished
    common.note_finished(root, "run", 1)
    assert planned(tmp_path, *alone).finished


# All of it, with real launchers

SCRIPT = """
    import json, os, time
    import torch
    import torch.distributed as dist
    import ftrun

    @ftrun.entrypoint
    def main(ft):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ft.track(model=model, optimizer=optimizer)
        samples = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(-1, 1))
        loader = ft.loader(samples, global_batch=2, seed=1)
        for (batch,) in ft.steps(loader, total=8):
            deadline = time.monotonic() + 60
            while ft.step == 5 and not os.path.exists("go") and time.monotonic() < deadline:
                time.sleep(0.01)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()

    main()
"""


@pytest.fixture
def bucket() -> Iterator[dict[str, Any]]:
    """Options of the driver for an object store, in which there is a bucket ``nodes``."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs", reason="the driver of S3 isn't installed")
    moto = pytest.importorskip("moto.server", reason="the server isn't installed: pip install 'moto[server]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3", **options).mkdir("nodes")
    yield options
    server.stop()


class Nodes:
    """Launchers of one run on this machine, each with a disk of its own."""

    def __init__(self, runner: Runner, port: int, *options: str) -> None:
        self.runner, self.port, self.options = runner, port, options
        (runner.cwd / "train.py").write_text(textwrap.dedent(SCRIPT))

    def start(self, disk: str, *more: str) -> Started:
        # No launcher passes for lost because this machine was busy: that would be one attempt more.
        patient = ("--rdzv-conf", "last_call_timeout=0.5,lost_timeout=60")
        meet = ("--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"localhost:{self.port}", *patient)
        return self.runner.start(*meet, "--run-dir", f"{disk}/run", *self.options, *more, "train.py")

    def dir(self, disk: str) -> RunDir:
        return RunDir(self.runner.cwd / disk / "run")

    def events(self, disk: str, kind: type[events.Event]) -> list[Any]:
        found = [each for file in self.dir(disk).event_files() for each in events.read(file)]
        return [each.event for each in found if isinstance(each.event, kind)]


@pytest.mark.slow
def test_a_run_on_an_object_store_goes_on_with_new_launchers_on_an_empty_disk(
    runner: Runner, bucket: dict[str, Any]
) -> None:
    root = ("checkpoint.root=s3://nodes/run", f"checkpoint.options={json.dumps(bucket)}")
    sets = ("run_dir.shared=false", "checkpoint.every=4 steps", *root)
    with held_port() as port:
        nodes = Nodes(runner, port, *(part for each in sets for part in ("--set", each)))
        lives = [nodes.start(disk) for disk in "ab"]
        committed = lambda: [each.step for disk in "ab" for each in nodes.events(disk, events.Committed)]  # noqa: E731
        eventually(lambda: 4 in committed(), SECONDS, "the commit of step 4")
        for each in lives:
            each.process.send_signal(signal.SIGKILL)
            each.process.wait(10)
        ranks = {disk: [path.name for path in nodes.dir(disk).attempt(1).glob("n*/r*")] for disk in "ab"}
        assert sorted(ranks.values()) == [["r00000"], ["r00001"]]

        (runner.cwd / "go").touch()
        result = nodes.start("c", "--nnodes", "1:2").wait(SECONDS)
        assert result.code == 0
        assert "run_dir.shared is false: logs, events" in result.err
        assert [each.resume_step for each in nodes.events("c", events.AttemptStarted)] == [4]
        assert nodes.dir("c").attempt_numbers() == [2]
        # A node that has seen nothing of it knows that there is nothing left to do.
        assert planned(runner.cwd, "--run-dir", "d/run", *APART, *nodes.options).finished
