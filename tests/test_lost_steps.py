"""A worker dies, and nothing is lost that all ranks had sealed in memory, though nobody had committed it yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from conftest import eventually

from ftrun import events

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = pytest.mark.slow

JOB = """
import os, sys, time, torch, ftrun
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import WorkerContract

def sealed(step):
    tier = Tier(Path(WorkerContract.from_environment(os.environ).tier))
    return any((seal.step, seal.rank) == (step, dist.get_rank()) for _, seal in tier.sealed())

@ftrun.entrypoint(every=4)
def main(ft):
    torch.manual_seed(1)
    model = torch.nn.Linear(512, 512)
    if sys.argv[1] == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())
    ft.track(model=model, optimizer=optimizer)
    for step in ft.steps(total=1000):
        optimizer.zero_grad()
        model(torch.full((4, 512), (step + 1) / 50)).square().mean().backward()
        optimizer.step()
        while step == 4 and not sealed(4):  # by another thread; the kill comes before the next step
            time.sleep(0.01)
        time.sleep(0.3)

main()
"""


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_no_step_before_the_last_snapshot_is_done_again(runner: Runner, layout: str) -> None:
    (runner.cwd / "train.py").write_text(JOB)
    # Its three megabytes take minutes to commit.
    (runner.cwd / "job.yaml").write_text(
        "checkpoint: {drain_limit: 20kB}\nstandby: {enabled: false}\nfaults: [{at_step: 6, rank: 1, do: kill}]\n"
    )
    runner.start("-c", "job.yaml", "--nproc", "2", "--name", "job", "train.py", layout)

    def recovered() -> list[events.Event]:
        found = [each.event for each in runner.events("job")]
        return found if any(isinstance(each, events.Recovered) for each in found) else []

    found = eventually(recovered, 90, "training goes on")
    _, second = (each for each in found if isinstance(each, events.AttemptStarted))
    (fell,) = (each for each in found if isinstance(each, events.Failed))
    assert (fell.step, second.resume_step, fell.lost_steps) == (5, 4, 1)
    assert not any(isinstance(each, events.Committed) for each in found), "a commit would have done as well"
