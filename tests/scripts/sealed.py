"""A small job with a state of a few megabytes, which takes a while to drain where the drain is limited."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import WorkerContract


def await_seals(step: int, ranks: int) -> None:
    """Of all ranks: one that goes on alone may be killed, and with it those that have not sealed theirs yet."""
    contract = WorkerContract.from_environment(os.environ)
    assert contract is not None
    while len([seal for _, seal in Tier(Path(contract.tier)).sealed() if seal.step == step]) < ranks:
        time.sleep(0.01)


@ftrun.entrypoint(every=4)
def main(ft: ftrun.Session, options: argparse.Namespace) -> None:
    torch.manual_seed(1)
    model = nn.Linear(512, 512)
    wrapped = DistributedDataParallel(model) if ft.world_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters())
    ft.track(model=wrapped, optimizer=optimizer)
    for step in ft.steps(total=options.total):
        loss = wrapped(torch.full((4, 512), (step + 1) / 50)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ft.log(loss=loss)
        if options.hurry is None or not options.hurry.exists():
            time.sleep(options.pause)
        if step == options.sealed:
            await_seals(step, ft.world_size)
    if ft.rank == 0:
        print("sum", model.weight.double().sum().item().hex(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--hurry", type=Path, help="once this file is there, no step pauses any more")
    parser.add_argument("--sealed", type=int, help="the step after this save waits until it is sealed on all ranks")
    main(parser.parse_args())
