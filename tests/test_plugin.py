"""``torchrun --logs-specs ftrun``: stock torchrun, real scripts, real crashes."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from conftest import SCRIPTS, Result, Runner
from torch.distributed.elastic.multiprocessing import Std

from ftrun import events
from ftrun.contract import WorkerContract
from ftrun.errors import RunDirError
from ftrun.launch.plugin import AttemptLogs
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

SMALL = SCRIPTS / "small.py"

TELLS = """
import json, os, sys
names = ("FTRUN_ATTEMPT", "FTRUN_RESUME", "FTRUN_RUN_DIR", "TORCHELASTIC_RESTART_COUNT", "RANK")
print(json.dumps({name: os.environ.get(name) for name in names}))
print("words on stderr", file=sys.stderr)
if os.environ["TORCHELASTIC_RESTART_COUNT"] < sys.argv[1]:
    sys.exit(3)
"""


def torchrun(runner: Runner, *line: str | Path, env: dict[str, str] | None = None) -> Result:
    return runner.python("-m", "torch.distributed.run", "--logs-specs", "ftrun", *line, env=env)


def told(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("{")[1] + line.partition("{")[2]) for line in text.splitlines() if "{" in line]


def of(run_dir: RunDir, kind: type[events.Event]) -> list[Any]:
    return [record.event for record in events.read(run_dir.events()) if isinstance(record.event, kind)]


def environments(count: int, **more: str) -> dict[int, dict[str, str]]:
    return {n: {"RANK": str(n), "WORLD_SIZE": str(count), "GROUP_RANK": "0", **more} for n in range(count)}


def test_torchrun_finds_it_by_name() -> None:
    (found,) = metadata.entry_points(group="torchrun.logs_specs", name="ftrun")
    assert found.load() is AttemptLogs


def test_attempts_are_numbered_and_told_to_all_ranks(tmp_path: Path) -> None:
    logs = AttemptLogs(str(tmp_path / "run"))
    envs = environments(2)
    first, second = logs.reify(envs), logs.reify(environments(2))
    assert first.stdouts[1] == str(tmp_path / "run/attempts/0001/n0000/r00001/stdout.log")
    assert second.error_files[0] == str(tmp_path / "run/attempts/0002/n0000/r00000/error.json")
    contract = WorkerContract.from_environment(envs[1])
    assert contract is not None
    assert (contract.attempt, contract.epoch, contract.resume, contract.alone) == (1, 1, None, True)
    assert contract.worker_dir == str(tmp_path / "run/attempts/0001/n0000/r00001")
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == first.error_files[1]
    assert [started.epoch for started in of(RunDir(tmp_path / "run"), events.AttemptStarted)] == [1, 2]
    with pytest.raises(RunDirError, match="in use"):
        AttemptLogs(str(tmp_path / "run")).reify(environments(1))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, {"out": [0, 1, 2], "err": [0, 1, 2]}),
        ({"redirects": Std.OUT}, {"out": [], "err": [0, 1, 2]}),
        ({"redirects": {1: Std.ALL}}, {"out": [0, 2], "err": [0, 2]}),
        ({"redirects": Std.ALL, "tee": {0: Std.ERR}}, {"out": [], "err": [0]}),
        ({"local_ranks_filter": {2}}, {"out": [2], "err": [2]}),
    ],
)
def test_torchs_options_say_what_reaches_the_console(
    options: dict[str, Any], shown: dict[str, list[int]], tmp_path: Path
) -> None:
    made = AttemptLogs(str(tmp_path / "run"), **options).reify(environments(3))
    assert {"out": list(made.tee_stdouts), "err": list(made.tee_stderrs)} == shown
    assert list(made.stdouts) == list(made.stderrs) == list(made.error_files) == [0, 1, 2]


def test_of_several_nodes_only_logs_are_kept_apart(tmp_path: Path) -> None:
    envs = environments(2, GROUP_WORLD_SIZE="2", GROUP_RANK="1")
    logs = AttemptLogs(str(tmp_path / "run"))
    first, second = logs.reify(envs), logs.reify(envs)
    assert first.stdouts[0] != second.stdouts[0]
    assert envs[0]["FTRUN_RUN_DIR"] == str(tmp_path / "run")
    assert WorkerContract.VARIABLE not in envs[0]


@pytest.mark.slow
def test_a_plain_script_keeps_the_logs_of_every_attempt(runner: Runner) -> None:
    (runner.cwd / "tells.py").write_text(TELLS)
    result = torchrun(runner, "--max-restarts", "2", "--nproc-per-node", "2", "tells.py", "2")
    assert result.code == 0, result
    (where,) = (path for path in (runner.cwd / "runs" / "tells").iterdir() if path.is_dir())
    run_dir = RunDir(where)
    assert run_dir.attempt_numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        for rank in (0, 1):
            directory = run_dir.worker(number, 0, rank)
            words = told((directory / "stdout.log").read_text())
            if number == 3 or words:  # torchrun ends the peers of a rank that has failed, at any time
                assert words[0]["FTRUN_ATTEMPT"] == str(number)
                assert words[0]["FTRUN_RUN_DIR"] == str(where)
                assert words[0]["FTRUN_RESUME"] is None
    assert "words on stderr" in result.err
    assert {each["RANK"] for each in told(result.out) if each["FTRUN_ATTEMPT"] == "3"} == {"0", "1"}
    assert [ended.outcome for ended in of(run_dir, events.RunEnded)] == ["finished"]


@pytest.mark.slow
def test_a_session_resumes_where_the_crashed_attempt_had_committed(runner: Runner) -> None:
    """Every attempt crashes at step 13 and resumes from a commit; a later torchrun goes on to the end."""
    env = {"FTRUN_RUN_DIR": str(runner.cwd / "kept")}
    line = ("--max-restarts", "1", "--nproc-per-node", "2", SMALL, "--total", "20")
    crashed = torchrun(runner, *line, "--raise-at", "13", "--bad-rank", "1", "--pace", "0.2", env=env)
    assert crashed.code == 1, crashed
    run_dir = RunDir(runner.cwd / "kept")
    assert run_dir.attempt_numbers() == [1, 2]
    resumed = [started.resume_step for started in of(run_dir, events.AttemptStarted)]
    assert resumed[0] == 0
    assert all(step in (5, 10) for step in resumed[1:])
    assert [ended.outcome for ended in of(run_dir, events.RunEnded)] == ["failed"]
    assert "planted at step 13" in (run_dir.worker(1, 0, 1) / "stderr.log").read_text()

    goes_on = torchrun(runner, *line, env=env)
    assert goes_on.code == 0, goes_on
    assert run_dir.attempt_numbers() == [1, 2, 3]
    assert of(run_dir, events.AttemptStarted)[-1].resume_step in (5, 10)
    status = runner.json("status", "kept", "--json")
    assert (status["state"], status["step"]) == ("finished", 20)

    (runner.cwd / "tells.py").write_text(TELLS)
    plain = torchrun(runner, "tells.py", "0", env=env)
    assert plain.code == 0, plain
    (seen,) = told(plain.out)
    assert seen["FTRUN_ATTEMPT"] == "4"
    assert (RunDir(runner.cwd / "kept").checkpoints / "ckpt") in [
        p.parent for p in [type(runner.cwd)(seen["FTRUN_RESUME"])]
    ]
    assert (type(runner.cwd)(seen["FTRUN_RESUME"]) / "MANIFEST.json").is_file()
