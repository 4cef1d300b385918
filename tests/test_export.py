from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import loading_kit
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from safetensors import safe_open
from safetensors.torch import load_file
from session_kit import alike
from torch import nn
from typer.testing import CliRunner

import ftrun.dcp
from ftrun.checkpoint import epochs, export_formats
from ftrun.checkpoint.export import export
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.offline import choose, load
from ftrun.checkpoint.opened import Opened
from ftrun.cli.ckpt_export import export_command
from ftrun.errors import CorruptCheckpoint, UsageError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(6, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def tracked() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sampler": {"seed": 17, "at": (3, 4)}}


def session(where: Path, state: dict[str, Any], ranks: int = 1, **extra: Any) -> Opened:
    """What the ranks of a Session stored, opened."""
    root = Root.open(where)
    epochs.claim(root, "run", fresh=False, parent=None)
    layout = loading_kit.in_rows(ranks) if ranks > 1 else loading_kit.replicated(1)
    loading_kit.commit(root, loading_kit.written(ranks, lambda rank: {"tracked": state, **extra}, layout))
    return Opened(root, loading_kit.NAME)


def opened(where: Path) -> Opened:
    root = Root.open(where)
    return Opened(root, choose(root).name)


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(state.items()))


def fill(template: Any) -> Any:
    """The same places, with nothing in them."""
    if isinstance(template, torch.Tensor):
        return torch.zeros_like(template)
    if isinstance(template, dict):
        return type(template)((key, fill(item)) for key, item in template.items())
    if isinstance(template, list) and template and isinstance(template[0], dict):
        return [fill(item) for item in template]
    return None


# --- each format, read by the tools that it is for


@pytest.mark.parametrize("ranks", [1, 3])
def test_dcp_reads_it(tmp_path: Path, ranks: int) -> None:
    state = tracked()
    done = export(session(tmp_path / "root", state, ranks), tmp_path / "out", "dcp")
    got = fill(state)
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert alike(got, state)
    assert set(done.files) == {".metadata", "__0_0.distcp"}
    assert done.size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert "optimizer.state.0.exp_avg" in done.keys
    assert (done.checkpoint, done.step, done.left_out, done.changed) == (str(loading_kit.NAME), 20, (), ())


def test_dcp_reads_a_large_one_that_was_written_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_formats, "_ONE_FILE", 100)
    state = tracked()
    done = export(session(tmp_path / "root", state), tmp_path / "out", "dcp")
    got = fill(state)
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert alike(got, state)
    assert len(done.files) == len(done.keys) + 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_safetensors_have_the_models_own_keys(tmp_path: Path, ranks: int) -> None:
    state = tracked()
    done = export(session(tmp_path / "root", state, ranks), tmp_path / "out", "safetensors", what="tracked/model")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert alike(in_order(load_file(tmp_path / "out" / "model.safetensors")), in_order(state["model"]))
    nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).load_state_dict(
        load_file(tmp_path / "out" / "model.safetensors")
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (set(done.keys), done.left_out) == (set(state["model"]), ())


def test_safetensors_of_all_that_is_tracked_leave_out_what_is_no_tensor(tmp_path: Path) -> None:
    state = tracked()
    done = export(session(tmp_path / "root", state), tmp_path / "all.safetensors", "safetensors")
    held = load_file(tmp_path / "all.safetensors")
    assert set(held) == set(done.keys)
    assert alike(held["optimizer.state.2.exp_avg"], state["optimizer"]["state"][2]["exp_avg"])
    assert {"sampler.seed", "sampler.at", "optimizer.param_groups.0.lr"} <= set(done.left_out)
    assert not set(done.left_out) & set(held)


def test_large_safetensors_are_several_files_with_an_index(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((100,), float(number)) for number in range(7)} | {"big": torch.ones(500)}
    done = export(session(tmp_path / "root", state), tmp_path / "out", "safetensors", shard=900)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4_800}
    assert len(set(index["weight_map"].values())) == 5
    held = {key: load_file(tmp_path / "out" / name)[key] for key, name in index["weight_map"].items()}
    assert alike(held, state)
    assert len(done.files) == 6
    for name in set(index["weight_map"].values()):
        assert set(load_file(tmp_path / "out" / name)) == {k for k, n in index["weight_map"].items() if n == name}


def test_torch_reads_it_with_weights_only(tmp_path: Path) -> None:
    state = tracked() | {
        "kinds": {
            "deque": deque([1, 2], 5),
            "frozen": frozenset({1}),
            "default": defaultdict(list, a=[1]),
            "array": np.arange(3, dtype=np.uint32),
            "texts": np.array(["a", "bc"]),
            "number": np.float32(2.5),
            "day": np.datetime64("2026-01-31"),
            "counter": Counter("aab"),
            "set": {1, 2},
            "size": torch.Size([1, 2]),
            "dtype": torch.bfloat16,
            "bytes": b"x",
            "wave": 1j,
            "large": 2**80,
            "half": torch.ones(3).to(torch.float8_e5m2),
        }
    }
    done = export(session(tmp_path / "root", state), tmp_path / "out.pt", "torch")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    simpler = {
        "deque": [1, 2],
        "frozen": {1},
        "default": {"a": [1]},
        "array": torch.tensor([0, 1, 2], dtype=torch.uint32),
        "texts": ["a", "bc"],
        "number": 2.5,
        "day": "2026-01-31",
    }
    assert alike(got, state | {"kinds": state["kinds"] | simpler})
    assert isinstance(got["model"], OrderedDict)
    assert got["model"]._metadata == state["model"]._metadata
    assert set(done.changed) == {f"kinds.{name}" for name in simpler}
    assert (done.files, done.size) == (("out.pt",), (tmp_path / "out.pt").stat().st_size)
    nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).load_state_dict(got["model"])


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_what_dcp_stored_is_exported_too(tmp_path: Path, to: Any) -> None:
    model, _ = trained()
    writer = ftrun.dcp.Writer(tmp_path / "root")
    dcp.save({"model": model.state_dict(), "n": 3}, storage_writer=writer, no_dist=True)
    done = export(opened(tmp_path / "root"), tmp_path / "out", to, what="model")
    assert list(done.keys) == list(model.state_dict())
    wanted = dict(model.state_dict())
    if to == "torch":
        assert alike(torch.load(tmp_path / "out", weights_only=True), wanted)
    elif to == "safetensors":
        assert alike(in_order(load_file(tmp_path / "out" / "model.safetensors")), in_order(wanted))
    else:
        got = fill(wanted)
        dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
        assert alike(got, wanted)


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_tensors_that_share_memory_come_out_whole(tmp_path: Path, to: Any) -> None:
    flat = torch.arange(24.0)
    state = {"flat": flat, "part": flat[4:10].view(2, 3), "tied": flat, "turned": flat.view(4, 6).T}
    export(session(tmp_path / "root", state), tmp_path / "out", to)
    if to == "torch":
        got = torch.load(tmp_path / "out", weights_only=True)
        assert got["part"].untyped_storage().data_ptr() == got["tied"].untyped_storage().data_ptr()
    elif to == "safetensors":
        got = load_file(tmp_path / "out" / "model.safetensors")
    else:
        got = {key: torch.zeros(value.shape) for key, value in state.items()}
        dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert alike(dict(got), state)


def test_many_small_tensors_are_read_in_batches(tmp_path: Path) -> None:
    state = {f"t{number:03}": torch.full((10,), float(number)) for number in range(50)}
    source = session(tmp_path / "root", state)
    nodes = source.tree["tracked"]
    ahead = export_formats.Ahead(source, nodes, list(nodes), limit=400)
    taken = {key: ahead.take(key) for key in [*reversed(nodes), "t003"]}  # also in an order that nobody expected
    assert alike({key: taken[key] for key in nodes}, state)


# --- whole or not at all


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_damage_leaves_nothing_behind(tmp_path: Path, to: Any) -> None:
    source = session(tmp_path / "root", tracked())
    (tmp_path / "exports").mkdir()
    loading_kit.flip(loading_kit.path_of(Root.open(tmp_path / "root"), "r00000.0.safetensors"))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        export(source, tmp_path / "exports" / "out", to)
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_nothing_is_overwritten_unless_asked(tmp_path: Path, to: Any) -> None:
    out = tmp_path / "exports" / "out"
    export(session(tmp_path / "one", {"x": torch.zeros(3), "gone": torch.zeros(2)}), out, to)
    other = session(tmp_path / "two", {"x": torch.ones(3)})
    before = {path: path.read_bytes() for path in (out.rglob("*") if out.is_dir() else [out])}
    with pytest.raises(UsageError, match=r"exists.*--force"):
        export(other, out, to)
    assert {path: path.read_bytes() for path in before} == before
    done = export(other, out, to, force=True)
    assert done.keys == ("x",)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    after = [path.read_bytes() for path in (out.rglob("*") if out.is_dir() else [out])]
    assert not any(b"gone" in content for content in after)


def test_force_replaces_exports_only(tmp_path: Path) -> None:
    source = session(tmp_path / "root", {"x": torch.zeros(3)})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for path in (tmp_path / "home", tmp_path / "link", tmp_path / "root"):
        with pytest.raises(UsageError, match="more than an export"):
            export(source, path, "dcp", force=True)
    for to in ("torch", "dcp", "safetensors"):
        with pytest.raises(UsageError, match="no file of an export"):
            export(source, tmp_path / "home" / "thesis.tex", to, force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "dear"
    assert load(tmp_path / "root")["tracked"]["x"].sum() == 0


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    source = session(tmp_path / "root", {"wave": torch.ones(2, dtype=torch.complex64), "n": 1, "none": {}})
    for what, to, message in (
        (None, "safetensors", "'wave' is complex64"),
        ("tracked/n", "safetensors", "no tensor to export"),
        ("tracked/none", "torch", "nothing in 'tracked/none'"),
        ("tracked/nope", "torch", "there is|in tracked is 'wave', 'n', 'none'"),
    ):
        with pytest.raises(UsageError, match=message):
            export(source, tmp_path / "out", to, what=what)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


# --- on the command line


def run(*words: object) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command("export")(export_command)
    result = CliRunner().invoke(app, [*map(str, words)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
def test_a_place_that_cannot_be_written_is_said_without_a_traceback(tmp_path: Path, to: str) -> None:
    session(tmp_path / "root", tracked())
    code, text, said = run(tmp_path / "root", "/proc/export", "--to", to)
    assert (code, text) == (1, "")
    assert said.startswith("ftrun: ")
    assert "/proc/" in said


FULL = """
import resource, sys
from ftrun.cli.app import app
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
for to in ("torch", "dcp", "safetensors"):
    try:
        app(["ckpt", "export", sys.argv[1], sys.argv[2], "--to", to])
    except SystemExit as left:
        assert left.code == 1
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_said_with_its_place_and_leaves_nothing(tmp_path: Path) -> None:
    session(tmp_path / "root", {"x": torch.ones(4000)})
    out = tmp_path / "out" / "it"
    words = [sys.executable, "-c", FULL, str(tmp_path / "root"), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done
    said = done.stderr.splitlines()
    assert len(said) == 3, done.stderr
    assert all(line.startswith("ftrun: [Errno 27] File too large: '") and str(out) in line for line in said), said
    assert os.listdir(out.parent) == []


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    session(tmp_path / "root", tracked())
    out = tmp_path / "out"
    code, text, _ = run(tmp_path / "root", out, "--to", "safetensors")
    assert code == 0
    assert f"{out}: " in text
    assert f"in 1 file, from {loading_kit.NAME} (step 20)" in text
    assert "left out, being no tensors: optimizer.param_groups.0.lr, " in text
    code, text, _ = run(tmp_path / "root", out, "--to", "torch", "--what", "tracked/model", "--force", "--json")
    document = json.loads(text)
    assert (code, document["format"], document["files"], document["step"]) == (0, "torch", ["out"], 20)
    assert document["keys"] == list(trained()[0].state_dict())
    assert document["size"] == out.stat().st_size


def test_the_command_finds_checkpoints_by_step_name_and_directory(tmp_path: Path) -> None:
    names = []
    for step in (5, 6):
        writer = ftrun.dcp.Writer(tmp_path / "root")
        state = {"x": torch.full((3,), float(step))}
        saved = dcp.save(state, checkpoint_id=str(step), storage_writer=writer, no_dist=True)
        names.append(saved.storage_meta.checkpoint_id)
    for number, (words, wanted) in enumerate(
        [
            ([tmp_path / "root"], 6),
            ([tmp_path / "root", "--step", 5], 5),
            ([tmp_path / "root", "--name", names[0]], 5),
            ([tmp_path / "root" / "ckpt" / names[0]], 5),
        ]
    ):
        where, *options = words
        assert run(where, tmp_path / f"{number}.pt", "--to", "torch", *options)[0] == 0
        assert torch.load(tmp_path / f"{number}.pt", weights_only=True)["x"][0] == wanted


def test_mistakes_on_the_command_line_are_told(tmp_path: Path) -> None:
    session(tmp_path / "root", {"x": torch.zeros(3)})
    (tmp_path / "file").write_text("")
    name = loading_kit.NAME
    for words, code, message in (
        ([tmp_path / "nowhere", tmp_path / "out", "--to", "dcp"], 2, "no checkpoint root"),
        ([tmp_path / "root", tmp_path / "out", "--to", "dcp", "--step", 4], 2, "no checkpoint of step 4"),
        ([tmp_path / "root", tmp_path / "out", "--to", "dcp", "--step", 4, "--name", name], 2, "give one of them"),
        ([tmp_path / "root", tmp_path / "file", "--to", "dcp"], 2, "exists"),
        ([tmp_path / "root", tmp_path / "file" / "out", "--to", "dcp"], 1, "Not a directory"),
        ([tmp_path / "root", tmp_path / "out", "--to", "onnx"], 2, "onnx"),
        ([tmp_path / "root", "s3://bucket/out", "--to", "dcp"], 2, "written to this machine"),
        ([tmp_path / "root", "", "--to", "dcp"], 2, "is no path"),
    ):
        found = run(*words)
        assert found[0] == code, found
        assert message in found[2], found
        assert "Traceback" not in found[2]
