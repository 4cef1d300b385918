"""What a command line, variables and a job file come to, before anything is started or written."""

from __future__ import annotations

import json
import os
import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftrun import events, rundir
from ftrun.checkpoint import epochs
from ftrun.checkpoint.layout import Root
from ftrun.cli import run
from ftrun.config.units import Window
from ftrun.contract import Every, Fault
from ftrun.errors import ConfigError, RunDirError, UsageError
from ftrun.launch import execute as executing
from ftrun.launch import plan
from ftrun.launch.options import LaunchParser
from ftrun.launch.standbys.standby import Standbys
from ftrun.rundir import RUNS, RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.launch.plan import LaunchPlan


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in directory.rglob("*")
    }


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchPlan]:
    """Makes a plan from a command line, and sees that nothing was written, whatever came of it."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)

    def made(line: str, job: str | None = None, **variables: str) -> LaunchPlan:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if job is not None:
            Path("job.yaml").write_text(job)
            line = f"-c job.yaml {line}"
        before = listing(tmp_path)
        try:
            parser = LaunchParser()
            return plan.make(parser.parse(shlex.split(line)), parser, os.environ, cwd=tmp_path)
        finally:
            assert listing(tmp_path) == before

    (tmp_path / "train.py").write_text("")
    return made


def refusal(make: Callable[..., LaunchPlan], line: str, job: str | None = None, **variables: str) -> str:
    with pytest.raises(UsageError) as caught:
        make(line, job, **variables)
    return str(caught.value)


def a_run(tmp_path: Path, name: str, *, run_id: str | None = None, outcome: str | None = None) -> RunDir:
    run_dir = RunDir(tmp_path / name)
    run_dir.create({"run_id": run_id or name.removeprefix(f"{RUNS}/")})
    log = events.EventLog(run_dir.events())
    log.write(events.RunStarted(run_id or name, ["ftrun"], 1, "host", 1, False, {}))
    if outcome is not None:
        log.write(events.RunEnded(outcome, 0))
    return run_dir


# --- precedence


JOB = "name: job\nscript: train.py\nlaunch:\n  nnodes: 1:4\n  max_restarts: 1\n  rdzv_id: 0123\n"


@pytest.mark.parametrize(
    ("line", "variables", "value", "origin"),
    [
        ("", {}, "1:4", "job.yaml:4"),
        ("", {"PET_NNODES": "5"}, "5", "environment PET_NNODES"),
        ("--set launch.nnodes=6", {"PET_NNODES": "5"}, "6", "--set"),
        ("--nnodes 7 --set launch.nnodes=6", {"PET_NNODES": "5"}, "7", "command line"),
        ("--nnodes 7", {}, "7", "command line"),
        ("--nnodes 1:1", {"PET_NNODES": "5"}, "1:1", "command line"),  # given, though it is the default
    ],
)
def test_the_command_line_wins_then_set_then_the_environment_then_the_job(
    make: Callable[..., LaunchPlan], line: str, variables: dict[str, str], value: str, origin: str
) -> None:
    made = make(line, JOB, **variables)
    assert (made.launch["nnodes"].value, made.launch["nnodes"].origin) == (value, origin)
    assert made.namespace.nnodes == value
    assert (made.launch["rdzv_id"].value, made.launch["rdzv_id"].origin) == ("0123", "job.yaml:6")
    assert (made.launch["role"].value, made.launch["role"].origin) == ("default", "default")
    assert (made.launch["max_restarts"].value, made.launch["max_restarts"].origin) == (1, "job.yaml:5")


def test_a_range_of_nodes_stays_text_and_is_shared_by_nodes(make: Callable[..., LaunchPlan]) -> None:
    made = make("", JOB)
    assert made.namespace.nnodes == "1:4"
    assert made.shared_by_nodes
    assert not make("train.py").shared_by_nodes
    assert not make("--nnodes 1 train.py").shared_by_nodes
    assert make("--nnodes 2 train.py").shared_by_nodes


def test_the_namespace_is_what_torchs_own_parser_makes(make: Callable[..., LaunchPlan]) -> None:
    from torch.distributed.run import get_args_parser

    argv = ["--nproc-per-node", "2", "--max-restarts", "3", "--standalone", "-r", "3", "train.py", "--lr", "3e-4"]
    assert vars(make(shlex.join(argv)).namespace) == vars(get_args_parser().parse_args(argv))


def test_settings_reach_limits_and_contract(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    job = (
        "name: j\nscript: train.py\nargs: [--lr, 3e-4]\ncheckpoint: {every: 5 steps, keep: {last: 4}}\n"
        "restart: {no_progress: 5, max_restarts: 9, refill_after: 2h, window: 4 in 2h, budgets: {killed: 6, data: ~}, "
        "backoff: {first: 2s, max: 1m, jitter: 0.5}}\nsignals: {grace: 7s}\n"
        "callbacks: [my.hooks]\nfaults: [{at_step: 3, rank: 1, do: kill}]\n"
    )
    made = make("--allow-new-total", job)
    limits, contract = made.limits, made.contract
    assert (limits.no_progress, limits.max_restarts, limits.exactly) == (5, 9, False)
    assert (limits.refill_after, make("--set restart.refill_after=null", job).limits.refill_after) == (7200.0, None)
    assert (limits.backoff_first, limits.backoff_max, limits.jitter, made.grace) == (2.0, 60.0, 0.5, 7.0)
    assert limits.window == Window(4, timedelta(hours=2))
    assert {key: limits.budgets[key] for key in ("killed", "data", "exit")} == {"killed": 6, "data": None, "exit": 2}
    assert (contract.every, contract.keep_last, contract.allow_new_total) == (Every(steps=5), 4, True)
    assert (contract.callbacks, contract.faults) == (("my.hooks",), (Fault(3, 1, "kill"),))
    assert (contract.run_id, contract.run_dir) == ("j", str(tmp_path / "runs" / "j"))
    assert contract.root == made.root == str(tmp_path / "runs" / "j" / "checkpoints")
    assert contract.agent == os.getpid()
    assert (made.script, made.script_args) == ("train.py", ["--lr", "3e-4"])
    assert make("train.py").contract.every is None  # left to the script
    for line, count in (("--max-restarts 2", 2), ("--max-restarts 0", 0), ("--set launch.max_restarts=4", 4)):
        limits = make(line, job).limits
        assert (limits.max_restarts, limits.exactly) == (count, True)


def test_a_root_of_its_own(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    assert make("--set checkpoint.root=ckpts train.py").root == str(tmp_path / "ckpts")
    assert make("--set checkpoint.root=/abs/ckpts train.py").root == "/abs/ckpts"
    assert "is a file, not a directory" in refusal(make, "--set checkpoint.root=train.py train.py")
    assert "memory of one process" in refusal(make, "--set checkpoint.root=memory://x train.py")
    assert "ftrun[gcs]" in refusal(make, "--set checkpoint.root=gs://bucket/x train.py")


def test_the_data_cache(make, tmp_path):
    made = make("--set data.cache=nvme --set data.limit=200GB --set data.reserve_free=50GB train.py").contract
    assert (made.cache, made.cache_limit, made.cache_reserve) == (str(tmp_path / "nvme"), 200 * 10**9, str(50 * 10**9))
    assert make("train.py").contract.cache_reserve == "10%"
    assert "is a URL" in refusal(make, "--set data.cache=s3://bucket/x train.py")
    assert "is a file" in refusal(make, "--set data.cache=train.py train.py")


def test_a_local_tier(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    made = make("--name a --set checkpoint.local=nvme train.py").contract.local
    assert Path(made).parent == tmp_path / "nvme"
    assert made != make("--name b --set checkpoint.local=nvme train.py").contract.local, "runs don't share files"
    assert "is a URL" in refusal(make, "--set checkpoint.local=s3://bucket/x train.py")
    assert "is a file" in refusal(make, "--set checkpoint.local=train.py train.py")


# --- the script


def test_the_command_lines_script_wins_whole(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("")
    made = make("other.py --its own", "name: j\nscript: train.py\nargs: [a, b]\n")
    assert (made.script, made.script_args) == ("other.py", ["--its", "own"])
    made = make("other.py", "module: pkg.train\nargs: [a]\n")
    assert (made.script, made.script_args, made.namespace.module) == ("other.py", [], False)


def test_a_module_from_the_job(make: Callable[..., LaunchPlan]) -> None:
    made = make("", "module: pkg.train\nargs: [010, yes]\n")
    assert (made.script, made.script_args, made.namespace.module) == ("pkg.train", ["010", "yes"], True)
    assert made.launch["module"].origin == "job.yaml:1"
    assert made.run_id.startswith("train/")


@pytest.mark.parametrize(
    ("line", "job", "said"),
    [
        ("", None, "no training script on the command line.\nType for example: ftrun --nproc 2 train.py"),
        ("", "name: j\n", "job.yaml names no script or module, and neither does the command line"),
        ("trian.py", None, "there is no script trian.py in {cwd}. Did you mean train.py?"),
        ("xyz", None, "there is no script xyz in {cwd}. Check the path."),
        ("nodir/train.py", None, "there is no script nodir/train.py"),
        ("sub/trian.py", None, "Did you mean sub/train.py?"),
        (
            "sub",
            None,
            "sub is a directory without a __main__.py, not a script. Name a file in it, or run it as a module with -m.",
        ),
        ("--no-python no_such_command", None, "no command 'no_such_command' on the PATH"),
        ("--no-python -m pkg", None, "--no-python and --module exclude each other"),
        ("--no-python", "module: pkg.train\n", "--no-python and --module exclude each other"),
        ("", "script: gone.py\n", "there is no script gone.py"),
    ],
)
def test_no_script_to_run(
    make: Callable[..., LaunchPlan], tmp_path: Path, line: str, job: str | None, said: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("")
    assert said.format(cwd=tmp_path) in refusal(make, line, job)


def test_other_things_to_run(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    assert make("-m pkg.mod --x").script_args == ["--x"]  # whether it is there, Python says
    assert make("--no-python sh -c true").script == "sh"
    assert make(f"{tmp_path}/train.py").script == f"{tmp_path}/train.py"


# --- wrong launch options in a job


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("  nproc_pre_node: 2", "job.yaml:3:3: launch.nproc_pre_node: no such option of torchrun; did you mean"),
        ("  zzzz: 2", "job.yaml:3:3: launch.zzzz: no such option of torchrun\n"),
        ("  nnodes: 2\n  max_restarts: many", "job.yaml:4:3: launch.max_restarts: takes int, not 'many'"),
        ("  start_method: thread", "job.yaml:3:3: launch.start_method: is one of spawn, fork, forkserver"),
        ("  standalone: 1", "job.yaml:3:3: launch.standalone: takes true or false"),
        ("  nnodes: true", "job.yaml:3:3: launch.nnodes: takes a value, not true or false"),
        ("  nnodes: [1, 4]", "job.yaml:3:3: launch.nnodes: takes one value, not a list"),
        ("  nnodes:", "launch.nnodes: expects a value or a list of values, not nothing"),
        ("  training_script: x", "launch.training_script: no such option of torchrun"),
    ],
)
def test_a_wrong_option_is_named_with_its_line(make: Callable[..., LaunchPlan], launch: str, said: str) -> None:
    assert said in refusal(make, "", f"script: train.py\nlaunch:\n{launch}\n") + "\n"


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("lost_timeout=soon", "lost_timeout=soon is no number of seconds"),
        ("lost_timeout=0.1", "lost_timeout=0.1: nodes are heard five times a second"),
        ("quorum=1,preflight=maybe", "preflight=maybe: give 1 or 0"),
        ("lost_timeuot=3", "lost_timeuot: there is no such option; there are last_call_timeout, "),
        ("run_id=3", "run_id: there is no such option"),
        ("quorum", "'quorum': write NAME=VALUE, with commas between several"),
        ("quorum=1,,", "write NAME=VALUE"),
    ],
)
def test_what_nodes_meet_by_is_checked_before_anything_starts(
    make: Callable[..., LaunchPlan], conf: str, said: str
) -> None:
    meet = "--nnodes 1:2 --rdzv-endpoint localhost:29400 --name x"
    refused = refusal(make, f"{meet} --rdzv-conf {conf} train.py")
    assert refused.startswith("--rdzv-conf ")
    assert said in refused
    job = f"name: x\nscript: train.py\nlaunch:\n  nnodes: 1:2\n  rdzv_endpoint: h\n  rdzv_conf: '{conf}'\n"
    assert f"job.yaml:6: --rdzv-conf {refused.removeprefix('--rdzv-conf ')}" == refusal(make, "", job)
    # Another backend has options of its own, and one node alone has no use for any.
    make(f"{meet} --rdzv-backend c10d --rdzv-conf {conf} train.py")
    make(f"--rdzv-conf {conf} train.py")
    make(f"{meet} --rdzv-conf lost_timeout=3,timeout=9,quorum=Yes train.py")


@pytest.mark.parametrize("nnodes", ["0", "3:2", "2:", ":2", "1:2:3", "x:y", "-1", "1.5", ""])
def test_a_number_of_nodes_that_is_none_is_refused_before_anything_starts(
    make: Callable[..., LaunchPlan], nnodes: str
) -> None:
    said = refusal(make, f"--nnodes={nnodes} --rdzv-endpoint localhost:29400 --name x train.py")
    assert said == f"--nnodes {nnodes}: write a number of nodes such as 4, or the least and the most such as 2:4."
    assert said in refusal(make, f"--nnodes={nnodes} --rdzv-backend c10d train.py")
    make("--nnodes 02:4 --rdzv-endpoint localhost:29400 --name x train.py")


def test_an_endpoint_that_is_none_is_refused_before_anything_starts(make: Callable[..., LaunchPlan]) -> None:
    said = refusal(make, "--nnodes 1:2 --rdzv-endpoint a:b --name x train.py")
    assert said.startswith("--rdzv-endpoint 'a:b' is no address")


def test_all_mistakes_are_said_at_once(make: Callable[..., LaunchPlan]) -> None:
    job = "script: train.py\nnmae: x\nlaunch:\n  nods: 2\n  max_restarts: many\nsignals: {grace: 30}\n"
    said = refusal(make, "--set launch.rdzv_idd=3", job)
    for each in ("job.yaml:2", "did you mean 'name'", "job.yaml:4", "job.yaml:5", "job.yaml:6", "--set", "rdzv_idd"):
        assert each in said


def test_a_wrong_variable(make: Callable[..., LaunchPlan]) -> None:
    assert "PET_MAX_RESTARTS takes int" in refusal(make, "train.py", PET_MAX_RESTARTS="many")


def test_a_job_file_that_is_not_there(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    (tmp_path / "jobb.yaml").write_text("")
    assert "job.yaml" in refusal(make, "-c job.yaml train.py")


# --- where the run lives


@pytest.mark.parametrize("name", ["a/b", "", "..", ".hidden", "-x", "sp ace", "ü"])
def test_names_that_are_no_directory_of_runs(make: Callable[..., LaunchPlan], name: str) -> None:
    said = refusal(make, f"{shlex.quote(f'--name={name}')} train.py")
    assert repr(name) in said or "name" in said
    assert "--set" not in said
    job_said = refusal(make, "train.py", f"name: {json.dumps(name)}\n")
    assert "job.yaml:1" in job_said


def test_an_unnamed_run_gets_a_fresh_directory(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    first = make("train.py")
    assert re.fullmatch(r"train/\d{8}-\d{6}", first.run_id)
    assert first.run_dir.path == tmp_path / "runs" / first.run_id
    assert (first.continues, first.finished, first.resume) == (False, False, None)
    for _ in range(3):  # in the same second, or in the next: never a directory that is there
        a_run(tmp_path, f"runs/{first.run_id}")
        again = make("train.py")
        assert not again.run_dir.path.exists()
        first = again
    assert make("-m pkg.deep.train").run_id.startswith("train/")
    assert make("--no-python sh").run_id.startswith("sh/")


def test_unnamed_runs_that_begin_in_one_second_get_a_directory_each(
    make: Callable[..., LaunchPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "timestamp", lambda: "20260131-235959")
    executed: list[str] = []

    def execute(planned: LaunchPlan, command: list[str], standbys: Standbys) -> int:
        with rundir.locked(planned.run_dir.path, shared_by_nodes=False):
            executing._require_new(planned)
            planned.run_dir.create({})
            executed.append(planned.run_id)
        return 0

    monkeypatch.setattr(executing, "execute", execute)
    first, second, named = make("train.py"), make("train.py"), make("--name x train.py")
    assert first.run_id == second.run_id == "train/20260131-235959"
    again, standbys = lambda: make("train.py"), Standbys()
    with rundir.locked(first.run_dir.path, shared_by_nodes=False):  # and has made no directory yet
        assert run._carry_out(second, again, standbys) == 0
    assert run._carry_out(first, again, standbys) == 0
    assert run._carry_out(second, again, standbys) == 0  # planned before that one, which is over by now
    assert executed == [f"train/20260131-235959{number}" for number in ("-2", "", "-3")]
    with rundir.locked(named.run_dir.path, shared_by_nodes=False), pytest.raises(RunDirError, match="in use by anoth"):
        run._carry_out(named, again, standbys)


def test_a_named_run_continues(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    assert not make("--name llama train.py").continues
    a_run(tmp_path, "runs/llama")
    made = make("--name llama train.py")
    assert (made.run_id, made.continues, made.finished) == ("llama", True, False)
    assert made.to_json()["state"] == "continues"
    assert make("", "name: llama\nscript: train.py\n").continues
    assert not make("--name other", "name: llama\nscript: train.py\n").continues  # the command line's name wins


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("finished", "finished"), ("failed", "continues"), ("stopped", "continues"), (None, "continues")],
)
def test_whether_it_has_finished(
    make: Callable[..., LaunchPlan], tmp_path: Path, outcome: str | None, state: str
) -> None:
    a_run(tmp_path, "runs/llama", outcome=outcome)
    made = make("--name llama train.py")
    assert made.finished is (state == "finished")
    assert made.to_json()["state"] == state
    fresh = make("--name llama --fresh train.py")
    assert (fresh.fresh, fresh.continues, fresh.finished, fresh.resume) == (True, False, False, None)
    assert fresh.to_json()["state"] == "fresh"


def test_a_run_directory_of_its_own(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    made = make("--run-dir out/here train.py")
    assert (made.run_dir.path, made.run_id, made.continues) == (tmp_path / "out" / "here", "here", False)
    assert make("--run-dir out/here --name llama train.py").run_id == "llama"
    assert make(f"--run-dir {tmp_path}/abs train.py").run_dir.path == tmp_path / "abs"


def test_a_run_directory_without_a_name_is_whoever_lives_there(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    a_run(tmp_path, "runs/train/20260101-000000", run_id="train/20260101-000000")
    made = make("--run-dir runs/train/20260101-000000 train.py")
    assert (made.run_id, made.continues) == ("train/20260101-000000", True)
    assert made.contract.run_id == made.run_id


def test_another_run_lives_there(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    a_run(tmp_path, "there", run_id="llama")
    said = refusal(make, "--run-dir there --name other train.py")
    assert "holds the run 'llama', and this is 'other'" in said
    assert "--name llama" in said
    assert make("--run-dir there --name llama train.py").continues
    assert not make("--run-dir there --name other --fresh train.py").continues


@pytest.mark.parametrize("fresh", ["", "--fresh"])
def test_places_that_are_no_run_directory(make: Callable[..., LaunchPlan], tmp_path: Path, fresh: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "empty").mkdir()
    assert "is a file, not a run directory" in refusal(make, f"--run-dir file {fresh} train.py")
    said = refusal(make, f"--run-dir mine {fresh} train.py")
    assert "it holds thesis.tex but no job.resolved.json" in said
    assert not make(f"--run-dir empty {fresh} train.py").continues


def test_a_directory_of_a_launcher_that_died_while_making_it_is_no_run_yet(
    make: Callable[..., LaunchPlan], tmp_path: Path
) -> None:
    half = tmp_path / "runs" / "llama"
    for name in ("attempts", "control", "events"):
        (half / name).mkdir(parents=True)
    (half / ".job.resolved.json.0badf00d.tmp").write_text("{")
    assert not make("--name llama train.py").continues
    (half / "events" / "n0000.jsonl").write_text("")
    with pytest.raises(RunDirError, match="it holds events but no"):
        make("--name llama train.py")


def test_an_identity_that_cannot_be_read(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    a_run(tmp_path, "runs/llama").resolved.write_text("{torn")
    assert "can't be read" in (said := refusal(make, "--name llama train.py"))
    assert "--fresh" in said
    assert make("--name llama --fresh train.py").fresh


# --- what would be resumed


def test_resume_is_previewed(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, "runs/llama")
    assert make("--name llama train.py").resume is None
    root = Root.open(run_dir.checkpoints)
    epoch = epochs.claim(root, "llama", fresh=False, parent=None).epoch
    assert make("--name llama train.py").resume is None
    name = commit(root, 40, epoch)
    assert make("--name llama train.py").resume == name
    assert make("--name llama --fresh train.py").resume is None
    assert "holds the run 'llama'" in refusal(make, f"--name other --set checkpoint.root={root.path} train.py")
    (root.path / "ckpt" / name / "MANIFEST.json").write_text("{torn")
    assert name in refusal(make, "--name llama train.py")


def commit(root: Root, step: int, epoch: int) -> str:
    from test_checkpoint_reader import save

    return str(save(root, step, epoch=epoch, run_id="llama"))


# --- the document


def test_the_plan_is_one_json_document(make: Callable[..., LaunchPlan], tmp_path: Path) -> None:
    job = JOB + "args: [--lr, 3e-4]\nfaults: [{at_step: 3, rank: 1, do: kill}]\nenv: {A: 1}\ncheckpoint: {every: 10m}\n"
    made = make("--nproc 2", job)
    document: dict[str, Any] = made.to_json()
    assert json.loads(json.dumps(document)) == document
    assert document["schema_version"] == 1
    assert document["run_dir"] == str(tmp_path / "runs" / "job")
    assert (document["run_id"], document["state"], document["resume"]) == ("job", "fresh", None)
    assert (document["script"], document["script_args"]) == ("train.py", ["--lr", "3e-4"])
    assert document["launch"]["nproc_per_node"] == {"value": "2", "origin": "command line"}
    assert set(document["launch"]) == set(LaunchParser().names)
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(document["job"]["config"]))
    same = make("-c again.yaml --nproc 2")
    assert {name: each.value for name, each in same.launch.items()} == {
        name: each.value for name, each in made.launch.items()
    }
    assert same.contract == made.contract


def test_a_mistake_in_a_plan_is_a_usage_error(make: Callable[..., LaunchPlan]) -> None:
    with pytest.raises(ConfigError):
        make("--nope train.py")
