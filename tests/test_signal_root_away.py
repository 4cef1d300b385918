"""A signal that ends a run while its checkpoint root is away: the same command goes on later, and its code says so."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import eventually

from ftrun import events

if TYPE_CHECKING:
    from conftest import Runner

SCRIPT = Path(__file__).parent / "scripts" / "sealed.py"


@pytest.mark.slow
def test_a_root_that_is_away_at_a_signal_is_not_taken_for_an_empty_one(runner: Runner) -> None:
    file = runner.cwd / "job.yaml"
    file.write_text("signals: {grace: 1s}\nstandby: {enabled: false}\n")
    words = ("-c", file, "--nproc", "1", "--name", "away", SCRIPT, "--total", "200", "--pause", "0.05")
    started = runner.start(*words)

    def committed() -> bool:
        return any(isinstance(each.event, events.Committed) for each in runner.events("away"))

    eventually(committed, 60, "a commit")
    root = runner.run_dir("away").checkpoints
    root.rename(root.with_name("elsewhere"))
    started.process.send_signal(signal.SIGTERM)
    result = started.wait(60)
    root.with_name("elsewhere").rename(root)
    assert result.code == 75, result
    assert "before there was a checkpoint" not in result.err
    assert "the same command goes on from step" in result.err
