"""A job whose result does not depend on the number of ranks, to the last bit: every number in it is exact.

Weights are multiples of powers of two, inputs are small integers, and each rank scales its loss so that the mean over
ranks is the sum over samples. Prints ``digest <hex>`` of weights and momenta when the run is complete.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun

BATCH = 12


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    inputs = torch.randint(-1, 2, (BATCH, 7), generator=made).double()
    return inputs, torch.randint(-3, 4, (BATCH, 5), generator=made).double()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # of a DTensor
    return made


def sharded(model: nn.Module, ranks: int) -> nn.Module:
    # Only where it is needed: this takes as long as importing torch.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


@ftrun.entrypoint(every=1)
def main(ft: ftrun.Session, options: argparse.Namespace) -> None:
    torch.manual_seed(3)
    model = nn.Linear(7, 5).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 8).round() / 8)
    if options.how == "fsdp":
        wrapped = sharded(model, ft.world_size)
    else:
        wrapped = DistributedDataParallel(model) if ft.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)
    ft.track(model=wrapped, optimizer=optimizer)
    share = slice(BATCH * ft.rank // ft.world_size, BATCH * (ft.rank + 1) // ft.world_size)
    for step in ft.steps(total=options.total):
        inputs, targets = samples(step)
        errors = wrapped(inputs[share]) - targets[share]
        (errors.square().sum() / 2 * ft.world_size / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == options.stop:
            ft.request_stop()
    parts = [*model.parameters(), *(optimizer.state[each]["momentum_buffer"] for each in model.parameters())]
    text = hashlib.sha256(b"".join(whole(each.detach()).numpy().tobytes() for each in parts)).hexdigest()
    if ft.rank == 0:
        print("digest", text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--total", type=int, default=6)
    parser.add_argument("--stop", type=int, default=0)
    main(parser.parse_args())
