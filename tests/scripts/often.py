"""Kills one of its ranks in each of its first attempts, a step after a commit, and then ends well."""

from __future__ import annotations

import os
import signal

import torch

import ftrun

KILLS = int(os.environ["OFTEN"])


@ftrun.entrypoint(every=1)
def main(ft: ftrun.Session) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    ft.track(model=model, optimizer=optimizer)
    committed: list[int] = []
    ftrun.on("commit")(lambda checkpoint: committed.append(checkpoint.step))
    for step in ft.steps(total=6 * KILLS + 10):
        victim = step % 2 == ft.rank
        if committed and victim and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        parallel(torch.ones(2, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
