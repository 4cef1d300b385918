"""Kills one of its ranks in each of its first attempts, a step after a commit, and then ends well."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import ftrun
from ftrun.checkpoint.memory.outcomes import Outcomes
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import WorkerContract

if TYPE_CHECKING:
    from collections.abc import Callable

KILLS = int(os.environ["OFTEN"])


def wait_for(ft: ftrun.Session, condition: Callable[[], bool]) -> None:
    with ft.phase("save"):  # to the watch it is no step that hangs
        while not condition():
            time.sleep(0.01)


def drained(tier: Tier) -> bool:
    return all(slot.is_marked(slot.drained, seal.attempt) for slot, seal in tier.sealed())


def committed_at(tier: Tier, step: int) -> bool:
    return any(each.committed and each.step == step for each in Outcomes(tier).poll())


@ftrun.entrypoint(every=1)
def main(ft: ftrun.Session) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    ft.track(model=model, optimizer=optimizer)
    committed: list[int] = []
    ftrun.on("commit")(lambda checkpoint: committed.append(checkpoint.step))
    contract = WorkerContract.from_environment(os.environ)
    assert contract is not None
    tier, begun = Tier(Path(contract.tier)), ft.step
    doomed = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < KILLS
    for step in ft.steps(total=6 * KILLS + 10):
        # However long the keeper takes, it commits the first snapshot of this attempt before the steps run out: there
        # is room for that one, and the step after it ends when it is committed.
        if doomed and step == begun:
            wait_for(ft, lambda: drained(tier))
        if doomed and step == begun + 1:
            wait_for(ft, lambda: committed_at(tier, begun + 1))
        victim = step % 2 == ft.rank
        if doomed and committed and victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        parallel(torch.ones(2, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
