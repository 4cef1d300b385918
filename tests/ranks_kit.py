"""This process as one rank of a group that has no other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.distributed.tensor._api import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Iterator


TORCH_2_9 = torch.__version__.startswith("2.9.")


@contextlib.contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a group whose other ranks don't exist: enough to know who holds what."""
    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """DTensor's cache remembers meshes, and on them the rank that this process was before."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # from 2.10 on
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()
