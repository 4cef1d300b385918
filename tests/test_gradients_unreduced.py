"""Gradients that FSDP has not exchanged yet: a checkpoint lacks them, and that is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from ftrun.session.unreduced import has_unreduced

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def net() -> Iterator[Any]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(layers[1], mesh=mesh)
    yield torch.nn.ModuleList([fully_shard(layers, mesh=mesh)])
    dist.destroy_process_group()


def test_unreduced_gradients_are_noticed_until_they_are_exchanged(net: Any) -> None:
    def backward(*, exchange: bool) -> bool:
        net[0].set_requires_gradient_sync(exchange)
        net[0](torch.ones(2, 3)).sum().backward()
        return has_unreduced([net, object()])

    assert not backward(exchange=True)
    assert backward(exchange=False)
    assert backward(exchange=False)
    assert not backward(exchange=True)
