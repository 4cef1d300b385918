"""A run that has finished while its storage was away: its last state is in memory alone, and nothing of it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from conftest import Runner

# Takes one more checkpoint after its loop, when the storage is away, and doesn't wait for what becomes of it.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, ftrun
from ftrun.checkpoint.memory.tier import Tier

@ftrun.entrypoint(every=1000, process_group=False)
def main(ft):
    weight = torch.nn.Parameter(torch.zeros(3))
    ft.track(weight=torch.nn.ParameterList([weight]))
    print("begins at", ft.step, weight.tolist(), flush=True)
    for _ in ft.steps(total=3):
        weight.data += 1
    if ft.resume is None:
        attempts = Path("runs/last/checkpoints/ckpt")
        attempts.rename(attempts.with_name("away"))
        attempts.write_text("in the way")
        weight.data += 1
        ft.step_end()
        ft.save()
        deadline = time.monotonic() + 20
        while 4 not in [seal.step for _, seal in Tier.of(Path("runs/last"), 0).sealed()]:
            assert time.monotonic() < deadline, "no snapshot was sealed"
            time.sleep(0.01)
        os._exit(0)

main()
"""


@pytest.mark.slow
def test_a_finished_run_whose_last_state_is_in_memory_alone_asks_to_be_started_again(runner: Runner) -> None:
    (runner.cwd / "last.py").write_text(SCRIPT)
    run_dir = runner.run_dir("last")
    tier = Tier.of(run_dir.path, 0)
    command = ("--name", "last", "--nproc", "1", "last.py")
    left = runner.run("--set", "signals.grace=300ms", *command)  # it would be waited for in vain
    assert left.code == 75, left
    assert f"a snapshot is not committed yet: it stays in {tier.path}" in left.err
    assert "the same command goes on" in left.err
    assert "last  ■ left before its end; the same command continues" in left.err
    ended = [each.event for each in runner.events("last") if isinstance(each.event, events.RunEnded)]
    assert [(each.outcome, each.exit_code) for each in ended] == [("left", 75)]
    assert [seal.step for _, seal in tier.sealed() if seal.step > 3] == [4]

    attempts = run_dir.checkpoints / "ckpt"
    attempts.unlink()
    attempts.with_name("away").rename(attempts)
    again = runner.run(*command)
    assert again.code == 0, again
    assert "resumes from step 4" in again.err
    assert again.out.splitlines()[0] == "begins at 4 [4.0, 4.0, 4.0]"
    found = reader.attempts(Root.open(run_dir.checkpoints))
    assert max(each.name.step for each in found if each.status == "committed") == 4
    assert not tier.path.exists(), "nothing lies in memory alone any more"
