"""DTensors in a state, as far as one process can have them: kinds, ties, refusals, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from plan_kit import Saved, restored
from session_kit import alike
from torch import nn

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.plan.pieces import Box
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.plan.sources import sources
from ftrun.checkpoint.records import TensorEntry
from ftrun.checkpoint.state import encode
from ftrun.errors import NotStorable
from ftrun.session.tracked import placed

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE = torch.arange(24.0).reshape(6, 4)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def spread(value: torch.Tensor, mesh: Any, dim: int | None = 0) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])


def saved(state: Any) -> Saved:
    encoded = encode({"tracked": state})
    return Saved(0, Planner(0, 1, None).plan(encoded, {}, 1), encoded)


def spread_here(value: torch.Tensor, mesh: Any) -> Any:
    """Without the collective, which gloo has not for all types."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)


def test_they_come_back_whole_without_a_template(mesh: Any) -> None:
    state = {
        "rows": spread(VALUE, mesh),
        "columns": spread(VALUE, mesh, 1),
        "all": nn.Parameter(spread(VALUE, mesh, None)),
        "half": spread(VALUE.to(torch.bfloat16), mesh),
        "eight bits": spread_here(VALUE.to(torch.float8_e4m3fn), mesh),
        "scattered": spread(VALUE.t(), mesh, 1),
        "none": spread(VALUE[:0], mesh),
        "number": spread(torch.tensor(3.0), mesh, None),
        "plain": VALUE,
    }
    back = restored([saved(state)])[0]["tracked"]
    plain = {name: each._local_tensor if dtensors.is_dtensor(each) else each for name, each in state.items()}
    assert alike(back, {name: each.detach() for name, each in plain.items()})


def test_a_sharded_state_has_its_boxes_and_ranks(mesh: Any) -> None:
    encoded = encode({"w": spread(VALUE, mesh), "p": VALUE})
    assert dtensors.is_dtensor(encoded.tensors["w"])
    first, second = sources(encoded, 0)
    assert (first.name, first.box, first.ranks, first.replicas) == ("w", Box((0, 0), (6, 4)), (0,), (0,))
    assert first.tensor.data_ptr() == encoded.tensors["w"]._local_tensor.data_ptr()
    assert type(first.tensor) is torch.Tensor
    assert not first.tensor.requires_grad
    assert (second.ranks, second.replicas) == (None, (0,))
    assert saved({"w": spread(VALUE, mesh)}).plan.entries["tracked/w"] == TensorEntry("float32", (6, 4), "0")


def test_ties(mesh: Any) -> None:
    one, empty = spread(VALUE, mesh), spread(VALUE[:0], mesh)
    other = nn.Parameter(one)
    assert other._local_tensor.data_ptr() == one._local_tensor.data_ptr()
    encoded = encode({"a": one, "b": [other], "c": spread(VALUE, mesh), "d": empty, "e": empty, "f": one._local_tensor})
    assert list(encoded.tensors) == ["a", "c", "d", "f"]
    assert encoded.tree["b"] == [{"$": "tensor", "name": "a"}]
    assert encoded.tree["e"] == {"$": "tensor", "name": "d"}


def test_one_memory_that_is_spread_in_two_ways_is_two_tensors(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows, everywhere = (DTensor.from_local(VALUE, mesh, [each], run_check=False) for each in (Shard(0), Replicate()))
    assert list(encode({"a": rows, "b": everywhere, "c": rows.detach()}).tensors) == ["a", "b"]


def test_what_can_not_be_stored_is_refused_by_its_path(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard

    partial = DTensor.from_local(VALUE, mesh, [Partial()])
    with pytest.raises(NotStorable, match=r"tracked 'model' → \['w'\]\[1\]: a DTensor that is .*full_tensor"):
        encode({"model": {"w": [spread(VALUE, mesh), partial]}})
    packed = spread_here(torch.empty(4, dtype=torch.uint4), mesh)
    with pytest.raises(NotStorable, match=r"tracked 'w'.*uint4"):
        encode({"w": packed, "v": spread(VALUE, mesh)})
    wrong = DTensor.from_local(VALUE, mesh, [Shard(0)], run_check=False, shape=(12, 4), stride=(4, 1))
    with pytest.raises(NotStorable, match="the DTensor 'tracked/w' can't be stored: a local part of shape"):
        saved({"w": wrong})


def test_a_plan_follows_how_tensors_are_spread(mesh: Any) -> None:
    planner = Planner(0, 1, None)

    def entries(state: Any) -> Any:
        encoded = encode({"tracked": state})
        plan = planner.plan(encoded, {}, 1)
        return Saved(0, plan, encoded)

    before = entries({"w": spread(VALUE, mesh)})
    again = entries({"w": spread(VALUE + 1, mesh)})
    assert again.plan.entries is before.plan.entries
    assert alike(restored([again])[0]["tracked"]["w"], VALUE + 1)
    assert entries({"w": spread(VALUE, mesh, 1)}).plan.entries is not before.plan.entries
    assert alike(restored([entries({"w": VALUE.clone()})])[0]["tracked"]["w"], VALUE)


def test_plain_tensors_are_placed_like_others(mesh: Any) -> None:
    like = spread(torch.zeros(6, 4), mesh)
    made = placed(VALUE.to(torch.float64), like)
    assert (made.placements, made.dtype) == (like.placements, torch.float64)
    assert torch.equal(made.full_tensor(), VALUE.double())
    assert placed(VALUE[:3], like) is not like
    for value in (3, None, VALUE[:3], like):
        assert placed(value, like) is value
    assert placed(VALUE, VALUE) is VALUE
