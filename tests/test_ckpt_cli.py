"""``ftrun ckpt``: what it shows, what it verifies, and what it keeps and deletes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from storage_kit import write_attempt
from typer.testing import CliRunner

from ftrun.checkpoint import epochs, reader, retention
from ftrun.checkpoint.checksums import CHUNK
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root
from ftrun.checkpoint.retention import KeepPolicy
from ftrun.cli import ckpt_keep, ckpt_verify
from ftrun.cli.app import app
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def root(here: Path) -> Root:
    made = Root.open(here / "a root 100%")
    epochs.claim(made, "run", fresh=False, parent=None)
    return made


def ckpt(*words: object) -> Result:
    return CliRunner().invoke(app, ["ckpt", *map(str, words)])


def document(*words: object, code: int = 0) -> Any:
    result = ckpt(*words, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def path_of(root: Root, name: AttemptName, file: str) -> Path:
    return root.path / "ckpt" / str(name) / file


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# --- which root, which checkpoint ---------------------------------------------------------------------------


def test_a_checkpoint_is_named_in_many_ways(here: Path) -> None:
    run = RunDir(here / "runs" / "llama 7%")
    run.create({"run_id": "llama 7%", "checkpoint_root": str(run.checkpoints)})
    root = Root.open(run.checkpoints)
    old, new = write_attempt(root, 1), write_attempt(root, 2)
    for words in ([], ["llama 7%"], [run.path], [root.path], [root.url], [f"file://{root.path}"], [f"{root.path}/"]):
        assert document("show", *words)["name"] == str(new), words
        assert document("show", *words)["root"] == root.url
        if words:
            assert document("show", *words, old)["name"] == str(old)
    for words in ([old], [f"{root.path}/ckpt/{old}"], [f"{root.path}/ckpt/{old}/"], [f"file://{root.path}/ckpt/{old}"]):
        assert document("show", *words)["name"] == str(old), words


@pytest.mark.parametrize("command", ["show", "verify", "pin"])
def test_what_is_not_there_is_the_users_mistake(root: Root, command: str) -> None:
    write_attempt(root, 1, commit=False)
    for words, said in (
        (["nowhere"], "is no run in"),
        ([root.path], "no checkpoint that can be used"),
        ([root.path, "e00000001-s0000000009-00000000"], "has no checkpoint e00000001-s0000000009-00000000"),
        ([root.path, "../../secret"], "is no name of a checkpoint"),
        (["nonsense://x"], "Protocol not known"),
        (["memory://" + uuid.uuid4().hex], "no checkpoint that can be used"),
    ):
        result = ckpt(command, *words)
        assert result.exit_code == 2, result.output
        assert said in result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.output


def test_verify_takes_all_or_one(root: Root) -> None:
    name = write_attempt(root, 1)
    result = ckpt("verify", root.path, name, "--all")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--all means all checkpoints of the root, and {name} one" in result.stderr


def test_a_url(here: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/x y"
    root = Root.open(url)
    epochs.claim(root, "run", fresh=False, parent=None)
    names = [write_attempt(root, step) for step in (1, 2, 3)]
    assert [row["step"] for row in document("ls", url)["checkpoints"]] == [3, 2, 1]
    assert document("show", url)["root"] == url
    assert document("show", f"{url}/ckpt/{names[0]}")["name"] == str(names[0])
    assert document("verify", url, "--all")["checkpoints"][2]["whole"]
    assert document("prune", url, "--keep", 2)["deleted"] == [str(names[0])]
    assert root.attempts() == [names[2], names[1]]


def test_none_of_it_imports_torch(root: Root) -> None:
    name = write_attempt(root, 1)
    code = "import sys\nfrom ftrun.cli.app import app\n"
    for words in (["ls"], ["show"], ["verify"], ["pin"], ["unpin", str(name)], ["prune", "--dry-run"]):
        arguments = ["ckpt", words[0], str(root.path), *words[1:]]
        code += f"try: app({arguments!r})\nexcept SystemExit as left: assert not left.code\n"
    code += "assert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(name)) == 5


# --- show ---------------------------------------------------------------------------------------------------


def test_show(root: Root) -> None:
    parent = write_attempt(root, 3)
    name = write_attempt(root, 7, parent=str(parent))
    root.pin(name)
    shown = document("show", root.path)
    assert (shown["name"], shown["status"], shown["pinned"], shown["reason"]) == (str(name), "committed", True, "")
    assert (shown["manifest"]["step"], shown["manifest"]["parent"]) == (7, str(parent))
    assert "files" not in shown["manifest"]
    assert [each["rank"] for each in shown["ranks"]] == [0, 1]
    assert set(shown["ranks"][1]["files"]) == {"r00001.json", "r00001.0.safetensors"}
    assert (shown["tensors"]["count"], shown["tensors"]["bytes"]) == (1, 1000)
    assert shown["tensors"]["list"] == [{"name": "model/w", "dtype": "float32", "shape": [250], "ranks": "0-1"}]
    text = ckpt("show", root.path).stdout
    for part in (str(name), "committed, pinned", "step        7 of 100", "2 on 2 nodes", "model/w", str(parent)):
        assert part in text
    assert document("show", root.path, "--rank", 1)["tensors"]["rank"] == 1
    assert "no rank 2" in ckpt("show", root.path, "--rank", 2).stderr


def test_show_of_what_is_damaged(root: Root) -> None:
    name = write_attempt(root, 7)
    flip(path_of(root, name, "r00000.json"), 5)
    shown = document("show", root.path)
    assert "ftrun ckpt verify" in shown["tensors"]["problem"]
    assert "not known" in ckpt("show", root.path).stdout
    path_of(root, name, MANIFEST).write_bytes(b"{torn")
    shown = document("show", root.path, name)
    assert (shown["status"], shown["manifest"]) == ("invalid", None)
    assert "torn" in ckpt("show", root.path, name).stdout


# --- verify -------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_is_verified(root: Root) -> None:
    name = write_attempt(root, 7, payload=CHUNK + 1000)
    (verdict,) = document("verify", root.path)["checkpoints"]
    assert (verdict["name"], verdict["whole"], verdict["damages"]) == (str(name), True, [])
    assert verdict["size"] > 2 * CHUNK
    assert "whole: 33.6 MB read" in ckpt("verify", root.path).stdout


def test_damage_is_named_with_file_chunk_and_bytes(root: Root) -> None:
    name = write_attempt(root, 7, payload=CHUNK + 1000)
    flip(path_of(root, name, "r00000.0.safetensors"), 20)
    flip(path_of(root, name, "r00000.0.safetensors"), CHUNK + 1)
    flip(path_of(root, name, "r00001.0.safetensors"), CHUNK - 1)
    (verdict,) = document("verify", root.path, code=1)["checkpoints"]
    assert not verdict["whole"]
    assert [(each["file"], each["chunk"], each["first"], each["last"]) for each in verdict["damages"]] == [
        ("r00000.0.safetensors", 0, 0, CHUNK - 1),
        ("r00000.0.safetensors", 1, CHUNK, CHUNK + 999),
        ("r00001.0.safetensors", 0, 0, CHUNK - 1),
    ]
    result = ckpt("verify", root.path)
    assert result.exit_code == 1
    assert "r00000.0.safetensors chunk 1 (bytes 16777216 to 16778215) fails its checksum" in result.stdout
    assert reader.inspect(root, name).status == "committed", "nothing is marked unasked"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("file", ["r00000.0.safetensors", "r00001.json", MANIFEST])
@pytest.mark.parametrize(
    "damage", [truncated, lengthened, lambda path: flip(path, 9), lambda path: path.write_bytes(b"")]
)
def test_any_damage_to_any_file_is_found(root: Root, file: str, damage: Any) -> None:
    sound, name = write_attempt(root, 6), write_attempt(root, 7)
    damage(path_of(root, name, file))
    (verdict,) = document("verify", root.path, name, code=1)["checkpoints"]
    assert [each["file"] for each in verdict["damages"]] == [file]
    verdicts = document("verify", root.path, "--all", code=1)["checkpoints"]
    assert [(each["name"], each["whole"]) for each in verdicts] == [(str(name), False), (str(sound), True)]


def test_a_missing_file_and_another_ones_manifest(root: Root) -> None:
    name, other = write_attempt(root, 7), write_attempt(root, 8)
    path_of(root, name, "r00001.json").unlink()
    (damage,) = document("verify", root.path, name, code=1)["checkpoints"][0]["damages"]
    assert (damage["file"], damage["problem"]) == ("r00001.json", "is missing")
    path_of(root, other, MANIFEST).write_bytes(path_of(root, write_attempt(root, 9), MANIFEST).read_bytes())
    (verdict,) = document("verify", root.path, other, code=1)["checkpoints"]
    assert any(each["file"] == MANIFEST or "checksum" in each["problem"] for each in verdict["damages"])


def test_a_save_that_goes_on_is_not_called_damaged_and_never_marked(root: Root) -> None:
    name = write_attempt(root, 7, commit=False)
    result = ckpt("verify", root.path, name, "--mark-bad")
    assert (result.exit_code, "NOT COMMITTED" in result.output) == (1, True)
    assert root.bad() == []
    (verdict,) = document("verify", root.path, name, code=1)["checkpoints"]
    assert (verdict["status"], verdict["whole"], verdict["marked"]) == ("uncommitted", False, False)


def test_what_is_deleted_while_it_is_read_is_not_called_damaged(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write_attempt(root, 1), write_attempt(root, 2)
    found = reader.inspect(root, old)
    retention.delete(root, found)
    verdict = ckpt_verify.examine(root, found, mark_bad=True)
    assert (verdict.deleted, verdict.damages, verdict.whole) == (True, [], False)
    assert root.bad() == []
    # In a survey of all that is no fault; asked for by its name, it is not there to be called whole.
    infos = [reader.inspect(root, new), found]
    monkeypatch.setattr(ckpt_verify, "_chosen", lambda place, *, everything: infos)
    assert "deleted while it was read" in ckpt("verify", root.path, "--all").output
    assert [row["deleted"] for row in document("verify", root.path, "--all")["checkpoints"]] == [False, True]
    assert ckpt("verify", root.path).exit_code == 1


def test_a_damaged_one_is_marked_on_request_and_not_chosen_again(root: Root) -> None:
    sound, name = write_attempt(root, 6), write_attempt(root, 7)
    flip(path_of(root, name, "r00001.0.safetensors"), 3)
    assert not document("verify", root.path, sound, "--mark-bad")["checkpoints"][0]["marked"]
    assert document("verify", root.path, name, "--mark-bad", code=1)["checkpoints"][0]["marked"]
    choice = reader.latest(root, "run")
    assert choice.commit is not None
    assert choice.commit.name == sound
    assert choice.skipped[0][1].startswith("is marked as bad: r00001.0.safetensors chunk 0")


# --- pin, unpin, prune --------------------------------------------------------------------------------------


def test_pins_are_kept_and_shown(root: Root) -> None:
    names = [write_attempt(root, step) for step in range(1, 6)]
    assert document("pin", root.path, names[0], "--reason", "best so far")["pinned"] is True
    assert [row["pinned"] for row in document("ls", root.path)["checkpoints"]] == [False] * 4 + [True]
    assert "pinned" in ckpt("ls", root.path).stdout.splitlines()[-1]
    assert document("prune", root.path, "--keep", 2)["deleted"] == [str(names[1]), str(names[2])]
    assert document("unpin", root.path, names[0])["pinned"] is False
    result = ckpt("unpin", root.path, names[0])
    assert result.exit_code == 2
    assert "none" in result.stderr
    assert document("prune", root.path, "--keep", 2)["deleted"] == [str(names[0])]


def test_only_what_is_whole_can_be_pinned(root: Root) -> None:
    name = write_attempt(root, 1, commit=False)
    result = ckpt("pin", root.path, name)
    assert result.exit_code == 2
    assert "is uncommitted" in result.stderr
    assert root.pins() == []


def test_a_dry_run_says_what_pruning_does(root: Root) -> None:
    names = [write_attempt(root, step) for step in range(1, 6)]
    dry = document("prune", root.path, "--keep", 2, "--every", 2, "--dry-run")
    assert (dry["dry_run"], dry["deleted"]) == (True, [str(names[2])])
    assert len(root.attempts()) == 5
    assert dry["freed"] > 2000
    assert f"would delete {names[2]}" in ckpt("prune", root.path, "--keep", 2, "--every", 2, "--dry-run").stdout
    real = document("prune", root.path, "--keep", 2, "--every", 2)
    assert real == dry | {"dry_run": False}
    assert root.attempts() == [names[4], names[3], names[1], names[0]]


def test_the_last_two_and_the_parent_always_stay(root: Root) -> None:
    names = [write_attempt(root, step) for step in range(1, 6)]
    epochs.claim(root, "run", fresh=False, parent=str(names[1]))
    for wrong in (["--keep", 1], ["--keep", 0], ["--keep", -3], ["--every", 0]):
        assert ckpt("prune", root.path, *wrong).exit_code == 2
    assert len(root.attempts()) == 5
    document("prune", root.path, "--keep", 2)
    assert root.attempts() == [names[4], names[3], names[1]]


def test_whoever_prunes_at_the_same_time_is_no_reason_to_fail(root: Root) -> None:
    names = [write_attempt(root, step) for step in range(1, 6)]
    planned = ckpt_keep.plan(root, KeepPolicy(2, None))
    assert [info.name for info in planned.deleted] == names[:3]
    for name in names[:2]:  # a keeper, or another `ftrun ckpt prune`
        shutil.rmtree(root.path / "ckpt" / str(name))
    ckpt_keep.execute(root, planned)
    assert root.attempts() == names[:2:-1]


def test_other_runs_and_lineages_are_not_pruned(root: Root) -> None:
    foreign = [write_attempt(root, step, run_id="other", suffix="0000000f") for step in range(1, 5)]
    before = [write_attempt(root, step) for step in range(1, 5)]
    epochs.claim(root, "run", fresh=True, parent=None)
    mine = [write_attempt(root, step, epoch=2) for step in range(1, 5)]
    assert document("prune", root.path, "--keep", 2)["deleted"] == [str(name) for name in mine[:2]]
    assert set(root.attempts()) == {*foreign, *before, *mine[2:]}


def test_a_root_of_nobody_is_not_pruned(root: Root) -> None:
    names = [write_attempt(root, step) for step in range(1, 6)]
    (root.path / "epochs" / "00000001.json").write_bytes(b"")
    result = ckpt("prune", root.path, "--keep", 2)
    assert result.exit_code == 2
    assert "no readable record in epochs/" in result.stderr
    assert len(root.attempts()) == len(names)


def test_a_root_that_cannot_be_written_is_told_of(root: Root) -> None:
    name = write_attempt(root, 1)
    (root.path / "pins").write_text("a file")
    result = ckpt("pin", root.path, name)
    assert result.exit_code == 1
    assert "pins" in result.stderr
    assert "Traceback" not in result.output
