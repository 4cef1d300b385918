"""The promise of the whole project: a run that is killed again and again ends with exactly the losses and weights of
the run that was never killed."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import SCRIPTS, Runner, Started, eventually

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVERYTHING = SCRIPTS / "everything.py"
TOTAL = 130
ACCUMULATE = 4  # as in the script
LAST = 20  # too

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


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[int, str]], list[str]]]:
    """What the run that nobody disturbs comes to."""
    runner = Runner(tmp_path_factory.mktemp("calm"))
    try:
        calm = train(runner, "calm").wait(300)
        assert calm.code == 0, calm
        made = outcome(runner.cwd / "calm")
        assert len(made[0][0]) == TOTAL
        yield made
    finally:
        runner.close()


def train(runner: Runner, name: str, *options: str, **more: Any) -> Started:
    folder = runner.cwd / name
    folder.mkdir(exist_ok=True)
    return runner.start(
        "--nproc", "2", "--name", name, "--set", "restart.no_progress=30", "--set", "restart.backoff.first=1ms",
        EVERYTHING, "--total", str(TOTAL), "--out", folder, *options, **more,
    )  # fmt: skip


def stepped(runner: Runner) -> int:
    """The last attempt that has completed a step."""
    records = runner.events("killed")
    return max((record.attempt for record in records if isinstance(record.event, events.Step)), default=0)


def done_steps(runner: Runner) -> int:
    """How many steps rank 0 has made, in all attempts together."""
    return len((runner.cwd / "killed" / "losses-0.txt").read_text().splitlines())


def held(runner: Runner) -> bool:
    """Whether all is done but the last steps, which begin when the test lets them."""
    return (runner.cwd / "killed" / "losses-0.txt").read_text().splitlines()[-1].startswith(f"{TOTAL - LAST} ")


def has_odd_commit(runner: Runner) -> bool:
    """Whether a commit lies between a backward and its optimizer step."""
    return any(
        record.event.step % ACCUMULATE
        for record in runner.events("killed")
        if isinstance(record.event, events.Committed)
    )


def next_attempt(runner: Runner, after: int, what: str) -> dict[str, int]:
    """Process ids by rank of the attempt that follows ``after`` others, once it is there."""
    started = eventually(lambda: attempts(runner, "killed")[after:], 60, what)
    return started[-1].pids


def attempts(runner: Runner, name: str) -> list[events.AttemptStarted]:
    records = runner.events(name)
    return [record.event for record in records if isinstance(record.event, events.AttemptStarted)]


def test_kills_leave_no_trace_in_losses_or_weights(
    runner: Runner, expected: tuple[list[dict[int, str]], list[str]]
) -> None:
    kills = 5
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    go = runner.cwd / "go"  # the run doesn't end before the last kill, however long this process is held up
    # With all that a run has, and what torch imports in any run.
    options = ("--pace", "0.06", "--workers", "2", "--go", str(go))
    job = train(runner, "killed", *options, standbys=True, compiler=True)
    eventually(lambda: stepped(runner), 60, "a first step: what dies before it is not restarted")
    done = 0
    while done < kills and job.process.poll() is None:
        pids = next_attempt(runner, done, f"attempt {done + 1} (seed {seed})")
        before = done_steps(runner)
        if done == 1:
            eventually(lambda: has_odd_commit(runner), 60, "a commit between a backward and an optimizer step")
        elif done == kills - 1 and not any(each.resume_step % ACCUMULATE for each in attempts(runner, "killed")):
            # This process was held up before its kills, and other commits had become the newest. There they are odd.
            eventually(lambda attempt=done + 1: stepped(runner) >= attempt and held(runner), 60, "the last steps")
        elif dice.random() < 0.2:
            time.sleep(dice.uniform(0.2, 1.2))  # during imports and restore
        else:
            more = before + dice.randrange(1, 21)

            def far_enough(more: int = more, attempt: int = done + 1) -> bool:
                return done_steps(runner) >= more or (stepped(runner) >= attempt and held(runner))

            eventually(far_enough, 60, f"steps of attempt {done + 1} (seed {seed})")
            time.sleep(dice.uniform(0.0, 0.1))  # during a step, a save or its commit
        try:
            os.kill(pids[str(dice.randrange(2))], signal.SIGKILL)
        except ProcessLookupError:
            break
        done += 1
    go.touch()
    result = job.wait(240)
    assert result.code == 0, f"seed {seed}\n{result}"
    assert done == kills, f"seed {seed}: only {done} kills before the end"
    assert outcome(runner.cwd / "killed") == expected, f"seed {seed}"
    resumed = [each.resume_step for each in attempts(runner, "killed")]
    assert any(step % ACCUMULATE for step in resumed), f"seed {seed}: no resume between backward and step: {resumed}"


def test_as_many_restarts_as_kills_in_a_row(runner: Runner) -> None:
    kills = int(os.environ.get("FTRUN_TEST_KILLS", "3"))
    env = {"OFTEN": str(kills)}
    job = runner.start("--nproc", "2", "--name", "often", SCRIPTS / "often.py", env=env, standbys=True)
    result = job.wait(60 + 20 * kills)
    assert result.code == 0, result
    falls = [record.event for record in runner.events("often") if isinstance(record.event, events.Failed)]
    assert len(falls) == kills
    assert all(fall.restart and fall.exit_code == -signal.SIGKILL for fall in falls)
    assert len(attempts(runner, "often")) == kills + 1
    assert "finished" in result.err
