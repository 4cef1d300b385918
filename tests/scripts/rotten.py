"""A job whose first attempt is killed with a snapshot in memory, which is damaged then, or made way for another.

Prints ``sum <hex>`` of the weights when it is complete: every number in it is exact, whatever it resumes from.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun
from ftrun.checkpoint.memory.tier import Slot, Tier
from ftrun.contract import WorkerContract

BEFORE, DAMAGED, TOTAL = 2, 4, 7


def await_seal(tier: Tier, ranks: int) -> list[Slot]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [slot for slot, seal in tier.sealed() if seal.step == DAMAGED]
        if len(found) == ranks:
            return found
        time.sleep(0.01)
    raise TimeoutError("not all ranks have sealed")


def await_commit(root: Path) -> None:
    deadline = time.monotonic() + 30
    while not list(root.glob(f"ckpt/*-s{BEFORE:010d}-*/MANIFEST.json")):
        if time.monotonic() > deadline:
            raise TimeoutError("no commit")
        time.sleep(0.01)


def damage(path: Path, how: str) -> None:
    if how == "zero":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "gone":
        path.unlink()


@ftrun.entrypoint(every=2)
def main(ft: ftrun.Session, options: argparse.Namespace) -> None:
    contract = WorkerContract.from_environment(os.environ)
    assert contract is not None
    model = nn.Linear(64, 48, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    if options.how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ft.world_size,)))
        wrapped: nn.Module = model
    else:
        wrapped = DistributedDataParallel(model) if ft.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)
    ft.track(model=wrapped, optimizer=optimizer)
    for step in ft.steps(total=TOTAL):
        (wrapped(torch.full((2, 64), float(step % 3)).double()).sum() / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
        if contract.attempt == 1 and step + 1 == BEFORE + 1:
            await_commit(Path(contract.root))
        if contract.attempt == 1 and step + 1 == DAMAGED + 1:
            slots = await_seal(Tier(Path(contract.tier)), ft.world_size)
            if ft.rank == options.rank:
                damage(slots[ft.rank].payload, options.damage)
            if ft.world_size > 1:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    weight: Any = model.weight.detach()
    total = (weight.full_tensor() if options.how == "fsdp" else weight).sum().item().hex()
    if ft.rank == 0:
        print("sum", total, flush=True)


def unseal_own() -> None:
    """What a rank does to its slot that takes it for a save, while others still read."""
    contract = WorkerContract.from_environment(os.environ)
    if contract is not None and contract.attempt == 2:
        Tier(Path(contract.tier)).slots(int(os.environ["RANK"]))[DAMAGED // 2 % 2 ^ 1].seal.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="ddp")
    parser.add_argument("--damage", default="zero")
    parser.add_argument("--rank", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.damage == "unseal":
        unseal_own()
    main(arguments)
