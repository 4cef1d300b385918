"""The promise of the whole project: a run that is killed again and again ends with exactly the losses and weights of
the run that was never killed."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest
from conftest import SCRIPTS, Runner, Started, eventually

from ftrun import events

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING = SCRIPTS / "everything.py"
TOTAL = 210
ACCUMULATE = 4  # as in the script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def outcome(folder: Path) -> tuple[list[dict[int, str]], list[str]]:
    """Losses by step, for each rank, and the digests of the weights; a step that was done twice has one loss."""
    losses = []
    for rank in range(2):
        seen: dict[int, str] = {}
        for line in (folder / f"losses-{rank}.txt").read_text().splitlines():
            step, loss = line.split()
            assert seen.setdefault(int(step), loss) == loss, f"rank {rank}, step {step} came out differently"
        losses.append(seen)
    return losses, [(folder / f"digest-{rank}.txt").read_text() for rank in range(2)]


def train(runner: Runner, name: str, *options: str) -> Started:
    folder = runner.cwd / name
    folder.mkdir(exist_ok=True)
    return runner.start(
        "--nproc", "2", "--name", name, "--set", "restart.no_progress=30", "--set", "restart.backoff.first=1ms",
        EVERYTHING, "--total", str(TOTAL), "--out", folder, *options,
    )  # fmt: skip


def stepped(runner: Runner) -> int:
    """The last attempt that has completed a step."""
    records = runner.events("killed")
    return max((record.attempt for record in records if isinstance(record.event, events.Step)), default=0)


def next_attempt(runner: Runner, after: int, what: str) -> dict[str, int]:
    """Process ids by rank of the attempt that follows ``after`` others, once it is there."""
    started = eventually(lambda: attempts(runner, "killed")[after:], 60, what)
    return started[-1].pids


def attempts(runner: Runner, name: str) -> list[events.AttemptStarted]:
    records = runner.events(name)
    return [record.event for record in records if isinstance(record.event, events.AttemptStarted)]


@pytest.mark.parametrize(("workers", "kills"), [(0, 5), (2, 5)])
def test_ten_kills_leave_no_trace_in_losses_or_weights(runner: Runner, workers: int, kills: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    calm = train(runner, "calm").wait(120)
    assert calm.code == 0, calm
    expected = outcome(runner.cwd / "calm")
    assert len(expected[0][0]) == TOTAL

    job = train(runner, "killed", "--pace", "0.08", "--workers", str(workers))
    eventually(lambda: stepped(runner), 60, "a first step: what dies before it is not restarted")
    done = 0
    while done < kills and job.process.poll() is None:
        pids = next_attempt(runner, done, f"attempt {done + 1} (seed {seed})")
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0.2, 2.5))  # during imports and restore
        else:
            eventually(
                lambda attempt=done + 1: stepped(runner) >= attempt, 60, f"steps of attempt {done + 1} (seed {seed})"
            )
            time.sleep(dice.uniform(0.0, 2.5))  # during a step, a save or its commit
        try:
            os.kill(pids[str(dice.randrange(2))], signal.SIGKILL)
        except ProcessLookupError:
            break
        done += 1
    result = job.wait(240)
    assert result.code == 0, f"seed {seed}\n{result}"
    assert done == kills, f"seed {seed}: only {done} kills before the end"
    assert outcome(runner.cwd / "killed") == expected, f"seed {seed}"
    resumed = [each.resume_step for each in attempts(runner, "killed")]
    assert any(step % ACCUMULATE for step in resumed), f"seed {seed}: no resume between backward and step: {resumed}"


def test_as_many_restarts_as_kills_in_a_row(runner: Runner) -> None:
    kills = int(os.environ.get("FTRUN_TEST_KILLS", "12"))
    job = runner.start("--nproc", "2", "--name", "often", SCRIPTS / "often.py", env={"OFTEN": str(kills)})
    result = job.wait(30 + 10 * kills)
    assert result.code == 0, result
    falls = [record.event for record in runner.events("often") if isinstance(record.event, events.Failed)]
    assert len(falls) == kills
    assert all(fall.restart and fall.exit_code == -signal.SIGKILL for fall in falls)
    assert len(attempts(runner, "often")) == kills + 1
    assert "finished" in result.err
