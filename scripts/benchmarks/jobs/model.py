"""The training that all launchers are measured with: a small model, DistributedDataParallel or FSDP2, and a pace.

The pace stands for a GPU's share of a step, in which the CPU sleeps; without it two ranks would fill both cores of a
small machine, and every launcher would be measured by the speed of the training beside it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 16
WIDTH = 256


class Numbers(torch.utils.data.Dataset):
    """Random rows that are the same every time."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def build(*, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """About 0.7 million parameters, and AdamW with twice as many numbers of state; FSDP2 over all ranks if sharded."""
    torch.set_num_threads(1)
    torch.manual_seed(17)
    layers = [nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, pace: float) -> None:
    time.sleep(pace)
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
