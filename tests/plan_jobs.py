"""What the ranks of the tests of plans do, each in a process of its own: models that torch spreads over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from plan_kit import keep, plan_here
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftrun.session.tracked import restore, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Net(nn.Module):
    """Large and small parameters, uneven extents, statistics that differ between ranks, and a tied weight."""

    def __init__(self, width: int = 257) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 128, bias=False)
        self.last = nn.Linear(128, 3)
        self.frozen = nn.Parameter(torch.randn(17_000), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(self.second(hidden).relu()) + self.frozen.sum() * 0


class Block(nn.Module):
    """For tensor parallelism: columns, rows, and a norm that all have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(64, 512)
        self.down = nn.Linear(512, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state_of(name, value, objects) for name, value in objects.items()}


def whole(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors in a state by their path, DTensors put together."""
    if isinstance(value, torch.Tensor):
        return {prefix: value.full_tensor() if hasattr(value, "full_tensor") else value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found |= whole(item, f"{prefix}/{key}" if prefix else str(key))
    return found


def save(rank: int, where: Path, objects: Mapping[str, Any]) -> None:
    state = states(objects)
    keep(where, plan_here(rank, state, objects), whole(state))


def ddp(rank: int, where: Path) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank)
    save(rank, where, {"model": model, "optimizer": optimizer})


def ddp_inside(rank: int, where: Path) -> None:
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer, rank)
    save(rank, where, {"optimizer": optimizer, "model": model})


def ddp_ignored(rank: int, where: Path) -> None:
    model = Net()
    model._ddp_params_and_buffers_to_ignore = ["second.weight"]
    wrapped = DistributedDataParallel(model)
    save(rank, where, {"model": wrapped})


def ddp_diverged(rank: int, where: Path) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, rank)
    with torch.no_grad():
        model.module.second.weight += rank
    save(rank, where, {"model": model, "optimizer": optimizer})


def ddp_of_some(rank: int, where: Path) -> None:
    """Ranks 0 and 2 train together, and so do 1 and 3: different weights."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank % 2
    wrapped = DistributedDataParallel(model, process_group=groups[rank % 2])
    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer, rank)
    save(rank, where, {"model": wrapped, "optimizer": optimizer})


def compiled(rank: int, where: Path) -> None:
    model = torch.compile(DistributedDataParallel(Net()), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank)
    save(rank, where, {"model": model, "optimizer": optimizer})


def fsdp(rank: int, where: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.second)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank)
    save(rank, where, {"model": model, "optimizer": optimizer})


def hsdp(rank: int, where: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank)
    save(rank, where, {"model": model, "optimizer": optimizer})


def parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel(use_local_output=True)}
    parallelize_module(model, mesh, plan)


def tensor_parallel(rank: int, where: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = Block()
    parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    # The same gradients on all, as tensor parallelism makes them.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(rank, where, {"model": model, "optimizer": optimizer})


def fsdp_and_tensor_parallel(rank: int, where: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Block()
    parallel(model, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(rank, where, {"model": model, "optimizer": optimizer})


def spread(rank: int, where: Path) -> None:
    """DTensors of every placement that two ranks can have."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(5)
    value = torch.randn(301, 70)
    state: dict[str, Any] = {
        "rows": distribute_tensor(value, mesh, [Shard(0)]),
        "columns": distribute_tensor(value, mesh, [Shard(1)]),
        "all": distribute_tensor(value, mesh, [Replicate()]),
        "one row": distribute_tensor(value[:1], mesh, [Shard(0)]),
        "no row": distribute_tensor(value[:0], mesh, [Shard(0)]),
        "bytes": distribute_tensor(value.to(torch.float8_e4m3fn).view(torch.uint8), mesh, [Shard(0)]),
        "number": distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]),
        "integers": distribute_tensor(torch.arange(100_000), mesh, [Replicate()]),
    }
    state["tied"] = state["rows"]
    parts = value[:300].view(4, 75, 70)
    mine = torch.cat([parts[rank], parts[2 + rank]])
    strided = DTensor.from_local(
        mine, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=(300, 70), stride=(70, 1)
    )
    expected = whole({name: each for name, each in state.items() if name != "bytes"})
    expected["bytes"] = value.to(torch.float8_e4m3fn).view(torch.uint8)
    expected["strided"] = value[:300]
    keep(where, plan_here(rank, {**state, "strided": strided}, {}), expected)


def laid_out_differently(rank: int, where: Path) -> None:
    """A replica that one of two ranks can cut into parts, and the other can not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    value = torch.arange(60_000.0).view(200, 300)
    held = value.t().contiguous().t() if rank else value
    spread = DTensor.from_local(held, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
    keep(where, plan_here(rank, {"w": spread}, {}), {})


def plain(value: Any) -> Any:
    """A state as it comes from a checkpoint without templates: DTensors are whole, and nothing is shared with it."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def sharded_net(mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def fsdp_restored(rank: int, where: Path) -> None:
    """A sharded model and its optimizer, restored from plain tensors, go on as if nothing had been."""
    model, optimizer = sharded_net()
    train(model, optimizer, rank)
    objects = {"model": model, "optimizer": optimizer}
    stored = {name: plain(each) for name, each in states(objects).items()}
    again, fresh = sharded_net()
    others = {"model": again, "optimizer": fresh}
    for name, value in others.items():
        restore(name, value, stored[name], "checkpoint", "start over", others)
    for one, other in ((model, optimizer), (again, fresh)):
        train(one, other, rank + 10, steps=1)
    expected, found = whole(states(objects)), whole(states(others))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def pending_gradients(rank: int, where: Path) -> None:
    """Gradients of a sharded model that no step has used are seen, and come back."""
    from ftrun.session.gradients import PendingGradients

    model, optimizer = sharded_net()
    pending = PendingGradients()
    pending.watch("optimizer", optimizer)
    train(model, optimizer, rank)
    assert pending.capture() == {}
    model(torch.ones(8, 64)).sum().backward()
    seen = pending.capture()["optimizer"]
    assert len(seen) == sum(each.requires_grad for each in model.parameters())
    stored = plain(seen)
    again, fresh = sharded_net()
    pending.watch("optimizer", fresh)
    pending.restore({"optimizer": stored})
    for (name, mine), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor()), name
