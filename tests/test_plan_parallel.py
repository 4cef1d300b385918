"""Plans of models that torch spreads over ranks: real groups of processes, gloo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import plan_jobs
import pytest
import torch
from plan_kit import Kept, agree, kept, processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(job: Callable[[int, Path], None], where: Path, world_size: int = 2) -> Kept:
    processes(world_size, job, where)
    found = kept(where, world_size)
    assert agree(found.words)
    for value, expected in zip(found.values, found.expected, strict=True):
        back = plan_jobs.whole(value["tracked"])
        assert back.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(back[name], tensor), name
    return found


def ranks(found: Kept, name: str) -> list[str]:
    return [each.tensors[f"tracked/{name}"].ranks for each in found.records]


def digests(found: Kept) -> set[str]:
    return {name for name, each in found.records[0].tensors.items() if each.digest is not None}


def tensor_bytes(found: Kept, rank: int) -> int:
    return sum(each.nbytes for each in plan_jobs.whole(found.values[rank]).values())


OPTIMIZED = "optimizer/state/second.weight/exp_avg"


@pytest.mark.parametrize("job", [plan_jobs.ddp, plan_jobs.ddp_inside, plan_jobs.compiled])
def test_ddp(tmp_path: Path, job: Callable[[int, Path], None]) -> None:
    found = run(job, tmp_path)
    for name in ("model/second.weight", "model/last.bias", "model/frozen", OPTIMIZED):
        assert ranks(found, name) == ["0-1"] * 2
    assert ranks(found, "model/norm.running_mean") == ["0", "1"]
    assert not digests(found), "what DDP keeps the same need not be summed up"
    own = sum(each.nbytes for name, each in found.expected[0].items() if "running" in name or "num_batches" in name)
    for size in found.sizes:
        assert size < (tensor_bytes(found, 0) - own) / 2 * 1.01 + own + 20_000
    groups = found.records[0].tree["tracked"]["optimizer"]["param_groups"]
    assert groups[0]["params"] == ["frozen", "first.weight", "first.bias", *groups[0]["params"][3:]]


def test_parameters_that_ddp_ignores_are_not_trusted(tmp_path: Path) -> None:
    found = run(plan_jobs.ddp_ignored, tmp_path)
    assert ranks(found, "model/second.weight") == ["0-1"] * 2, "they are the same before the first step"
    assert digests(found) == {"tracked/model/second.weight"}, "and will be looked at in every save"


def test_ddp_parameters_that_are_not_the_same_are_noticed_at_first_sight(tmp_path: Path) -> None:
    found = run(plan_jobs.ddp_diverged, tmp_path)
    assert ranks(found, "model/second.weight") == ["0", "1"]
    assert ranks(found, "model/first.weight") == ["0-1"] * 2


def test_ddp_over_a_part_of_the_ranks(tmp_path: Path) -> None:
    found = run(plan_jobs.ddp_of_some, tmp_path, 4)
    assert ranks(found, "model/second.weight") == ["0,2", "1,3"] * 2
    assert ranks(found, OPTIMIZED) == ["0,2", "1,3"] * 2


def test_fsdp_with_extents_that_do_not_divide(tmp_path: Path) -> None:
    found = run(plan_jobs.fsdp, tmp_path)
    for name in ("model/second.weight", "model/first.weight", OPTIMIZED):
        assert ranks(found, name) == ["0-1"] * 2
    pieces = [each for record in found.records for each in record.pieces if each.tensor == "tracked/model/first.weight"]
    assert sorted((each.box.offset, each.box.shape) for each in pieces) == [((0, 0), (129, 64)), ((129, 0), (128, 64))]
    assert max(found.sizes) < 1.1 * tensor_bytes(found, 0) / 2 + 20_000


@pytest.mark.parametrize("world_size", [2, 4])
def test_hsdp_shares_what_it_replicates(tmp_path: Path, world_size: int) -> None:
    found = run(plan_jobs.hsdp, tmp_path, world_size)
    assert ranks(found, "model/second.weight") == [f"0-{world_size - 1}"] * world_size
    assert max(found.sizes) < 1.1 * tensor_bytes(found, 0) / world_size + 20_000


def test_tensor_parallelism(tmp_path: Path) -> None:
    found = run(plan_jobs.tensor_parallel, tmp_path)
    assert ranks(found, "model/up.weight") == ["0-1"] * 2
    keys = {each.tensor for record in found.records for each in record.pieces if each.tensor.endswith("norm.weight")}
    stored = [each for record in found.records for each in record.pieces if each.tensor in keys]
    assert len(stored) == len(keys), "one of the two stores what both have"


def test_fsdp_on_top_of_tensor_parallelism(tmp_path: Path) -> None:
    found = run(plan_jobs.fsdp_and_tensor_parallel, tmp_path, 4)
    assert ranks(found, "model/up.weight") == ["0-3"] * 4
    pieces = [each for record in found.records for each in record.pieces if each.tensor == "tracked/model/up.weight"]
    assert sorted(each.box.offset[0] for each in pieces) == [0, 128, 256, 384]


def test_dtensors_of_all_placements(tmp_path: Path) -> None:
    found = run(plan_jobs.spread, tmp_path)
    assert "tracked/tied" not in found.records[0].tensors
    integers: Any = [each for record in found.records for each in record.pieces if each.tensor == "tracked/integers"]
    assert len(integers) <= 2
    strided = [each.box for each in found.records[1].pieces if each.tensor == "tracked/strided"]
    assert [(each.offset, each.shape) for each in strided] == [((75, 0), (75, 70)), ((225, 0), (75, 70))]


def test_replicas_that_are_laid_out_differently_are_not_committed(tmp_path: Path) -> None:
    processes(2, plan_jobs.laid_out_differently, tmp_path)
    words = [json.loads((tmp_path / f"{rank}.words").read_text()) for rank in range(2)]
    assert not agree(words)


@pytest.mark.parametrize("job", [plan_jobs.fsdp_restored, plan_jobs.pending_gradients])
def test_sharded_models_take_plain_tensors_back(tmp_path: Path, job: Callable[[int, Path], None]) -> None:
    processes(2, job, tmp_path)
