"""One rank of the tests of :mod:`ftrun.dcp`, as a program: ``dcp_kit.py DIRECTORY RANK WORLD_SIZE ACT``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ftrun.dcp

WIDTH = 6  # of the model: over 4 ranks, the last one holds nothing of some tensors


def train(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optim": moments}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of both, gathered."""
    parameters, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in {**parameters, **moments}.items()
        if isinstance(value, torch.Tensor)
    }


def save(directory: Path, *, sharded: bool) -> None:
    model, optimizer = train(1, sharded=sharded)
    group = dist.new_group(backend="gloo")
    writer = ftrun.dcp.Writer(directory / "root")
    state = state_of(model, optimizer) | {"steps": 2, "order": (1, "b")}
    dcp.save(state, checkpoint_id="1", storage_writer=writer)
    future = dcp.async_save(state, checkpoint_id="2", storage_writer=writer, process_group=group)
    torch.save(whole(model, optimizer), directory / f"wanted-{dist.get_rank()}.pt")
    future.result(60)


def load(directory: Path, *, sharded: bool) -> None:
    model, optimizer = train(2, sharded=sharded)
    state = state_of(model, optimizer) | {"steps": 0, "order": None}
    dcp.load(state, storage_reader=ftrun.dcp.Reader(directory / "root"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    wanted = torch.load(directory / "wanted-0.pt", weights_only=True)
    got = whole(model, optimizer)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, got[name]), name
    assert (state["steps"], state["order"]) == (2, (1, "b"))


class Dies(dcp.DefaultSavePlanner):
    """A planner of a rank that is killed when it looks up its data."""

    def resolve_data(self, write_item: Any) -> Any:
        os.kill(os.getpid(), 9)


def fail(directory: Path, *, sharded: bool) -> None:
    """A rank has something that can't be stored; then all is well; then a rank is killed."""
    rank = dist.get_rank()
    writer = ftrun.dcp.Writer(directory / "root")
    state: dict[str, Any] = {f"own{rank}": torch.full((9,), float(rank)), "both": torch.arange(50_000)}
    with pytest.raises(dcp.CheckpointException, match="thing"):
        dcp.save(state | ({"thing": object()} if rank == 1 else {}), storage_writer=writer)
    dcp.save(state, storage_writer=writer)
    try:
        dcp.save(state, storage_writer=writer, planner=Dies() if rank == 1 else None)
    except BaseException as error:
        print("lost", type(error).__name__, flush=True)
        os._exit(0)  # the group can't be taken apart any more
    raise AssertionError


def process(directory: Path, *, sharded: bool) -> None:
    """The asynchronous checkpointer that is a process of its own."""
    state = {"x": torch.arange(8.0), "n": 5}
    for step in (1, 2):
        future = dcp.async_save(
            state,
            checkpoint_id=str(step),
            storage_writer=ftrun.dcp.Writer(directory / "root"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        state["x"] += 1
        assert future.result(90).storage_meta.checkpoint_id.startswith("e")


ACTS = {
    "save": lambda where: save(where, sharded=True),
    "load": lambda where: load(where, sharded=True),
    "save-plain": lambda where: save(where, sharded=False),
    "load-plain": lambda where: load(where, sharded=False),
    "fail": lambda where: fail(where, sharded=False),
    "process": lambda where: process(where, sharded=False),
}


def main() -> None:
    directory, rank, world_size, act = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(sys.argv[5]), world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[5], "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    ACTS[act](directory)
    dist.barrier()
    dist.destroy_process_group()
    # Not through the interpreter's end: under load, torch's threads sometimes abort there, and all is said by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
