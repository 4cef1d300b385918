"""Whole runs over data that is read in order, killed with -9 and resumed in worlds of other sizes."""

from __future__ import annotations

import ast
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
from conftest import SCRIPTS, Runner, Started, eventually
from iterable_kit import Run, Sharded, Whole, WithState

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.layout import Root

if TYPE_CHECKING:
    from pathlib import Path

TOTAL, HELD = 40, 15

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start(runner: Runner, world: int, *options: str, total: int = TOTAL) -> Started:
    return runner.start(
        "--nproc", str(world), "--name", "streams",
        "--set", "restart.backoff.first=1ms", "--set", "watch.enabled=false",  # ranks that are held are no hang
        SCRIPTS / "streams.py", "--out", runner.cwd, "--total", str(total), *options,
    )  # fmt: skip


def rows(folder: Path) -> dict[int, dict[int, dict[int, list[Any]]]]:
    """What was trained on, by step, world size and rank; a step that was made again came out the same."""
    found: dict[int, dict[int, dict[int, list[Any]]]] = {}
    for path in sorted(folder.glob("rows-*.txt")):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, world, batch = line.split("\t")
                seen = found.setdefault(int(step), {}).setdefault(int(world), {})
                assert seen.setdefault(rank, ast.literal_eval(batch)) == ast.literal_eval(batch), line
    return found


def batches(folder: Path) -> list[list[Any]]:
    """Global batches, once each; all worlds that made a step had the same."""
    made = []
    for _, worlds in sorted(rows(folder).items()):
        together = [
            [row for _, part in sorted(ranks.items()) for row in part]
            for world, ranks in worlds.items()
            if len(ranks) == world
        ]
        assert together
        assert all(each == together[0] for each in together)
        made.append(together[0])
    return made


def pids(runner: Runner, attempt: int) -> dict[str, int]:
    def started() -> list[dict[str, int]]:
        found = [each.event for each in runner.events("streams") if isinstance(each.event, events.AttemptStarted)]
        return [each.pids for each in found[attempt:]]

    found: dict[str, int] = eventually(started, 120, f"attempt {attempt}")[0]
    return found


def committed(runner: Runner) -> list[int]:
    found = reader.attempts(Root.open(runner.run_dir("streams").checkpoints))
    return [each.name.step for each in found if each.manifest]


def hold(runner: Runner, step: int) -> None:
    """Let the ranks get no further for now."""
    (runner.cwd / "hold.new").write_text(str(step))
    (runner.cwd / "hold.new").replace(runner.cwd / "hold")


def killed(runner: Runner, world: int, *options: str, kills: int = 2) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    hold(runner, HELD)  # however late the kill comes, the run isn't over before
    job = start(runner, world, *options)
    for number in range(kills):
        ranks = pids(runner, number)
        last = HELD * number
        eventually(lambda last=last: max(committed(runner), default=0) > last, 120, "a commit")
        os.kill(ranks[str(dice.randrange(world))], signal.SIGKILL)
        hold(runner, HELD * (number + 2))
    (runner.cwd / "hold").unlink()
    result = job.wait(200)
    assert result.code == 0, result
    assert (
        len([each for each in runner.events("streams") if isinstance(each.event, events.AttemptStarted)]) == kills + 1
    )


def test_killed_with_workers_and_states(runner: Runner) -> None:
    killed(runner, 2, "--kind", "state", "--workers", "2", "--pace", "0.1")
    assert batches(runner.cwd) == Run(Sharded(WithState), 1, 0, virtual_shards=16, seed=0).train(TOTAL)


def test_killed_without_shards(runner: Runner) -> None:
    killed(runner, 2, "--kind", "whole", "--workers", "1", "--pace", "0.1")
    assert batches(runner.cwd) == Run(Whole, 2, 0, seed=0, shuffle=False).train(TOTAL)


def test_goes_on_in_worlds_of_other_sizes_from_the_states_of_all_ranks(runner: Runner) -> None:
    for world, step in ((2, 10), (3, 20), (1, 30), (2, -1)):  # with a checkpoint every 5 steps
        done = start(runner, world, "--kind", "state, known", "--leave-at", str(step)).wait(120)
        assert "Error" not in done.err, done
        assert committed(runner)[0] == (TOTAL if step < 0 else step)
    straight = Run(Sharded(WithState, [200] * 16, known=True), 1, 0, virtual_shards=16, seed=0).train(TOTAL)
    assert batches(runner.cwd) == straight


def test_a_loader_of_torchdata_that_is_tracked(runner: Runner) -> None:
    pytest.importorskip("torchdata")
    killed(runner, 2, "--kind", "torchdata", "--workers", "2", "--pace", "0.1", kills=1)
    seen = rows(runner.cwd)
    calm = Runner(runner.cwd / "calm")
    calm.cwd.mkdir()
    try:
        assert start(calm, 2, "--kind", "torchdata", "--workers", "2").wait(120).code == 0
        assert rows(calm.cwd) == seen
    finally:
        calm.close()
