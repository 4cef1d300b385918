from __future__ import annotations

import logging
import pickle
import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import loading_kit
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import held_port
from safetensors.torch import load_file
from session_kit import alike
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ftrun.dcp
from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.layout import MANIFEST, Root
from ftrun.checkpoint.offline import load
from ftrun.checkpoint.state import encode
from ftrun.checkpoint.tree import by_key, leaves, nest, select
from ftrun.errors import CheckpointError, NoValidCheckpoint, UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Runner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def a_state() -> dict[str, Any]:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "half": torch.arange(5).to(torch.bfloat16),
        "bytes8": torch.ones(3).to(torch.float8_e4m3fn),
        "wave": torch.tensor([1 + 2j, 3j]),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "steps": 1_200,
        "nan": float("nan"),
        "name": "a name",
        "betas": (0.9, 0.999),
        "plain": [1, 2, 3],
        "mixed": [{"x": torch.ones(2)}, torch.zeros(3)],
        "array": np.arange(4, dtype=np.int16),
        "generator": torch.Generator().manual_seed(3).get_state(),
    }


def cleared(value: Any) -> Any:
    """A template: the same places, other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, cleared(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [cleared(item) for item in value]
    return None


def save(root: Path | str, state: dict[str, Any], step: int | None = None, **options: Any) -> str:
    """Save, and give the checkpoint's name."""
    writer = ftrun.dcp.Writer(root, **options)
    number = None if step is None else str(step)
    metadata = dcp.save(state, checkpoint_id=number, storage_writer=writer, no_dist=True)
    return str(metadata.storage_meta.checkpoint_id)


def restore(root: Path | str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ftrun.dcp.Reader(root, **options), no_dist=True)
    return state


def x_of(root: Path | str, **options: Any) -> float:
    return float(restore(root, {"x": torch.zeros(9)}, **options)["x"][0])


def x_is(value: float) -> dict[str, Any]:
    return {"x": torch.full((9,), value)}


# --- what goes in comes out


def test_all_kinds_of_values_come_back(tmp_path: Path) -> None:
    state = a_state()
    name = save(tmp_path, state)
    assert [str(info.name) for info in reader.attempts(Root.open(tmp_path)) if info.status == "committed"] == [name]
    assert alike(restore(tmp_path, cleared(state)), state)


def test_the_state_comes_back_without_dcp(tmp_path: Path) -> None:
    state = a_state()
    save(tmp_path, state)
    wanted = state | {"optim": state["optim"] | {"state": {str(n): s for n, s in state["optim"]["state"].items()}}}
    found = load(tmp_path)
    assert list(found) == list(wanted)
    assert alike(found, wanted | {"model": dict(wanted["model"])})


def test_other_tools_open_the_payload(tmp_path: Path) -> None:
    name = save(tmp_path, {"a": torch.arange(3.0), "b": {"c": torch.ones(2, dtype=torch.int8)}})
    tensors = load_file(tmp_path / "ckpt" / name / "r00000.0.safetensors")
    assert alike(tensors, {"a": torch.arange(3.0), "b.c": torch.ones(2, dtype=torch.int8)})


def test_a_state_without_tensors_has_no_payload(tmp_path: Path) -> None:
    name = save(tmp_path, {"n": 1})
    files = {path.name for path in (tmp_path / "ckpt" / name).rglob("*") if path.is_file()}
    assert files == {MANIFEST, "r00000.json", "n0000.json"}
    assert restore(tmp_path, {"n": 0}) == {"n": 1}


def test_tensors_are_read_into_what_is_there(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(4), "c": torch.ones(2)})
    strided, wide, parameter = torch.zeros(4, 3).T, torch.zeros(4, dtype=torch.float64), nn.Parameter(torch.zeros(2))
    restore(tmp_path, {"a": strided, "b": wide, "c": parameter})
    assert torch.equal(strided, torch.arange(12.0).reshape(3, 4))
    assert torch.equal(wide, torch.arange(4.0, dtype=torch.float64))
    assert torch.equal(parameter, torch.ones(2))


def test_names_with_dollars_slashes_and_dots(tmp_path: Path) -> None:
    inner = {"/b": torch.zeros(2), "$": {"$": (1, 2)}}
    state = {"$": 1, "a/b": torch.ones(2), "a": inner, "__metadata__": torch.ones(1)}
    save(tmp_path, state)
    assert alike(restore(tmp_path, cleared(state)), state)
    assert alike(load(tmp_path), state)


def test_a_planner_that_does_not_flatten(tmp_path: Path) -> None:
    state = {"model": OrderedDict(w=torch.ones(3), t=(torch.zeros(2),)), "n": 4}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=ftrun.dcp.Writer(tmp_path), planner=planner, no_dist=True)
    loader = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    got: dict[str, Any] = {"model": None, "n": None}
    dcp.load(got, storage_reader=ftrun.dcp.Reader(tmp_path), planner=loader, no_dist=True)
    assert alike(got, state)
    assert alike(load(tmp_path), state)


def test_a_url_works_as_a_path_does() -> None:
    root = f"memory://{uuid.uuid4().hex}/llama"
    state = a_state()
    name = save(root, state)
    assert alike(restore(root, cleared(state)), state)
    assert alike(load(f"{root}/ckpt/{name}")["half"], state["half"])


def test_a_writer_survives_being_pickled(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(ftrun.dcp.Writer(tmp_path, keep_last=2)))
    dcp.save(x_is(3), storage_writer=writer, no_dist=True)
    assert x_of(tmp_path) == 3


def test_the_stateful_protocol(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save(tmp_path, {"model": one})
    restore(tmp_path, {"model": other})
    assert alike(one.state_dict(), other.state_dict())


# --- which checkpoint


def test_the_newest_save_wins_whatever_its_step(tmp_path: Path) -> None:
    names = [save(tmp_path, x_is(value), step) for value, step in ((1, 900), (2, 1_500), (3, 900))]
    assert len(set(names)) == 3
    assert x_of(tmp_path) == 3
    assert x_of(tmp_path, checkpoint=names[0]) == 1
    assert x_of(tmp_path / "ckpt" / names[1]) == 2
    for wanted, number in ((3, "900"), (2, "step-1500"), (1, names[0])):
        state: dict[str, Any] = {"x": torch.zeros(9)}
        dcp.load(state, checkpoint_id=number, storage_reader=ftrun.dcp.Reader(tmp_path), no_dist=True)
        assert state["x"][0] == wanted
    assert [load(tmp_path, step=step)["x"][0] for step in (900, 1_500)] == [3, 2]
    assert load(tmp_path, name=names[0])["x"][0] == 1


def test_a_run_directory_stands_for_its_root(tmp_path: Path) -> None:
    for name, root in (("one", None), ("two", tmp_path / "elsewhere")):
        run = RunDir(tmp_path / name)
        run.create({"run_id": "dcp"} | ({"checkpoint_root": str(root)} if root else {}))
        save(root or run.checkpoints, x_is(4))
        assert x_of(run.path) == 4
        assert load(run.path)["x"][0] == 4
        # Its own root is meant, whatever else lies in it.
        save(run.path / "other", x_is(5))
        (run.path / "other" / "ckpt").rename(run.path / "ckpt")
        assert load(run.path)["x"][0] == 4


def test_a_checkpoints_own_directory_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, x_is(1))
    (old,) = (tmp_path / "ckpt").iterdir()
    save(tmp_path, x_is(2))
    for cwd, where in ((tmp_path / "ckpt", old.name), (old, "."), (tmp_path, f"ckpt/{old.name}/")):
        monkeypatch.chdir(cwd)
        assert load(where)["x"][0] == 1
    with pytest.raises(UsageError, match="both choose"):
        load(old, step=2)


def test_what_is_no_place_of_checkpoints_is_told_from_an_empty_one(tmp_path: Path) -> None:
    dcp.save(x_is(1), checkpoint_id=tmp_path / "by dcp", no_dist=True)
    (tmp_path / "file").touch()
    (tmp_path / "root" / "epochs").mkdir(parents=True)
    for name, said in (
        ("by dcp", r"no checkpoint root: it holds \.metadata.*FileSystemReader"),
        ("file", "is a file; name"),
        ("file/below", "is a file; name"),
        ("root", "there is no checkpoint in"),
        ("nowhere", "there is no checkpoint in"),
    ):
        with pytest.raises(UsageError, match=said):
            load(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"can't be looked into: .*too long"):
        load(tmp_path / ("x" * 300))


def test_a_save_without_its_manifest_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [save(tmp_path, x_is(value)) for value in (1, 2, 3)]
    (tmp_path / "ckpt" / names[2] / MANIFEST).unlink()
    content = (tmp_path / "ckpt" / names[1] / MANIFEST).read_bytes()
    (tmp_path / "ckpt" / names[1] / MANIFEST).write_bytes(content[:-9])
    with caplog.at_level(logging.WARNING):
        assert x_of(tmp_path) == 1
    assert f"checkpoint {names[1]} is skipped" in caplog.text
    with pytest.raises(NoValidCheckpoint, match=names[1]):
        load(tmp_path, name=names[1])


@pytest.mark.parametrize("file", ["r00000.0.safetensors", "r00000.json"])
def test_a_flipped_byte_is_found_and_the_next_load_takes_an_older_one(tmp_path: Path, file: str) -> None:
    names = [save(tmp_path, x_is(value)) for value in (1, 2)]
    loading_kit.flip(tmp_path / "ckpt" / names[1] / file, -3)
    assert load(tmp_path)["x"][0] == 1
    if file.endswith(".safetensors"):
        with pytest.raises(dcp.CheckpointException, match="checksum"):
            x_of(tmp_path)
    assert x_of(tmp_path) == 1
    with pytest.raises(dcp.CheckpointException, match=r"checksum|marked as bad"):
        x_of(tmp_path, checkpoint=names[1])


def test_ranks_that_see_different_checkpoints_do_not_load(tmp_path: Path) -> None:
    save(tmp_path, x_is(1))
    storage, plans = ftrun.dcp.Reader(tmp_path), []
    for value in (1, 2):
        storage.read_metadata()
        plans.append(storage.prepare_local_plan(dcp.LoadPlan([])))
        save(tmp_path, x_is(value))
    with pytest.raises(OSError, match="load again"):
        storage.prepare_global_plan(plans)
    assert storage.prepare_global_plan(plans[:1]) == plans[:1]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint in"):
        load(tmp_path)
    save(tmp_path, x_is(1), step=7)
    with pytest.raises(UsageError, match="no checkpoint of step 8; there is 7"):
        load(tmp_path, step=8)
    with pytest.raises(UsageError, match="no rank 1"):
        load(tmp_path, rank=1)
    with pytest.raises(dcp.CheckpointException, match="the checkpoint has no 'model'"):
        x_of(tmp_path, prefix="model")
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        restore(tmp_path, {"y": torch.zeros(1)})


# --- whole or not at all


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, x_is(1))
    with pytest.raises(dcp.CheckpointException, match=r"(?s)thing.*without pickle"):
        save(tmp_path, x_is(2) | {"deep": {"thing": object()}})
    newest = reader.attempts(Root.open(tmp_path))[0]
    assert newest.status == "uncommitted"
    files = [path for path in (tmp_path / "ckpt" / str(newest.name)).rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["n0000.failed.json"]
    assert x_of(tmp_path) == 1


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.parametrize("kind", ["sparse", "quantised", "meta"])
def test_a_tensor_that_cannot_be_stored_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    tensors = {
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.ones(3, device="meta"),
    }
    with pytest.raises(dcp.CheckpointException, match=r"(?s)NotStorable: 'deep.thing': a tensor .*without pickle"):
        save(tmp_path, {"deep": {"thing": tensors[kind]}})
    assert [info.status for info in reader.attempts(Root.open(tmp_path))] == ["uncommitted"]


class Numbers(torch.Tensor):
    """A class of the user's own."""


def test_of_a_class_of_the_users_own_the_numbers_are_stored(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(2).as_subclass(Numbers)})
    found = restore(tmp_path, {"x": torch.zeros(2).as_subclass(Numbers)})["x"]
    assert type(found) is Numbers
    assert found.tolist() == [1, 1]


@pytest.mark.parametrize(
    "options",
    [{"run_id": None}, {"run_id": 5}, {"run_id": ""}, {"keep_last": 1}, {"keep_last": 2.5}, {"keep_last": "3"}],
    ids=str,
)
def test_a_writer_whose_saves_nobody_could_read_is_not_made(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ftrun.dcp.Writer(tmp_path, **options)


def test_a_run_directory_is_not_written_to(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "llama")
    run.create({"run_id": "llama", "checkpoint_root": str(run.checkpoints)})
    with pytest.raises(UsageError, match="is a run directory"):
        ftrun.dcp.Writer(run.path)


class Loses(DefaultSavePlanner):
    """A planner whose tensors turn out to be something else than it said."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found.to(torch.float64) if isinstance(found, torch.Tensor) else found


def test_a_planner_that_changes_its_mind_commits_nothing(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="the planner said"):
        dcp.save(x_is(1), storage_writer=ftrun.dcp.Writer(tmp_path), planner=Loses(), no_dist=True)
    assert [info.status for info in reader.attempts(Root.open(tmp_path))] == ["uncommitted"]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_root_of_another_run_is_refused(tmp_path: Path) -> None:
    root = Root.open(tmp_path)
    epochs.claim(root, "llama", fresh=False, parent=None)
    with pytest.raises(dcp.CheckpointException, match="holds the run 'llama'"):
        save(tmp_path, x_is(1))
    save(tmp_path, x_is(1), run_id="llama")
    assert x_of(tmp_path) == 1


@pytest.mark.parametrize("number", ["final", "runs/llama/step-1200", "-3"])
def test_an_id_that_is_no_step_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(UsageError, match="names no step"):
        dcp.save(x_is(1), checkpoint_id=number, storage_writer=ftrun.dcp.Writer(tmp_path), no_dist=True)
    assert not ftrun.dcp.Writer.validate_checkpoint_id(number)
    assert not list(tmp_path.iterdir())


def test_saving_without_agreement_is_refused(tmp_path: Path) -> None:
    writer = ftrun.dcp.Writer(tmp_path)
    with pytest.raises(UsageError, match="use_collectives"):
        dcp.save(x_is(1), storage_writer=writer, no_dist=True, use_collectives=False)


def test_old_checkpoints_go_when_asked(tmp_path: Path) -> None:
    for value in range(5):
        save(tmp_path, x_is(value), keep_last=2)
    assert [info.name.epoch for info in reader.attempts(Root.open(tmp_path))] == [5, 4]
    with pytest.raises(UsageError, match="keep_last=1"):
        ftrun.dcp.Writer(tmp_path, keep_last=1)


@pytest.fixture
def plan_caches() -> Iterator[None]:
    """DCP keeps the plans of all planners of a process in one place."""
    caches = [value for name, value in vars(dcp.SavePlanner).items() if name.startswith("_cached")]
    assert len(caches) == 5
    yield
    for each in caches:
        each.clear()


@pytest.mark.usefixtures("plan_caches")
def test_a_planner_that_caches_needs_one_writer(tmp_path: Path) -> None:
    writer = ftrun.dcp.Writer(tmp_path)
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(x_is(value) | {"n": value}, storage_writer=writer, planner=planner, no_dist=True)
        state = restore(tmp_path, {"x": torch.zeros(9), "n": 0})
        assert (state["x"][0], state["n"]) == (value, value)
    assert len(reader.attempts(Root.open(tmp_path))) == 3
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(dcp.CheckpointException, match=r"one ftrun.dcp.Writer for all saves"):
        dcp.save(x_is(4) | {"n": 4}, storage_writer=ftrun.dcp.Writer(tmp_path), planner=planner, no_dist=True)
    assert x_of(tmp_path) == 3


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    state = {"x": torch.zeros(200_000)}
    future = dcp.async_save(state, storage_writer=ftrun.dcp.Writer(tmp_path), no_dist=True)
    state["x"].fill_(1)
    assert future.result(60).storage_meta.checkpoint_id in {str(name) for name in Root.open(tmp_path).attempts()}
    assert restore(tmp_path, {"x": torch.ones(200_000)})["x"].sum() == 0


# --- what a Session stored


def session_root(tmp_path: Path, ranks: int, layout: Any) -> tuple[Root, dict[str, Any]]:
    tied = torch.arange(40_000.0)
    model = OrderedDict(w=torch.arange(24.0).reshape(6, 4), v=torch.arange(7), tied=tied, again=tied, part=tied[8:20])
    optimizer = {"state": {"w": {"step": torch.tensor(3.0), "m": torch.ones(6, 4)}}, "param_groups": [{"lr": 0.1}]}
    tracked = {"model": model, "optimizer": optimizer, "n": 3}
    root = Root.open(tmp_path)
    epochs.claim(root, "run", fresh=False, parent=None)
    made = loading_kit.written(ranks, lambda rank: {"tracked": tracked, "random": {"seed": rank}}, layout)
    loading_kit.commit(root, made)
    return root, tracked


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("layout", [loading_kit.replicated, loading_kit.in_rows])
def test_what_a_session_stored_is_read(tmp_path: Path, ranks: int, layout: Any) -> None:
    _, tracked = session_root(tmp_path, ranks, layout(ranks))
    assert alike(restore(tmp_path, cleared(tracked)), tracked)
    model = cleared(dict(tracked["model"]))
    assert alike(restore(tmp_path, model, prefix="tracked/model"), dict(tracked["model"]))
    value = load(tmp_path, rank=ranks - 1)
    assert alike(value["tracked"], tracked)
    assert value["random"] == {"seed": ranks - 1}
    assert value["tracked"]["model"]["tied"] is value["tracked"]["model"]["again"]


def test_a_session_root_is_not_written_to(tmp_path: Path) -> None:
    session_root(tmp_path, 1, loading_kit.replicated(1))
    with pytest.raises(dcp.CheckpointException, match="holds the run 'run'"):
        save(tmp_path, x_is(1))


# --- walks over trees


TREES: list[Any] = [
    {"a": 1, "b": {"c": torch.ones(1), "d": {}}, "e": [], "f": [1, [2]]},
    {"a": [1, {"b": 2}], "b": [[torch.ones(1)], 3], "c": (torch.ones(1), {"x": 1}), "d": [[], [1]]},
    {"a": {1: 2, (3, 4): 5, None: 6}, "b": OrderedDict(x={"y": 1}), "c": {"$": 1}},
    {"a": [{}, torch.ones(1)], "b": {"c": {"d": [{"e": [1]}]}}},
]


@pytest.mark.parametrize("state", TREES)
def test_states_are_taken_apart_as_dcp_does_it(state: Any) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    ours = by_key(leaves(encode(state).tree))
    theirs = {key: path for key, path in planner.mappings.items() if "(" not in key}
    assert {key: path for key, (path, _) in ours.items() if "$" not in key or "tuple" not in key} == theirs


def test_trees_are_put_together_again() -> None:
    parts = {("a", "b"): 1, ("a", "c", 0): 2, ("a", "c", 1, "d"): 3, ("e",): 4}
    assert nest(parts) == {"a": {"b": 1, "c": [2, {"d": 3}]}, "e": 4}
    assert nest({("$",): 1, ("a",): 2}) == {"$": "dict", "items": [["$", 1], ["a", 2]]}
    assert nest({}) == {}


def test_parts_of_trees_are_found_by_path() -> None:
    tree = encode({"a": {"b/c": {"d": 1}, 3: {"e": 2}}}).tree
    assert select(tree, "a/b/c/d") == 1
    assert select(tree, "a/3/e") == 2
    assert select(tree, "") == tree
    with pytest.raises(UsageError, match="no 'a/x': in a is 'b/c', '3'"):
        select(tree, "a/x")
    with pytest.raises(UsageError, match=r"two values have the key 'a\.b'"):
        by_key(leaves({"a": {"b": 1}, "a.b": 2}))


# --- several ranks


def together(runner: Runner, act: str, world_size: int) -> list[Any]:
    """Run one act on some ranks, and give how each ended."""
    program = loading_kit.__file__.replace("loading_kit", "dcp_kit")
    with held_port() as port:
        started = [
            runner.start_python(program, runner.cwd, str(rank), str(world_size), act, str(port))
            for rank in range(world_size)
        ]
        return [each.wait(100) for each in started]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 4)])
def test_sharded_state_changes_its_number_of_ranks(runner: Runner, saved: int, loaded: int) -> None:
    for act, world_size in (("save", saved), ("load", loaded)):
        for result in together(runner, act, world_size):
            assert result.code == 0, result
    infos = reader.attempts(Root.open(runner.cwd / "root"))
    assert [(info.status, info.name.step) for info in infos] == [("committed", 2), ("committed", 1)]
    wanted = torch.load(runner.cwd / "wanted-0.pt", weights_only=True)
    for rank in range(saved):
        value = load(runner.cwd / "root", rank=rank)
        for name in ("0.weight", "2.bias"):
            assert torch.equal(value["model"][name], wanted[name])
            assert torch.equal(value["optim"]["state"][name]["exp_avg_sq"], wanted[f"state.{name}.exp_avg_sq"])


@pytest.mark.slow
def test_replicated_state_is_stored_once(runner: Runner) -> None:
    for act, world_size in (("save-plain", 2), ("load-plain", 1)):
        for result in together(runner, act, world_size):
            assert result.code == 0, result
    held = [load_file(path) for path in sorted((runner.cwd / "root").rglob("*e00000001*/*.safetensors"))]
    assert len(held) == 2
    assert not set(held[0]) & set(held[1])
    assert {"model.0.weight", "optim.state.2.bias.exp_avg"} <= set(held[0]) | set(held[1])


@pytest.mark.slow
def test_a_rank_that_fails_or_dies_commits_nothing(runner: Runner) -> None:
    first, second = together(runner, "fail", 2)
    assert (first.code, second.code) == (0, -9), (first, second)
    assert "lost" in first.out
    statuses = [info.status for info in reader.attempts(Root.open(runner.cwd / "root"))]
    assert statuses == ["uncommitted", "committed", "uncommitted"]
    value = load(runner.cwd / "root")
    assert torch.equal(value["both"], torch.arange(50_000))
    assert [float(value[f"own{rank}"][0]) for rank in (0, 1)] == [0, 1]


@pytest.mark.slow
def test_a_process_that_saves(runner: Runner) -> None:
    (result,) = together(runner, "process", 1)
    assert result.code == 0, result
    infos = reader.attempts(Root.open(runner.cwd / "root"))
    assert [(info.status, info.name.step) for info in infos] == [("committed", 2), ("committed", 1)]
    assert alike(load(runner.cwd / "root"), {"x": torch.arange(8.0) + 1, "n": 5})
    assert alike(load(runner.cwd / "root", step=1), {"x": torch.arange(8.0), "n": 5})
