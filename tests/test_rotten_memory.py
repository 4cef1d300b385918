"""A snapshot in memory that is not what was sealed, under the launcher: nobody resumes from it, and the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from test_engine import let_go, tier_of

from ftrun import events
from ftrun.checkpoint.keeper.faults import VARIABLE

if TYPE_CHECKING:
    from conftest import Result, Runner

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "rotten.py"
SUM = "sum 0x1.4070000000000p+10"


def run(runner: Runner, nproc: int, *options: str) -> tuple[Result, list[events.AttemptStarted]]:
    # The keeper stops before it drains the second save, until two attempts have looked for it: it is in memory alone.
    late = {VARIABLE: "draining@2:stop"}
    running = runner.start("--nproc", str(nproc), "--name", "rotten", SCRIPT, *options, env=late)
    eventually(lambda: len(started(runner)) == 3, 100, "the third attempt")
    let_go(tier_of(runner, "rotten"))
    result = running.wait(110)
    assert result.code == 0, result
    assert result.out.strip() == SUM
    return result, started(runner)


def started(runner: Runner) -> list[events.AttemptStarted]:
    found = [each.event for each in runner.events("rotten")]
    return [each for each in found if isinstance(each, events.AttemptStarted)]


def test_bytes_that_changed_in_one_ranks_memory_send_all_ranks_to_the_commit_before(runner: Runner) -> None:
    result, attempts = run(runner, 2, "--how", "fsdp", "--damage", "zero", "--rank", "1")
    assert [each.resume_step for each in attempts] == [0, 4, 2]
    assert "r00001.0.safetensors chunk 0" in result.err
    assert "fails its checksum in this node's memory, and it isn't committed" in result.err
    failed = [each.event for each in runner.events("rotten") if isinstance(each.event, events.SaveFailed)]
    assert [each.step for each in failed] == [4], "the keeper has not committed it either"
    assert "has changed since it was written: chunk 0" in failed[0].error


def test_a_snapshot_that_made_way_while_the_workers_started_is_passed_over(runner: Runner) -> None:
    result, attempts = run(runner, 1, "--damage", "unseal")
    assert [each.resume_step for each in attempts] == [0, 4, 2]
    assert "not all of its ranks have sealed it; it isn't committed either (MANIFEST.json is missing)" in result.err
    assert "the snapshot in memory is passed over, the newest commit is used" in result.err
