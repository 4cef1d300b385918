"""What stock torchrun gets wrong on one node, one test each: the same command under ftrun ends well.

The rows are those of torch 2.13's agent: stale keys, log directories that are removed, half a minute for a peer that
ignores SIGTERM, orphans, a torn error file that ends the launcher, ranks that leave early, stores of one's own.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from conftest import eventually, held_port

from ftrun import events

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Runner

pytestmark = pytest.mark.slow

_NO_STEPS = """
    import os, sys, time
    RANK, LIFE = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
_STEPS = f"""{_NO_STEPS}
    import torch
    def step(count=1):
        for _ in range(count):
            weight.grad = torch.ones(2)
            optimizer.step()
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step()
"""
"""With a step made, a failure is one that may be tried again."""


def _script(runner: Runner, name: str, text: str, start: str = _STEPS) -> Path:
    path = runner.cwd / name
    path.write_text(textwrap.dedent(start) + textwrap.dedent(text))
    return path


def _of(runner: Runner, name: str, kind: type[Any]) -> list[Any]:
    return [record.event for record in runner.events(name) if isinstance(record.event, kind)]


def test_a_peer_that_ignores_sigterm_or_is_stopped_does_not_hold_up_the_restart(runner: Runner) -> None:
    script = _script(
        runner,
        "deaf.py",
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"there-{LIFE}-{RANK}", "w").close()
        while not os.path.exists(f"there-{LIFE}-{1 - RANK}"):
            time.sleep(0.01)
        if LIFE == 0:
            if RANK == 1:
                os.kill(os.getpid(), 9)
            time.sleep(600)
        if LIFE == 1:
            if RANK == 1:
                sys.exit(7)
            os.kill(os.getpid(), 19)
        """,
        _NO_STEPS,
    )
    result = runner.run("--nproc", "2", "--max-restarts", "2", "--name", "deaf", script, timeout=200)
    assert result.code == 0, result
    falls = [each for each in runner.events("deaf") if isinstance(each.event, events.Failed)]
    assert [(each.event.failed_rank, each.event.exit_code) for each in falls] == [(1, -9), (1, 7)]
    starts = [each.time for each in runner.events("deaf") if isinstance(each.event, events.AttemptStarted)]
    for fall, start in zip(falls, starts[1:], strict=True):
        assert start - fall.time < 28  # torchrun waits for 30 s before it kills


def test_an_error_file_that_holds_anything_is_evidence(runner: Runner) -> None:
    contents = [b'{"message": {"mess', b"\x00\xff\xfe" * 1000, b'{"message": ' + b"[" * 200_000, b"9" * (20 << 20)]
    for life, content in enumerate(contents):
        (runner.cwd / f"content{life}").write_bytes(content)
    script = _script(
        runner,
        "odd.py",
        """
        if os.path.exists(f"content{LIFE}"):
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb") as file:
                file.write(open(f"content{LIFE}", "rb").read())
            sys.exit(9 + LIFE)
        """,
        _NO_STEPS,
    )
    result = runner.run("--name", "odd", "--max-restarts", "4", script, timeout=250)
    assert result.code == 0, result
    assert [each.exit_code for each in _of(runner, "odd", events.Failed)] == [9, 10, 11, 12]
    assert "Traceback" not in result.err, result


def test_what_a_dead_rank_started_is_gone_before_the_next_attempt(runner: Runner) -> None:
    script = _script(
        runner,
        "parent.py",
        """
        import subprocess
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        if LIFE == 0:
            child = subprocess.Popen(sleeper)
            apart = subprocess.Popen(sleeper, start_new_session=True)
            with open(f"pids{RANK}", "w") as file:
                file.write(f"{child.pid} {apart.pid}")
            while not os.path.exists("pids0") or not os.path.exists("pids1"):
                time.sleep(0.01)
            if RANK == 1:
                os.kill(os.getpid(), 9)
            time.sleep(600)
        import psutil
        pids = [int(pid) for rank in (0, 1) for pid in open(f"pids{rank}").read().split()]
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        print("alive", alive)
        """,
        _NO_STEPS,
    )
    result = runner.run("--nproc", "2", "--max-restarts", "1", "--name", "parent", script, timeout=200)
    assert result.code == 0, result
    assert result.out.count("alive []") == 2, result


def test_a_daemon_of_a_rank_that_ended_well_goes_on_and_is_named(runner: Runner) -> None:
    script = _script(
        runner,
        "daemonise.py",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open("daemon.tmp", "w") as file:
                    file.write(str(os.getpid()))
                os.rename("daemon.tmp", "daemon")
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not os.path.exists("daemon"):
            time.sleep(0.01)
        """,
        _NO_STEPS,
    )
    result = runner.run("--name", "daemonise", script, timeout=200)
    pid = int((runner.cwd / "daemon").read_text())
    try:
        assert result.code == 0, result
        assert f"left process {pid} running" in result.err, result
        assert psutil.pid_exists(pid)
    finally:
        psutil.Process(pid).kill()


def test_a_rank_that_leaves_while_the_others_stand_still_is_noticed(runner: Runner) -> None:
    script = _script(
        runner,
        "leaver.py",
        """
        step(5)
        if LIFE == 0:
            if RANK == 0:
                sys.exit(0)
            time.sleep(600)
        open(f"there-{RANK}", "w").close()  # a slow start of one of them must not look the same
        while not os.path.exists(f"there-{1 - RANK}"):
            time.sleep(0.01)
        """,
    )
    result = runner.run("--nproc", "2", "--name", "leaver", "--set", "watch.end=6s", script, timeout=200)
    assert result.code == 0, result
    (failed,) = _of(runner, "leaver", events.Failed)
    assert (failed.failed_rank, failed.cause) == (0, "left early")


def test_the_first_cause_is_named_and_not_the_lowest_rank(runner: Runner) -> None:
    script = _script(
        runner,
        "tie.py",
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if LIFE == 0:
            if RANK == 1:
                raise ValueError("the cause")
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()  # for the same reason as below
        """,
    )
    result = runner.run("--nproc", "2", "--name", "tie", script, timeout=200)
    assert result.code == 0, result
    (failed,) = _of(runner, "tie", events.Failed)
    assert failed.failed_rank == 1
    assert "the cause" in failed.message


def test_every_attempts_failure_and_logs_are_kept_apart_and_on_the_last_screen(runner: Runner) -> None:
    script = _script(
        runner,
        "often.py",
        """
        print("life", LIFE)
        step(LIFE)
        if LIFE < 2:
            raise ValueError(f"reason {LIFE}")
        """,
    )
    result = runner.run("--name", "often", "--log-dir", "logs", "--redirects", "1", script, timeout=200)
    assert result.code == 0, result
    screen = result.err.rpartition("✓ finished")[2]
    for life in range(2):
        assert f"reason {life}" in screen, result
        directory = runner.run_dir("often").postmortem(life + 1)
        assert f"reason {life}" in (directory / "report.md").read_text()
        facts = json.loads((directory / "failure.json").read_text())
        assert facts["failure"]["kind"] == "code error"
        assert facts["restart"]["total"] > 0
    logs = sorted(str(path.relative_to(runner.cwd / "logs")).partition("/")[2] for path in runner.cwd.glob("logs/*/*"))
    assert logs == ["attempt_0", "attempt_1", "attempt_2"]
    for life in range(3):
        (log,) = runner.cwd.glob(f"logs/*/attempt_{life}/0/stdout.log")
        assert log.read_text() == f"life {life}\n"


def test_a_store_of_the_scripts_own_is_hosted_by_rank_0(runner: Runner) -> None:
    with held_port() as first, held_port() as second:
        script = _script(
            runner,
            "store.py",
            f"""
            import datetime as dt, torch, torch.distributed as dist
            wait = dt.timedelta(seconds=30)
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{second}")
            for more in (
                {{"init_method": "tcp://localhost:{first}", "rank": RANK, "world_size": 2}},
                {{}},
            ):
                dist.init_process_group("gloo", timeout=wait, **more)
                total = torch.ones(1)
                dist.all_reduce(total)
                print("sum", total.item())
                # Without it the connections' thread may be torn down under torch's feet when the other rank is first.
                dist.destroy_process_group()
            """,
            _NO_STEPS,
        )
        result = runner.run("--nproc", "2", "--name", "store", script, timeout=200)
    assert result.code == 0, result
    assert result.out.count("sum 2.0") == 4, result


def test_an_interpreter_that_does_not_exist(runner: Runner) -> None:
    script = _script(runner, "any.py", "", _NO_STEPS)
    result = runner.run("--name", "none", script, env={"PYTHON_EXEC": "/nowhere/python"}, timeout=200)
    assert result.code == 2, result
    assert "/nowhere/python" in result.err
    assert "PYTHON_EXEC" in result.err
    assert "Traceback" not in result.err, result


def test_names_with_spaces_quotes_and_newlines(runner: Runner) -> None:
    (runner.cwd / "odd 'na\"me\n").mkdir()
    script = _script(runner, "odd 'na\"me\n/a b\n.py", "print(sys.argv[1:])", _NO_STEPS)
    arguments = ["a b", "'", '"', "x\ny", "$HOME", "--nproc"]
    result = runner.run("--name", "names", script, *arguments, timeout=200)
    assert result.code == 0, result
    assert result.out == f"{arguments}\n"


def test_usr1_before_anybody_listens_is_said_and_survived(runner: Runner) -> None:
    script = _script(
        runner,
        "quiet.py",
        """
        open("running", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        """,
        _NO_STEPS,
    )
    started = runner.start("--name", "quiet", script)
    eventually((runner.cwd / "running").exists, what="the script runs")
    started.process.send_signal(10)
    eventually(lambda: "SIGUSR1 is ignored" in started.err.read_text(), what="a word about the signal")
    (runner.cwd / "go").touch()
    result = started.wait(60)
    assert result.code == 0, result
