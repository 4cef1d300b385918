"""A restart says where the bytes of its checkpoint came from, and leaves the keeper of the next one for last."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import pytest

from ftrun import events
from ftrun.oom import GAP

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = pytest.mark.slow

_SCRIPT = """
    import json
    import os
    import time
    from pathlib import Path

    import torch

    import ftrun
    from ftrun.checkpoint.keeper.beat import Beat
    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.contract import WorkerContract


    def score(pid):
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


    @ftrun.entrypoint(every=4)
    def main(ft):
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ft.track(model=model, optimizer=optimizer)
        contract = WorkerContract.from_environment(os.environ)
        for step in ft.steps(total=9):
            model(torch.ones(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5:  # it is killed before the next one: what another thread seals has to be there by then
                while 4 not in [seal.step for _, seal in Tier(Path(contract.tier)).sealed()]:
                    time.sleep(0.01)
        keeper, _ = Beat(Tier(Path(contract.tier))).read()
        Path("scores.json").write_text(json.dumps([score(os.getpid()), score(keeper), score(contract.agent)]))


    main()
"""
_SIZE = 256 * 256 * 4


def test_a_restart_says_where_its_checkpoint_came_from(runner: Runner) -> None:
    (runner.cwd / "job.py").write_text(textwrap.dedent(_SCRIPT))
    fault = "faults=[{at_step: 7, rank: 0, do: kill}]"
    done = runner.run("--name", "near", "--set", fault, "job.py")
    assert done.code == 0, done
    found = [each.event for each in runner.events("near")]
    (restored,) = [each for each in found if isinstance(each, events.Restored)]
    (recovered,) = [each for each in found if isinstance(each, events.Recovered)]
    assert restored.step == 4
    assert restored.read.keys() == {"memory"}
    assert recovered.read == restored.read
    assert _SIZE < restored.read["memory"] < 3 * _SIZE, "random states lie in the same file"
    assert f" · read {restored.read['memory'] / 1000:.1f} kB from memory" in done.err
    shown = runner.json("status", "near", "--json")["memory"]
    assert shown == {
        "nodes": [],
        "restored": [
            {
                "node": 0,
                "host": "",
                "step": 4,
                "name": restored.checkpoint,
                "seconds": restored.seconds,
                "bytes": restored.read,
            }
        ],
    }
    assert " kB from memory" in runner.run("status", "near").out
    worker, keeper, launcher = json.loads((runner.cwd / "scores.json").read_text())
    assert worker - keeper >= min(GAP, 1000 - launcher), "the kernel ends a worker first"
