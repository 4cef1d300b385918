"""Whole runs, as a user starts them: real processes, real checkpoints, real deaths."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import SCRIPTS, Runner, eventually, held_port

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = SCRIPTS / "small.py"


LONG = ("--total", "4000", "--pace", "0.02")


def of(runner: Runner, name: str, kind: type[events.Event]) -> list[events.Record]:
    return [record for record in runner.events(name) if isinstance(record.event, kind)]


def weights(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("weights")]
    assert lines, text
    return lines[-1]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The weights that two ranks come to when nobody disturbs them."""
    runner = Runner(tmp_path_factory.mktemp("calm"))
    try:
        result = runner.run("--nproc", "2", "--name", "calm", SMALL)
        assert result.code == 0, result
        yield weights(result.out)
    finally:
        runner.close()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of two ranks that were stopped somewhere after their second commit."""
    runner = Runner(tmp_path_factory.mktemp("stopped"))
    try:
        # Any rank's request stops all, at the next point of agreement, a second or so later.
        result = runner.run("--nproc", "2", "--name", "stopped", SMALL, *LONG, "--stop-at", "12", "--bad-rank", "1")
        assert result.code == 75, result
        assert runner.json("status", "stopped", "--json")["state"] == "stopped"
        yield runner.run_dir("stopped").path
    finally:
        runner.close()


@pytest.fixture
def goes_on(runner: Runner, stopped: Path) -> str:
    """The name of a run that was stopped, in this test's own directory."""
    shutil.copytree(stopped, runner.cwd / "runs" / "stopped", symlinks=True)
    return "stopped"


@pytest.mark.slow
def test_a_killed_rank_costs_nothing_but_time(runner: Runner, calm: str) -> None:
    (runner.cwd / "job.yaml").write_text(
        f"name: killed\nscript: {SMALL}\nlaunch: {{nproc_per_node: 2}}\nfaults: [{{at_step: 13, rank: 1, do: kill}}]\n"
        "checkpoint: {when_busy: wait}\n"  # steps take no time here: a keeper that stands still would miss some saves
    )
    killed = runner.run("-c", "job.yaml", standbys=True)
    assert killed.code == 0, killed
    assert weights(killed.out) == calm

    (fall,) = of(runner, "killed", events.Failed)
    assert fall.event.failed_rank == 1
    assert fall.event.exit_code == -signal.SIGKILL
    resumed = of(runner, "killed", events.AttemptStarted)[-1].event.resume_step
    assert resumed in (5, 10)  # the save of step 10 may still have been on its way
    assert (fall.event.step, fall.event.lost_steps) == (12, 12 - resumed)
    assert killed.err.count("rank 1 was ended by SIGKILL (injected: kill at step 13 on rank 1)") == 2
    assert f"resumes from step {resumed}" in killed.err
    assert f"training again: step {resumed + 1}" in killed.err
    assert "restarts   1" in killed.err

    status = runner.json("status", "killed", "--json")
    assert (status["state"], status["step"], status["restarts"], status["lost_steps"]) == (
        "finished",
        20,
        1,
        12 - resumed,
    )
    assert sum(status["seconds"].values()) == pytest.approx(status["wall_seconds"], abs=1e-6)
    listed = runner.json("ckpt", "ls", "killed", "--json")["checkpoints"]
    assert {row["step"] for row in listed if row["status"] == "committed"} >= {20, 15}
    assert len(of(runner, "killed", events.AttemptStarted)) == 2


@pytest.mark.slow
def test_an_unmodified_script_runs_as_under_torchrun(runner: Runner) -> None:
    plain = SCRIPTS / "plain_torchrun.py"
    mine = runner.run("--nproc", "2", plain, "--lr", "3e-4", "--help-me")
    theirs = runner.python("-m", "torch.distributed.run", "--nproc-per-node", "2", plain, "--lr", "3e-4", "--help-me")
    assert mine.code == theirs.code == 0, f"{mine}\n{theirs}"
    assert sorted(mine.out.splitlines()) == sorted(theirs.out.splitlines())
    (run,) = (path for path in (runner.cwd / "runs" / "plain_torchrun").iterdir() if path.is_dir())
    logs = runner.run_dir(f"plain_torchrun/{run.name}").worker(1, 0, 1) / "stdout.log"
    assert "rank 1 of 2" in logs.read_text()


def test_a_failure_before_the_first_step_is_not_retried(runner: Runner) -> None:
    script = runner.cwd / "broken.py"
    script.write_text("import sys\nprint('hello')\nraise RuntimeError('no data')\n")
    result = runner.run("--nproc", "2", "--name", "broken", script)
    assert result.code == 1, result
    assert len(of(runner, "broken", events.AttemptStarted)) == 1
    assert "RuntimeError: no data" in result.err
    assert "failed before the first step" in result.err
    assert "launch/" not in result.err  # no traceback of the launcher's


@pytest.mark.slow
def test_a_workers_own_exit_code_is_passed_on_and_each_run_starts_anew(runner: Runner) -> None:
    script = runner.cwd / "leaves.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert runner.run(script, "42").code == 42
    result = runner.run(script, "75")
    assert result.code == 75
    assert "left with code 75, without a commit" in result.err
    assert sum(path.is_dir() for path in (runner.cwd / "runs" / "leaves").iterdir()) == 2


@pytest.mark.slow
def test_the_same_failure_at_the_same_step_goes_one_commit_further_back_and_then_ends_the_run(runner: Runner) -> None:
    result = runner.run(
        "--name", "back", "--set", "restart.backoff.first=10ms", SMALL, "--raise-at", "13", "--total", "20"
    )
    assert result.code == 76, result
    assert [each.event.resume_step for each in of(runner, "back", events.AttemptStarted)] == [0, 10, 5]
    assert "one commit further back" in result.err
    assert "for the third time" in result.err
    assert runner.json("status", "back", "--json")["state"] == "gave_up"


@pytest.mark.slow
def test_max_restarts_on_the_command_line_means_exactly_that(runner: Runner) -> None:
    result = runner.run("--max-restarts", "1", "--name", "counted", SMALL, "--raise-at", "3")
    assert result.code == 1, result
    assert len(of(runner, "counted", events.AttemptStarted)) == 2


@pytest.mark.slow
def test_a_signal_saves_and_leaves_with_75_and_the_same_command_continues(runner: Runner) -> None:
    command = ("--nproc", "2", "--name", "polite", SMALL, *LONG, "--workers", "1")
    started = runner.start(*command)
    eventually(lambda: len(of(runner, "polite", events.Committed)) >= 1, 60, "a first commit")
    second = runner.run(*command)
    assert second.code == 2, second
    assert "in use by another launcher" in second.err
    assert f"pid {started.process.pid}" in second.err
    started.process.send_signal(signal.SIGINT)
    result = started.wait()
    assert result.code == 75, result
    saved = of(runner, "polite", events.Committed)[-1].event.step
    assert of(runner, "polite", events.StepsEnded)[-1].event.step == saved

    again = runner.start(*command)
    steps = len(of(runner, "polite", events.Step))
    eventually(lambda: len(of(runner, "polite", events.Step)) > steps, 60, "a step after the second start")
    assert of(runner, "polite", events.StepsBegan)[-1].event.step == saved
    ranks = of(runner, "polite", events.AttemptStarted)[-1].event.pids
    for pid in (again.process.pid, *ranks.values()):  # to every process at once it is one request
        with contextlib.suppress(ProcessLookupError):  # it may have left by now on the launcher's word
            os.kill(pid, signal.SIGTERM)
    result = again.wait()
    assert result.code == 75, result
    assert "saved and stopped on SIGTERM" in result.err
    saved = of(runner, "polite", events.Committed)[-1].event.step
    assert of(runner, "polite", events.StepsEnded)[-1].event.step == saved


@pytest.mark.slow
def test_programs_that_a_script_started_are_gone_too(runner: Runner) -> None:
    script = runner.cwd / "starts.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "for _ in range(20):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('started', flush=True)\n"
        "time.sleep(600)\n"
    )
    started = runner.start("--nproc", "2", "--name", "programs", script)
    eventually(lambda: started.out.read_text().count("started") == 2, 60, "both ranks to start theirs")
    family = psutil.Process(started.process.pid).children(recursive=True)
    assert len(family) > 40
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(60)
    eventually(lambda: not any(each.is_running() for each in family), 60, "the end of all of them")


@pytest.mark.slow
def test_fresh_keeps_the_earlier_run_aside_and_never_resumes_what_is_there(runner: Runner, goes_on: str) -> None:
    root = runner.cwd / "root"
    shutil.copytree(runner.run_dir(goes_on).checkpoints, root)  # a shared one, which stays where it is
    where = ("--set", f"checkpoint.root={root}", SMALL, "--total", "6")
    result = runner.run("--name", goes_on, "--fresh", *where)
    assert result.code == 0, result
    assert "starts fresh" in result.err
    (aside,) = (runner.cwd / "runs").glob(f"{goes_on}.aside-*")
    assert (aside / "checkpoints" / "LATEST").is_file()
    foreign = runner.run("--name", "other", *where)
    assert foreign.code == 2, foreign
    assert f"holds the run {goes_on!r}" in foreign.err


@pytest.mark.slow
def test_what_does_not_fit_the_checkpoint_is_refused_and_another_total_can_be_allowed(
    runner: Runner, goes_on: str
) -> None:
    before = runner.json("ckpt", "ls", goes_on, "--json")
    refused = runner.run("--name", goes_on, SMALL, "--total", "200")
    assert refused.code == 2, refused
    assert "a run of 4,000 steps, and the script now asks for 200" in refused.err
    assert "Traceback" not in refused.err
    wrong = runner.run("--nproc", "2", "--name", goes_on, SMALL, *LONG, "--width", "4")
    assert wrong.code == 2, wrong
    assert "weight: [1, 4] in the script, [1, 8] in the checkpoint" in wrong.err
    assert wrong.err.count("weight: [1, 4]") == 2  # once as it happens and once on the last screen, not once a rank
    assert runner.json("ckpt", "ls", goes_on, "--json") == before

    for record in (runner.run_dir(goes_on).checkpoints / "epochs").iterdir():
        record.unlink()  # which hides no commit
    allowed = runner.run("--name", goes_on, "--allow-new-total", SMALL, "--total", "200")
    assert allowed.code == 0, allowed
    assert of(runner, goes_on, events.StepsBegan)[-1].event.step > 0
    assert of(runner, goes_on, events.AttemptStarted)[-1].event.epoch > 1  # what the commits have isn't used again
    assert runner.json("status", goes_on, "--json")["step"] == 200


@pytest.mark.slow
def test_damage_is_passed_over_and_nothing_left_is_never_a_quiet_fresh_start(runner: Runner, goes_on: str) -> None:
    checkpoints = runner.run_dir(goes_on).checkpoints
    rows = runner.json("ckpt", "ls", goes_on, "--json")["checkpoints"]
    checkpoints.rename(runner.cwd / "moved")
    lost = runner.run("--name", goes_on, SMALL, *LONG)
    assert lost.code == 2, lost
    assert "there is no checkpoint in" in lost.err
    assert len(of(runner, goes_on, events.AttemptStarted)) == 1

    (runner.cwd / "moved").rename(checkpoints)
    flip_a_byte(checkpoints / "ckpt" / rows[0]["name"] / "r00000.0.safetensors")
    for record in (checkpoints / "epochs").iterdir():
        record.write_bytes(b"")
    started = runner.start("--name", goes_on, SMALL, *LONG)
    eventually(lambda: len(of(runner, goes_on, events.StepsBegan)) == 2, 60, "the run to go on")
    started.process.send_signal(signal.SIGTERM)
    result = started.wait()
    assert result.code == 75, result
    assert "marked bad" in result.err
    assert f"resumes from step {rows[1]['step']}" in result.err
    assert of(runner, goes_on, events.AttemptStarted)[1].event.epoch == 2  # no number is used twice

    for each in (checkpoints / "ckpt").iterdir():
        (each / "MANIFEST.json").write_bytes(b"{}")
    lost = runner.run("--name", goes_on, SMALL, *LONG)
    assert lost.code == 2, lost
    assert "none that can be used" in lost.err
    assert "--fresh" in lost.err


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_root_that_cannot_be_written_is_refused_before_anything_is(runner: Runner) -> None:
    result = runner.run("--name", "nowhere", "--set", "checkpoint.root=/proc/ftrun-root", SMALL)
    assert result.code == 2, result
    assert "ftrun-root" in result.err
    assert not runner.run_dir("nowhere").path.exists()


@pytest.mark.slow
def test_alone_under_python_and_under_plain_torchrun(runner: Runner, calm: str) -> None:
    alone = runner.python(SMALL)
    assert alone.code == 0, alone
    (first,) = [path for path in (runner.cwd / "runs" / "small").iterdir() if path.is_dir()]
    assert json.loads((first / "job.resolved.json").read_text())["run_id"].startswith("small/")

    under = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", SMALL)
    env = {"FTRUN_RUN_DIR": str(runner.cwd / "here"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    failed = runner.python(*under, "--raise-at", "12", "--bad-rank", "1", env=env)
    assert failed.code == 1, failed
    records = list(events.read(runner.cwd / "here" / "events" / "n0000.jsonl"))
    begun = [record.event.step for record in records if isinstance(record.event, events.StepsBegan)]
    assert begun in ([0, 10], [0, 5])  # the other rank may still have been at the snapshot of step 10
    done = runner.python(*under, env=env)
    assert done.code == 0, done
    assert weights(done.out) == calm


@pytest.mark.slow
def test_callbacks_from_the_job_file(runner: Runner) -> None:
    (runner.cwd / "hooks.py").write_text(
        "import ftrun\n"
        "@ftrun.on('save')\ndef save():\n    return {'note': 'kept'}\n"
        "@ftrun.on('restore')\ndef back(checkpoint):\n    print('restored', checkpoint.step, checkpoint.extra)\n"
        "@ftrun.on('commit')\ndef durable(checkpoint):\n    print('durable', checkpoint.step)\n"
    )
    (runner.cwd / "job.yaml").write_text(
        f"name: hooked\nscript: {SMALL}\ncallbacks: [hooks]\nfaults: [{{at_step: 8, rank: 0, do: raise}}]\n"
    )
    result = runner.run("-c", "job.yaml", env={"PYTHONPATH": str(runner.cwd)})
    assert result.code == 0, result
    assert "restored 5 {'note': 'kept'}" in result.out
    assert "durable 20" in result.out


@pytest.mark.slow
def test_a_plain_script_that_falls_is_restarted_and_nothing_is_made_up(runner: Runner) -> None:
    (runner.cwd / "job.yaml").write_text(
        f"name: plain\nscript: {SCRIPTS / 'plain_optimizer.py'}\n"
        "faults: [{at_step: 30, rank: 0, do: kill}, {at_step: 40, rank: 0, do: kill}]\n"
        "restart: {no_progress: 1, refill_after: 200ms}\n"  # 29 steps take longer
    )
    result = runner.run("-c", "job.yaml")
    assert result.code == 0, result
    assert "where it resumes is its own business" in result.err
    assert "to repeat" not in result.err
    assert result.err.count("1 of 1 allowed before 200ms of training (restart.no_progress, restart.refill_after)") == 2
    status = runner.json("status", "plain", "--json")
    assert (status["restarts"], status["lost_steps"], status["seconds"]["repeating"]) == (2, 0, 0.0)


@pytest.mark.slow
def test_a_run_is_finished_when_the_script_is_and_not_before(runner: Runner) -> None:
    script = runner.cwd / "limit.py"
    script.write_text(
        "import os, sys, time, ftrun\n"
        "@ftrun.entrypoint(every=5)\n"
        "def main(ft):\n"
        "    for step in ft.steps(total=40):\n"
        "        if step == 17 and ft.resume is None:\n"
        "            sys.exit(0)\n"
        "    print('after the loop', flush=True)\n"
        "    if not os.path.exists('go'):\n"
        "        time.sleep(600)\n"
        "    print('done', flush=True)\n"
        "main()\n"
    )
    command = ("--name", "limit", "--set", "checkpoint.when_busy=wait", script)
    first = runner.run(*command)
    assert first.code == 0, first
    assert "left before its end; the same command continues" in first.err
    second = runner.start("--set", "signals.grace=1s", *command)  # it sleeps on
    eventually(lambda: "after the loop" in second.out.read_text(), 60, "the end of the loop")
    second.process.send_signal(signal.SIGTERM)
    result = second.wait()
    assert result.code == 75, result
    assert "resumes from step 15" in result.err
    (runner.cwd / "go").touch()
    third = runner.run(*command)
    assert third.code == 0, third
    assert "done" in third.out  # work after the loop isn't skipped because of a stop
    assert "is finished" in runner.run(*command).err


@pytest.mark.slow
def test_a_stop_before_there_is_a_checkpoint_is_the_signals_own_code(runner: Runner) -> None:
    script = runner.cwd / "slow.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    started = runner.start("--name", "early", script)
    eventually(lambda: "here" in started.out.read_text(), 60, "the script to start")
    started.process.send_signal(signal.SIGTERM)
    result = started.wait()
    assert result.code == 143, result
    assert "stopped by SIGTERM" in result.err


FULL = """
mount -t tmpfs -o size=2m none "$1"
( until [ -e "$1/LATEST" ]; do sleep 0.02; done
  dd if=/dev/zero of="$1/fill" bs=4k 2>/dev/null
  touch full
  until grep -q save_failed "$2"; do sleep 0.05; done
  sleep 2; rm "$1/fill" ) &
shift 2
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small disk needs root")
def test_a_disk_that_is_full_for_a_while_costs_no_state(runner: Runner) -> None:
    root = runner.cwd / "root"
    root.mkdir()
    events_file = runner.run_dir("full").events()
    script = runner.cwd / "waits.py"  # before the last save, until the disk is full
    script.write_text(
        "import os, time, torch, ftrun\n"
        "@ftrun.entrypoint(every=5)\n"
        "def main(ft):\n"
        "    ft.track(model=torch.nn.Linear(8, 1))\n"
        "    for step in ft.steps(total=12):\n"
        "        while step == 7 and not os.path.exists('full'):\n"
        "            time.sleep(0.02)\n"
        "main()\n"
    )
    command = ("--name", "full", "--set", f"checkpoint.root={root}", script)
    result = runner.run(*command, under=("unshare", "-m", "bash", "-c", FULL, "-", root, events_file))
    assert result.code == 0, result
    assert "checkpoints wait for" in result.err
    assert of(runner, "full", events.Committed)[-1].event.step == 12


@pytest.mark.slow
def test_a_fixed_port_meets_no_stale_keys(runner: Runner) -> None:
    faults = ", ".join(f"{{at_step: {step}, rank: 1, do: kill}}" for step in (7, 12))
    (runner.cwd / "job.yaml").write_text(
        f"name: port\nscript: {SMALL}\nargs: [--total, 15, --pace, 0.02]\nfaults: [{faults}]\n"
    )
    with held_port() as port:
        result = runner.run("-c", "job.yaml", "--nproc", "2", "--master-port", str(port), timeout=100)
    assert result.code == 0, result
    falls = of(runner, "port", events.Failed)
    assert [fall.event.exit_code for fall in falls] == [-9, -9]
