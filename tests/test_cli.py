"""The command line as a user meets it: quick, helpful, and saying what to type next."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ftrun import __version__, events, rundir
from ftrun.__main__ import NOT_A_RUN
from ftrun.checkpoint import epochs
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.keeper.takeover import locked
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.memory.tier import Tier
from ftrun.cli import status_root
from ftrun.cli.app import app
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(status_root, "_SECONDS", 60.0)  # no root is away here, but any machine may be slow


def ftrun(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def a_run(name: str, *happened: tuple[float, events.Event], root: str | None = None) -> RunDir:
    run = RunDir(Path("runs") / name)
    run.create({"run_id": name, "checkpoint_root": root or str(run.checkpoints)})
    with run.events().open("ab") as file:
        for at, event in happened:
            file.write(events.encode(event, at, 1, None))
    return run


START = time.time() - 100
TRAINED = (
    (START, events.RunStarted("llama", ["ftrun"], 1, "host", 2, False, {})),
    (START + 2, events.AttemptStarted(1, 2, None, 0, {})),
    (START + 5, events.StepsBegan(0, 2000)),
    (START + 6, events.Step(1, {"loss": 5.0})),
    (START + 16, events.Step(1001, {"loss": 2.5})),
    (START + 17, events.Committed(1000, "e00000001-s0000001000-0badf00d", 0.5, 10)),
    (START + 20, events.Failed("killed", 1, -9, "rank 1 was ended by SIGKILL", 1200, 200, "restart 1 of 3", True)),
    (START + 23, events.AttemptStarted(2, 2, "e1", 1000, {})),
    (START + 24, events.StepsBegan(1000, 2000)),
    (START + 25, events.Step(1001, {"loss": 2.4})),
)
FINISHED = (
    *TRAINED,
    (START + 40, events.Step(2000, {"loss": 1.25})),
    (START + 41, events.StepsEnded(2000, True)),
    (START + 42, events.RunEnded("finished", 0)),
)


# --- nothing imports torch that doesn't need it


def test_help_and_reading_commands_import_no_torch() -> None:
    a_run("llama", *FINISHED)
    Path("job.yaml").write_text("script: train.py\n")
    commands = [
        ["--help"],
        ["--version"],
        ["status"],
        ["status", "--json"],
        ["status", "--help"],
        ["ckpt", "ls"],
        ["ckpt", "--help"],
        ["config", "--help"],
        ["config", "schema"],
        ["statu"],
        [],
    ]
    text = (
        "import json, sys\n"
        "from ftrun.__main__ import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['ftrun', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as left: print('code', left.code)\n"
        "    found = {name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'safetensors'}\n"
        "    assert not found, (arguments, found)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^code (\w+)$", done.stdout, re.MULTILINE)
    assert codes == ["0"] * 9 + ["2", codes[-1]]


def test_as_a_program() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ftrun", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "ftrun -c job.yaml" in done.stdout
    assert "ftrun.cli.app" in done.stderr
    assert not re.search(r"\| +(torch|numpy)\b", done.stderr)


# --- the default command


def test_commands_that_start_no_workers_are_known_before_the_command_line_is_read() -> None:
    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert commands == {"run", *(word for word in NOT_A_RUN if not word.startswith("-"))}


def test_help_names_the_commands() -> None:
    result = ftrun("--help")
    assert result.exit_code == 0
    for word in ("run", "status", "ckpt", "config", "--version", "ftrun --nproc 2 train.py", "76 gave up"):
        assert word in result.stdout
    assert "--help" in ftrun("status", "--help").stdout


def test_version() -> None:
    result = ftrun("--version")
    assert (result.exit_code, result.stdout) == (0, f"ftrun {__version__}\n")


@pytest.mark.parametrize(
    ("word", "meant"), [("statu", "status"), ("stauts", "status"), ("ckpts", "ckpt"), ("runn", "run")]
)
def test_a_misspelt_command_is_not_taken_for_a_script(word: str, meant: str) -> None:
    result = ftrun(word)
    assert result.exit_code == 2
    assert f"there is no command {word!r}; did you mean `ftrun {meant}`?" in result.stderr
    assert f"ftrun run {word}" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("status.py", "there is no script status.py"),
        ("./statu", "there is no script ./statu"),
        ("--nproc 2 train.py", "there is no script train.py"),
        ("run --nproc 2 train.py", "there is no script train.py"),
        ("run statu", "there is no script statu"),
        ("train", "there is no script train"),
        ("--nprocs 2 train.py", "unknown option --nprocs; did you mean --nproc?"),
        ("-c job.yaml", "job.yaml"),
        ("--nproc 2", "no training script on the command line"),
    ],
)
def test_everything_else_is_for_run(line: str, said: str) -> None:
    result = ftrun(*line.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert all(text.startswith("ftrun") for text in result.stderr.splitlines())
    assert result.stdout == ""
    assert list(Path().iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["{}.py", "--set checkpoint.root=/tmp/{} train.py", "status {}", "ckpt ls {}", "cache ls --root {}"]
)
def test_a_name_that_no_file_can_have(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "ftrun", *line.format("a" * 300).split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"ftrun: \S+: no file can have so long a name; give a shorter one\n", ended.stderr)
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_is_called_like_a_misspelt_command() -> None:
    Path("statu").write_text("")
    assert ftrun("--dry-run", "statu").exit_code == 0
    Path("ckpts").mkdir()
    assert "ckpts is a directory without" in ftrun("ckpts").stderr


def test_help_of_run_is_torchs_with_ours() -> None:
    result = ftrun("run", "--help")
    assert result.exit_code == 0
    assert "--rdzv-backend" in result.stdout
    assert "--fresh" in result.stdout


# --- a dry run


def test_a_dry_run_shows_the_plan_and_writes_nothing() -> None:
    Path("train.py").write_text("raise SystemExit('it ran')")
    Path("job.yaml").write_text("name: llama\nscript: train.py\nlaunch: {nnodes: 1:1}\nrestart: {no_progress: 5}\n")
    before = sorted(Path().rglob("*"))
    result = ftrun("--dry-run", "-c", "job.yaml", "--nproc", "2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "script      train.py" in lines
    assert f"run         llama (fresh) in {Path.cwd()}/runs/llama" in lines
    assert "resume      nothing: a fresh start" in lines
    assert "launch.nproc_per_node = 2   (command line)" in lines
    assert "launch.nnodes = 1:1   (job.yaml:3)" in lines
    assert "restart.no_progress = 5   (job.yaml:4)" in lines
    assert sorted(Path().rglob("*")) == before


def test_a_dry_run_as_json() -> None:
    Path("train.py").write_text("")
    result = ftrun("--dry-run", "--json", "--name", "llama", "train.py", "--lr", "3")
    document = json.loads(result.stdout)
    assert (document["run_id"], document["script_args"]) == ("llama", ["--lr", "3"])
    assert sorted(item.name for item in Path().iterdir()) == ["train.py"]


# --- status


def test_no_runs() -> None:
    for command in (["status"], ["status", "--json"], ["ckpt", "ls"]):
        result = ftrun(*command)
        assert result.exit_code == 2
        assert result.stderr.startswith("ftrun: no runs in ")
        assert "Start one with" in result.stderr
        assert result.stdout == ""


def test_an_unknown_run() -> None:
    a_run("llama")
    result = ftrun("status", "lama")
    assert result.exit_code == 2
    assert "no run 'lama'" in result.stderr
    assert "'nothing' is no run" in ftrun("ckpt", "ls", "nothing").stderr


def status(*arguments: str) -> dict[str, Any]:
    result = ftrun("status", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert sum(document["seconds"].values()) == pytest.approx(document["wall_seconds"])
    return document


def test_status_of_a_finished_run() -> None:
    run = a_run("llama", *FINISHED)
    document = status()
    assert (document["schema_version"], document["run"], document["run_dir"]) == (1, "llama", str(run.path))
    assert (document["state"], document["exit_code"], document["pid"]) == ("finished", 0, None)
    assert (document["step"], document["total"], document["loss"]) == (2000, 2000, 1.25)
    assert (document["restarts"], document["lost_steps"], document["world_size"]) == (1, 200, 2)
    assert (document["commits"], document["last_commit"]) == (1, None)  # the events tell of one that isn't there
    (failure,) = document["failures"]
    assert (failure["rank"], failure["cause"], failure["seconds_to_training"]) == (1, "killed", pytest.approx(5))
    assert document["wall_seconds"] == pytest.approx(42)
    assert (document["seconds_left"], document["failed_saves"]) == (None, 0)
    text = ftrun("status", "llama").stdout
    for part in (
        "llama   finished",
        "2,000 of 2,000",
        "1.25",
        "none that can be used, of 1",
        "1   200 steps done again",
        "ended by SIGKILL",
    ):
        assert part in text


def test_status_of_a_live_a_dead_and_a_new_run() -> None:
    a_run("llama", *TRAINED)
    with rundir.locked(Path("runs/llama").absolute(), shared_by_nodes=False):
        alive = status("llama")
        assert (alive["state"], alive["pid"]) == ("running", 1)
        assert alive["wall_seconds"] == pytest.approx(time.time() - START, abs=30)  # up to now
        assert "running" in ftrun("status", "llama").stdout
    dead = status("llama")
    assert (dead["state"], dead["pid"], dead["exit_code"]) == ("dead", None, None)
    assert dead["wall_seconds"] == pytest.approx(25)
    assert "The same command continues from the last commit" in ftrun("status", "llama").stdout
    a_run("idle")
    new = status("idle")
    assert (new["state"], new["step"], new["total"], new["loss"], new["goodput"]) == ("new", 0, None, None, 0.0)
    assert "commit     none" in ftrun("status", "idle").stdout


@pytest.fixture
def tier() -> Iterator[Tier]:
    """The memory tier of a run llama that trains."""
    made = Tier.of(a_run("llama", *TRAINED).path, 0)
    made.create()
    yield made
    made.remove()


def drain(tier: Tier, waiting: str = "", stage: str = "root", queued: int = 0) -> str:
    """What status says of the keeper while it shows this."""
    Progress("e00000001-s0000000030-2e1981c4", 30, stage, 25, 100, 2e6, 4.0, waiting, queued).write(tier)
    (line,) = [each for each in ftrun("status", "llama").stdout.splitlines() if "draining" in each]
    return str(line).strip()


def test_status_says_what_the_keeper_is_at(tier: Tier) -> None:
    assert status("llama")["draining"] is None
    assert "draining" not in ftrun("status", "llama").stdout
    with locked(tier.path / "keeper.lock", 1.0):
        assert drain(tier) == "draining   step 30 to the checkpoint root, 25% of 100 B   2.0 MB/s   4 s left"
        shown = status("llama")["draining"]
        assert (shown["step"], shown["bytes_done"], shown["bytes_total"], shown["keeper_alive"]) == (30, 25, 100, True)
        away = drain(tier, "No space left on device", queued=1)
        assert away.endswith("25% of 100 B   waits: No space left on device   1 more behind it")
        assert drain(tier, stage="commit") == "draining   step 30 being committed"
    left = drain(tier)
    assert "no keeper writes it; the same command takes it up from memory" in left
    assert status("llama")["draining"]["keeper_alive"] is False


def test_status_finds_the_latest_run_and_any_directory() -> None:
    a_run("llama", *TRAINED)
    run = a_run("train/20260101-000000", *FINISHED)
    assert status()["run_dir"] == str(run.path)
    assert status("train/20260101-000000")["run_dir"] == str(run.path)
    assert status("runs/llama")["run_dir"] == str(Path("runs/llama").absolute())
    assert status(str(run.path))["run_dir"] == str(run.path)


# --- ckpt ls


def test_checkpoints_are_listed() -> None:
    from test_checkpoint_reader import save

    run = a_run("llama", *TRAINED)
    assert f"no checkpoints in {run.checkpoints}" in ftrun("ckpt", "ls", "llama").stdout
    root = Root.open(run.checkpoints)
    old = epochs.claim(root, "llama", fresh=False, parent=None).epoch
    early = save(root, 10, epoch=old, run_id="llama")
    new = epochs.claim(root, "llama", fresh=True, parent=None).epoch
    names = [save(root, step, epoch=new, run_id="llama") for step in (20, 30)]
    (root.path / "ckpt" / str(names[1]) / "MANIFEST.json").write_text("{torn")
    for where in ("llama", str(run.path), str(root.path), ""):
        result = ftrun("ckpt", "ls", "--json", *([where] if where else []))
        document = json.loads(result.stdout)
        assert document["root"] == str(root.path)
        rows = {row["name"]: row for row in document["checkpoints"]}
        assert [row["step"] for row in document["checkpoints"]] == [30, 20, 10]
        assert rows[str(names[0])]["status"] == "committed"
        assert (rows[str(names[0])]["world_size"], rows[str(names[0])]["taken_for"]) == (1, "interval")
        assert rows[str(names[0])]["size"] > 400
        assert rows[str(names[1])]["status"] not in ("committed", "earlier run")
        assert rows[str(names[1])]["reason"]
        assert rows[str(early)]["status"] == "earlier run"
    table = ftrun("ckpt", "ls", "llama").stdout.splitlines()
    assert len(table) == 4
    assert str(names[0]) in table[2]
    assert "before the last --fresh" in table[3]
