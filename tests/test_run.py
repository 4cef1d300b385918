"""Whole runs, as a user starts them: real processes, real checkpoints, real deaths."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import SCRIPTS, Runner, eventually

from ftrun import events

if TYPE_CHECKING:
    from pathlib import Path

SMALL = SCRIPTS / "small.py"


STOPS = ("--total", "4000", "--pace", "0.02", "--stop-at", "12")
"""Asks for a stop at its twelfth step, and gets it at the next point of agreement, a second or so later."""


def of(runner: Runner, name: str, kind: type[events.Event]) -> list[events.Record]:
    return [record for record in runner.events(name) if isinstance(record.event, kind)]


def weights(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("weights")]
    assert lines, text
    return lines[-1]


def test_a_killed_rank_costs_nothing_but_time(runner: Runner) -> None:
    (runner.cwd / "job.yaml").write_text(
        f"name: killed\nscript: {SMALL}\nlaunch: {{nproc_per_node: 2}}\nfaults: [{{at_step: 13, rank: 1, do: kill}}]\n"
    )
    calm = runner.run("--nproc", "2", "--name", "calm", "--set", "standby.enabled=false", SMALL)
    killed = runner.run("-c", "job.yaml")
    assert calm.code == 0, calm
    assert killed.code == 0, killed
    assert weights(killed.out) == weights(calm.out)

    (fall,) = of(runner, "killed", events.Failed)
    assert fall.event.failed_rank == 1
    assert fall.event.exit_code == -signal.SIGKILL
    resumed = of(runner, "killed", events.AttemptStarted)[-1].event.resume_step
    assert resumed in (5, 10)  # the save of step 10 may still have been on its way
    assert (fall.event.step, fall.event.lost_steps) == (12, 12 - resumed)
    assert "rank 1 was ended by SIGKILL" in killed.err
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
def test_an_unmodified_script_runs_as_under_torchrun_and_starts_anew_each_time(runner: Runner) -> None:
    plain = SCRIPTS / "plain_torchrun.py"
    mine = runner.run("--nproc", "2", plain, "--lr", "3e-4", "--help-me")
    theirs = runner.python("-m", "torch.distributed.run", "--nproc-per-node", "2", plain, "--lr", "3e-4", "--help-me")
    assert mine.code == theirs.code == 0, f"{mine}\n{theirs}"
    assert sorted(mine.out.splitlines()) == sorted(theirs.out.splitlines())
    second = runner.run("--nproc", "2", plain, "--lr", "3e-4", "--help-me")
    assert second.code == 0, second
    runs = sorted(path.name for path in (runner.cwd / "runs" / "plain_torchrun").iterdir() if path.is_dir())
    assert len(runs) == 2
    logs = runner.run_dir(f"plain_torchrun/{runs[0]}").worker(1, 0, 1) / "stdout.log"
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


def test_a_workers_own_exit_code_is_passed_on(runner: Runner) -> None:
    script = runner.cwd / "leaves.py"
    script.write_text("import sys\nsys.exit(42)\n")
    assert runner.run(script).code == 42


@pytest.mark.slow
def test_the_same_failure_at_the_same_step_ends_the_run_the_third_time(runner: Runner) -> None:
    result = runner.run(
        "--name", "stuck", "--set", "restart.backoff.first=10ms", SMALL, "--raise-at", "3", "--total", "20"
    )
    assert result.code == 76, result
    assert len(of(runner, "stuck", events.AttemptStarted)) == 3
    assert "for the third time" in result.err
    assert runner.json("status", "stuck", "--json")["state"] == "gave_up"


@pytest.mark.slow
def test_the_same_failure_at_the_same_step_goes_one_commit_further_back(runner: Runner) -> None:
    result = runner.run(
        "--name", "back", "--set", "restart.backoff.first=10ms", SMALL, "--raise-at", "13", "--total", "20"
    )
    assert result.code == 76, result
    assert [each.event.resume_step for each in of(runner, "back", events.AttemptStarted)] == [0, 10, 5]
    assert "one commit further back" in result.err
    assert "for the third time" in result.err


@pytest.mark.slow
def test_max_restarts_on_the_command_line_means_exactly_that(runner: Runner) -> None:
    result = runner.run("--max-restarts", "1", "--name", "counted", SMALL, "--raise-at", "3")
    assert result.code == 1, result
    assert len(of(runner, "counted", events.AttemptStarted)) == 2


@pytest.mark.slow
def test_sigterm_saves_and_leaves_with_75_and_the_same_command_continues(runner: Runner) -> None:
    command = ("--nproc", "2", "--name", "polite", SMALL, "--total", "400", "--pace", "0.02", "--workers", "1")
    started = runner.start(*command)
    eventually(lambda: len(of(runner, "polite", events.Committed)) >= 1, 60, "a first commit")
    started.process.send_signal(signal.SIGTERM)
    result = started.wait(40)
    assert result.code == 75, result
    saved = of(runner, "polite", events.Committed)[-1].event.step
    assert of(runner, "polite", events.StepsEnded)[-1].event.step == saved

    again = runner.start(*command)
    steps = len(of(runner, "polite", events.Step))
    eventually(lambda: len(of(runner, "polite", events.Step)) > steps, 60, "a step after the second start")
    assert of(runner, "polite", events.StepsBegan)[-1].event.step == saved
    again.process.send_signal(signal.SIGINT)
    assert again.wait(40).code == 75


@pytest.mark.slow
def test_a_requested_stop_of_any_rank_stops_all(runner: Runner) -> None:
    result = runner.run("--nproc", "2", "--name", "asked", SMALL, *STOPS, "--bad-rank", "1")
    assert result.code == 75, result
    assert runner.json("status", "asked", "--json")["state"] == "stopped"


@pytest.mark.slow
def test_nothing_outlives_an_agent_that_is_killed(runner: Runner) -> None:
    started = runner.start(
        "--nproc", "2", "--name", "gone", SMALL, "--total", "4000", "--pace", "0.02", "--workers", "1"
    )
    eventually(lambda: of(runner, "gone", events.Step), 60, "the first step")
    family = psutil.Process(started.process.pid).children(recursive=True)
    assert len(family) >= 4  # two ranks, each with a loader worker
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(10)
    eventually(lambda: not any(each.is_running() for each in family), 30, "the end of all workers")
    assert runner.json("status", "gone", "--json")["state"] == "dead"
    again = runner.start("--nproc", "2", "--name", "gone", SMALL, "--total", "4000", "--pace", "0.02")
    eventually(lambda: len(of(runner, "gone", events.StepsBegan)) == 2, 60, "the run to go on")
    assert again.process.poll() is None


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
    eventually(lambda: started.out.read_text().count("started") == 2, 30, "both ranks to start theirs")
    family = psutil.Process(started.process.pid).children(recursive=True)
    assert len(family) > 40
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(10)
    eventually(lambda: not any(each.is_running() for each in family), 30, "the end of all of them")


@pytest.mark.slow
def test_two_launchers_never_share_a_run_directory(runner: Runner) -> None:
    first = runner.start("--name", "mine", SMALL, "--total", "4000", "--pace", "0.02")
    eventually(lambda: of(runner, "mine", events.StepsBegan), 60, "the first step")
    second = runner.run("--name", "mine", SMALL)
    assert second.code == 2, second
    assert "in use by another launcher" in second.err
    assert f"pid {first.process.pid}" in second.err


@pytest.mark.slow
def test_fresh_keeps_the_earlier_run_aside(runner: Runner) -> None:
    assert runner.run("--name", "twice", SMALL, "--total", "6").code == 0
    result = runner.run("--name", "twice", "--fresh", SMALL, "--total", "6")
    assert result.code == 0, result
    assert "starts fresh" in result.err
    asides = list((runner.cwd / "runs").glob("twice.aside-*"))
    assert len(asides) == 1
    assert (asides[0] / "checkpoints" / "LATEST").is_file()


@pytest.mark.slow
def test_fresh_in_a_shared_root_never_resumes_what_was_there(runner: Runner) -> None:
    root = runner.cwd / "root"
    command = ("--name", "rooted", "--set", f"checkpoint.root={root}", SMALL, "--total", "6")
    assert runner.run(*command).code == 0
    result = runner.run("--fresh", *command)
    assert result.code == 0, result
    assert "starts fresh" in result.err
    foreign = runner.run("--name", "other", "--set", f"checkpoint.root={root}", SMALL)
    assert foreign.code == 2, foreign
    assert "holds the run 'rooted'" in foreign.err


@pytest.mark.slow
def test_another_total_is_refused_and_can_be_allowed(runner: Runner) -> None:
    assert runner.run("--name", "longer", SMALL, *STOPS).code == 75
    refused = runner.run("--name", "longer", SMALL, "--total", "200")
    assert refused.code == 2, refused
    assert "a run of 4,000 steps, and the script now asks for 200" in refused.err
    assert "Traceback" not in refused.err
    allowed = runner.run("--name", "longer", "--allow-new-total", SMALL, "--total", "200")
    assert allowed.code == 0, allowed
    assert runner.json("status", "longer", "--json")["step"] == 200


@pytest.mark.slow
def test_shapes_that_do_not_fit_are_named(runner: Runner) -> None:
    assert runner.run("--name", "shape", SMALL, *STOPS).code == 75
    before = runner.json("ckpt", "ls", "shape", "--json")
    result = runner.run("--nproc", "2", "--name", "shape", SMALL, "--total", "4000", "--width", "4")
    assert result.code == 2, result
    assert "weight: [1, 4] in the script, [1, 8] in the checkpoint" in result.err
    assert result.err.count("weight: [1, 4]") == 2  # once as it happens and once on the last screen, not once a rank
    assert runner.json("ckpt", "ls", "shape", "--json") == before


@pytest.mark.slow
def test_a_damaged_commit_is_passed_over_and_none_left_is_an_error(runner: Runner) -> None:
    assert runner.run("--name", "hurt", SMALL, *STOPS).code == 75
    rows = runner.json("ckpt", "ls", "hurt", "--json")["checkpoints"]
    ckpt = runner.run_dir("hurt").checkpoints / "ckpt"
    flip_a_byte(ckpt / rows[0]["name"] / "r00000.0.safetensors")
    result = runner.start("--name", "hurt", SMALL, "--total", "4000", "--pace", "0.02")
    eventually(lambda: len(of(runner, "hurt", events.StepsBegan)) == 2, 60, "the run to go on")
    result.process.send_signal(signal.SIGTERM)
    result = result.wait(40)
    assert result.code == 75, result
    assert "marked bad" in result.err
    assert f"resumes from step {rows[1]['step']}" in result.err

    for each in ckpt.iterdir():
        (each / "MANIFEST.json").write_bytes(b"{}")
    lost = runner.run("--name", "hurt", SMALL, "--total", "4000")
    assert lost.code == 2, lost
    assert "none that can be used" in lost.err
    assert "--fresh" in lost.err


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", ["a file", pytest.param("read-only", marks=pytest.mark.slow)])
def test_a_root_that_cannot_be_written_is_refused_before_anything_is(runner: Runner, place: str) -> None:
    root = runner.cwd / "taken"
    if place == "a file":
        root.write_text("something else")
    else:
        root = "/proc/ftrun-root"
    result = runner.run("--name", "nowhere", "--set", f"checkpoint.root={root}", SMALL)
    assert result.code == 2, result
    assert "taken" in result.err or "ftrun-root" in result.err
    assert not runner.run_dir("nowhere").path.exists()


@pytest.mark.slow
def test_alone_under_python_and_under_plain_torchrun(runner: Runner) -> None:
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
    assert begun == [0, 10]
    done = runner.python(*under, env=env)
    assert done.code == 0, done
    assert weights(done.out) == weights(runner.run("--nproc", "2", SMALL).out)


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

    (runner.cwd / "job.yaml").write_text(f"name: typo\nscript: {SMALL}\ncallbacks: [hoks]\n")
    missing = runner.run("-c", "job.yaml")
    assert missing.code == 2, missing
    assert "no module 'hoks'" in missing.err


@pytest.mark.slow
def test_checkpoints_that_are_gone_are_never_a_quiet_fresh_start(runner: Runner) -> None:
    assert runner.run("--name", "lost", SMALL, *STOPS).code == 75
    (runner.run_dir("lost").checkpoints).rename(runner.cwd / "moved")
    result = runner.run("--name", "lost", SMALL, "--total", "4000")
    assert result.code == 2, result
    assert "there is no checkpoint in" in result.err
    assert len(of(runner, "lost", events.AttemptStarted)) == 1
    (runner.cwd / "moved").rename(runner.run_dir("lost").checkpoints)
    again = runner.start("--name", "lost", SMALL, "--total", "4000", "--pace", "0.02")
    eventually(lambda: len(of(runner, "lost", events.StepsBegan)) == 2, 60, "the run to go on")
    again.process.send_signal(signal.SIGTERM)
    assert again.wait(40).code == 75
    assert of(runner, "lost", events.StepsBegan)[-1].event.step > 0


@pytest.mark.slow
def test_a_script_that_leaves_with_75_but_no_commit_is_told_so(runner: Runner) -> None:
    script = runner.cwd / "leaves.py"
    script.write_text("import sys\nsys.exit(75)\n")
    result = runner.run(script)
    assert result.code == 75
    assert "left with code 75, without a commit" in result.err


@pytest.mark.slow
def test_a_plain_script_that_falls_is_restarted_and_nothing_is_made_up(runner: Runner) -> None:
    (runner.cwd / "job.yaml").write_text(
        f"name: plain\nscript: {SCRIPTS / 'plain_optimizer.py'}\nfaults: [{{at_step: 30, rank: 0, do: kill}}]\n"
    )
    result = runner.run("-c", "job.yaml")
    assert result.code == 0, result
    assert "where it resumes is its own business" in result.err
    assert "to repeat" not in result.err
    status = runner.json("status", "plain", "--json")
    assert (status["restarts"], status["lost_steps"], status["seconds"]["repeating"]) == (1, 0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "gone"])
def test_damaged_epoch_records_hide_no_commit(runner: Runner, damage: str) -> None:
    assert runner.run("--name", "epochs", SMALL, *STOPS).code == 75
    records = runner.run_dir("epochs").checkpoints / "epochs"
    for record in records.iterdir():
        record.write_bytes(b"") if damage == "empty" else record.unlink()
    again = runner.start("--name", "epochs", SMALL, "--total", "4000", "--pace", "0.02")
    eventually(lambda: len(of(runner, "epochs", events.StepsBegan)) == 2, 60, "the run to go on")
    assert of(runner, "epochs", events.StepsBegan)[-1].event.step > 0
    assert of(runner, "epochs", events.AttemptStarted)[-1].event.epoch == 2  # no number is used twice
    again.process.send_signal(signal.SIGTERM)
    assert again.wait(40).code == 75


@pytest.mark.slow
def test_leaving_early_with_code_0_is_not_finishing(runner: Runner) -> None:
    script = runner.cwd / "limit.py"
    script.write_text(
        "import sys, torch, ftrun\n"
        "@ftrun.entrypoint(every=5)\n"
        "def main(ft):\n"
        "    for step in ft.steps(total=40):\n"
        "        if step == 17 and ft.resume is None:\n"
        "            sys.exit(0)\n"
        "main()\n"
    )
    first = runner.run("--name", "limit", script)
    assert first.code == 0, first
    assert "left before its end; the same command continues" in first.err
    second = runner.run("--name", "limit", script)
    assert second.code == 0, second
    assert "resumes from step 15" in second.err
    assert "is finished" in runner.run("--name", "limit", script).err


@pytest.mark.slow
def test_a_signal_to_every_process_at_once_is_one_request(runner: Runner) -> None:
    started = runner.start("--nproc", "2", "--name", "group", SMALL, "--total", "4000", "--pace", "0.02")
    eventually(lambda: of(runner, "group", events.Committed), 60, "a first commit")
    ranks = of(runner, "group", events.AttemptStarted)[-1].event.pids
    for pid in (started.process.pid, *ranks.values()):
        os.kill(pid, signal.SIGTERM)
    result = started.wait(40)
    assert result.code == 75, result
    assert "saved and stopped on SIGTERM" in result.err
    assert of(runner, "group", events.StepsEnded)[-1].event.step == of(runner, "group", events.Committed)[-1].event.step


@pytest.mark.slow
def test_a_stop_before_there_is_a_checkpoint_is_the_signals_own_code(runner: Runner) -> None:
    script = runner.cwd / "slow.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    started = runner.start("--name", "early", script)
    eventually(lambda: "here" in started.out.read_text(), 30, "the script to start")
    started.process.send_signal(signal.SIGTERM)
    result = started.wait(40)
    assert result.code == 143, result
    assert "stopped by SIGTERM" in result.err


FULL = """
mount -t tmpfs -o size=2m none "$1"
( until [ -e "$1/LATEST" ]; do sleep 0.02; done
  dd if=/dev/zero of="$1/fill" bs=4k 2>/dev/null
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
    command = ("--nproc", "2", "--name", "full", "--set", f"checkpoint.root={root}", SMALL, "--total", "12")
    command += ("--pace", "0.2")  # the disk must be full before the last save
    started = subprocess.run(
        ["unshare", "-m", "bash", "-c", FULL, "-", root, events_file, sys.executable, "-m", "ftrun", *command],
        cwd=runner.cwd,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert started.returncode == 0, started.stderr
    assert "checkpoints wait for" in started.stderr
    assert of(runner, "full", events.Committed)[-1].event.step == 12


@pytest.mark.slow
def test_a_fixed_port_meets_no_stale_keys(runner: Runner) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    faults = ", ".join(f"{{at_step: {step}, rank: 1, do: kill}}" for step in (7, 12))
    (runner.cwd / "job.yaml").write_text(
        f"name: port\nscript: {SMALL}\nargs: [--total, 15, --pace, 0.02]\nfaults: [{faults}]\n"
        f"launch: {{nproc_per_node: 2, master_port: {port}}}\n"
    )
    result = runner.run("-c", "job.yaml", timeout=100)
    assert result.code == 0, result
    falls = of(runner, "port", events.Failed)
    assert [fall.event.exit_code for fall in falls] == [-9, -9]


@pytest.mark.slow
def test_work_after_the_loop_is_not_skipped_by_a_stop(runner: Runner) -> None:
    script = runner.cwd / "tail.py"
    script.write_text(
        "import sys, time, torch, ftrun\n"
        "@ftrun.entrypoint(every=5)\n"
        "def main(ft):\n"
        "    for step in ft.steps(total=10):\n"
        "        pass\n"
        "    print('tail', flush=True)\n"
        "    if ft.resume is None:\n"
        "        time.sleep(60)\n"
        "    print('done', flush=True)\n"
        "main()\n"
    )
    command = ("--name", "tail", "--set", "signals.grace=1s", script)
    first = runner.start(*command)
    eventually(lambda: "tail" in first.out.read_text(), 60, "the end of the loop")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(40).code == 75
    second = runner.run(*command)
    assert second.code == 0, second
    assert "done" in second.out
