"""What the checkpoint benchmarks save: weights of a given size and count with their momentum, and a small body.

The weights stand for the bulk of a model. Their gradients are given and never computed: computing and exchanging half a
gigabyte of them on a small machine would drown what is measured. The body is trained in earnest, with forward, backward
and the exchange of its gradients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

COUNTS = {"large": 4, "small": 3000}
"""Number of tensors, half of them weights and half their momentum."""

_WIDTH = 256
_BATCH = 64
_COLUMNS = 64


class Timed(torch.optim.SGD):
    """SGD that notes when its pre-step hooks are done, whoever has installed them and when."""

    entered = 0.0

    def step(self, closure: None = None) -> None:
        self.entered = time.perf_counter()
        super().step(closure)

    def timed_step(self) -> float:
        """A step.

        Returns:
            Seconds until it really began: what a fence waited.
        """
        began = time.perf_counter()
        self.step()
        return self.entered - began


class Weights(nn.Module):
    """Parameters that no forward uses."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        rows = size // (count * _COLUMNS * 4)
        rows -= rows % 2
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(rows, _COLUMNS)) for _ in range(count))


@dataclass
class Trainee:
    """What is trained.

    Attributes:
        weights: the bulk.
        body: the small part that is trained in earnest.
        heavy: optimizer of the weights.
        light: optimizer of the body.
        owned: bytes that this rank must store when ranks share what they all hold.
        total: bytes of the whole state, each counted once.
    """

    weights: nn.Module
    body: nn.Module
    heavy: Timed
    light: Timed
    owned: int = 0
    total: int = 0

    @property
    def tracked(self) -> dict[str, nn.Module | Timed]:
        return {"weights": self.weights, "body": self.body, "heavy": self.heavy, "light": self.light}

    def train_body(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.light.zero_grad()
            rows = torch.ones(_BATCH, _WIDTH)
            (self.body(rows) - rows).square().mean().backward()
            self.light.step()

    def parameters(self) -> list[nn.Parameter]:
        return [*self.weights.parameters(), *self.body.parameters()]

    def states(self) -> dict[str, torch.Tensor]:
        """All tensors by name, DTensors as they are, for what takes a flat dictionary."""
        found: dict[str, torch.Tensor] = {}
        for number, (parameter, optimizer) in enumerate(self._pairs()):
            found[f"p{number}"] = parameter.detach()
            found[f"m{number}"] = optimizer.state[parameter]["momentum_buffer"]
        return found

    def _pairs(self) -> list[tuple[nn.Parameter, Timed]]:
        pairs = [(each, self.heavy) for each in self.weights.parameters()]
        return pairs + [(each, self.light) for each in self.body.parameters()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build(layout: str, tensors: str, size: int, *, momentum: bool = True) -> Trainee:
    """Make it, on this rank of a process group.

    Args:
        layout: ``ddp`` or ``fsdp2``.
        tensors: ``large`` or ``small``.
        size: bytes of the weights with their momentum.
        momentum: step once, so that the momentum exists.
    """
    torch.set_num_threads(1)
    torch.manual_seed(17)
    weights: nn.Module = Weights(COUNTS[tensors] // 2, size // 2)
    body: nn.Module = nn.Sequential(nn.Linear(_WIDTH, 1024), nn.GELU(), nn.Linear(1024, _WIDTH))
    if layout == "ddp":
        weights, body = (nn.parallel.DistributedDataParallel(each) for each in (weights, body))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in (weights, body):
            fully_shard(each, mesh=mesh)
    heavy, light = (Timed(each.parameters(), lr=1e-4, momentum=0.9) for each in (weights, body))
    trainee = Trainee(weights, body, heavy, light)
    if momentum:
        for parameter in weights.parameters():
            parameter.grad = torch.full_like(parameter, 1e-6)
        heavy.step()
        trainee.train_body()
    _measure(trainee, shared=layout == "ddp")
    return trainee


def _measure(trainee: Trainee, *, shared: bool) -> None:
    held = 2 * sum(local(each).nbytes for each in trainee.parameters())
    whole = 2 * sum(each.numel() * each.element_size() for each in trainee.parameters())
    trainee.owned = held // dist.get_world_size() if shared else held
    trainee.total = whole
