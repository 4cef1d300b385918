"""What is read straight into the script's own memory needs neither torch's dispatch for DTensors nor another load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks_kit import rank_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftrun.checkpoint.loading.gathering import spread_template
from ftrun.checkpoint.loading.in_place import empty_like, is_loaded, memory_like


class Spread(TorchDispatchMode):
    """Counts operations on DTensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(10, 6), (5,), (3, 1, 2), (0, 4)])
@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Replicate()), (Shard(0), Shard(0))])
def test_memory_like_a_dtensor_is_spread_as_torch_would_spread_it(shape: tuple[int, ...], placements: Any) -> None:
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            like = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None))
            with Spread() as torchs:
                wanted = torch.empty_like(like, dtype=torch.float64, requires_grad=False)
            with Spread() as ours:
                made = empty_like(like, torch.float64)
            assert torchs.count > 0
            assert ours.count == 0
            assert type(made) is DTensor
            assert not made.requires_grad
            assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            assert (made.device_mesh, made.placements) == (wanted.device_mesh, wanted.placements)
            mine, theirs = made.to_local(), wanted.to_local()
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_memory_like_a_plain_tensor_is_laid_out_as_that() -> None:
    like = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    made = empty_like(like, torch.bfloat16)
    assert (made.stride(), made.dtype, made.requires_grad) == (like.stride(), torch.bfloat16, False)


def test_a_tensor_that_is_there_is_read_into_where_it_is_like_its_parameter() -> None:
    like = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    mine = torch.ones_like(like, requires_grad=False)
    assert memory_like(like, torch.float32, mine) is mine
    others = [None, 3, mine.bfloat16(), mine.contiguous(), mine[:1], mine.new_zeros(()).expand(2, 3, 4, 5)]
    for other in [*others, mine.clone().requires_grad_(), nn.Parameter(mine), mine.to("meta")]:
        made = memory_like(like, torch.float32, other)
        assert made is not other
        assert (made.shape, made.stride(), made.requires_grad) == (like.shape, like.stride(), False)


def test_a_dtensor_that_is_there_is_read_into_where_it_is_spread_alike() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.zeros(4, 6)
        like = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        mine = torch.zeros_like(like, requires_grad=False)
        assert memory_like(like, torch.float32, mine) is mine
        for other in (distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None), whole, mine.to_local()):
            made = memory_like(like, torch.float32, other)
            assert made is not other
            assert made.placements == (Shard(0),)


def test_only_dtensors_get_memory_ahead() -> None:
    with rank_of(0, 2):
        spread = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        made = spread_template({"a": spread, "b": [torch.zeros(2), 3]})
    assert type(made["a"]) is DTensor
    assert made["b"] == [None, None]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10))


def own(module: nn.Module) -> dict[str, Any]:
    return module.state_dict(keep_vars=True)


def test_a_module_whose_tensors_were_read_into_is_loaded() -> None:
    module = model()
    assert is_loaded(module, dict(own(module)), own(module))
    with rank_of(1, 2):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        assert is_loaded(module, dict(own(module)), own(module))


def test_a_module_with_a_tensor_that_was_read_beside_it_is_not() -> None:
    module = model()
    template = own(module)
    assert not is_loaded(module, {**template, "0.weight": template["0.weight"].detach().clone()}, template)
    assert not is_loaded(module, {key: each for key, each in template.items() if key != "0.bias"}, template)
    detached = module.state_dict()  # the module's memory, and not its tensors: a hook may have made them
    assert not is_loaded(module, dict(detached), detached)


class Versioned(nn.Linear):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


class Noted(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


class Loading(nn.Linear):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        return super().load_state_dict(*arguments, **options)


@pytest.mark.parametrize("layer", [Versioned(2, 2), Noted(2, 2), nn.BatchNorm1d(2)])
def test_what_a_module_does_on_loading_is_done(layer: nn.Module) -> None:
    module = nn.Sequential(layer)
    assert not is_loaded(module, dict(own(module)), own(module))


def test_what_the_whole_module_or_a_hook_does_on_loading_is_done() -> None:
    module: nn.Module = Loading(2, 2)
    assert not is_loaded(module, dict(own(module)), own(module))
    for register in ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"):
        module = model()
        getattr(module[0], register)(lambda *_: None)  # type: ignore[index]
        assert not is_loaded(module, dict(own(module)), own(module))
