"""From any number of ranks and any sharding to any other: every rank gets exactly its own part."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import held_port
from loading_kit import NAME, commit, cut, in_rows, replicated, written
from ranks_kit import TORCH_2_9, rank_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ftrun.checkpoint.dtensors import Geometry
from ftrun.checkpoint.loading import gathering
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.checkpoint.plan.pieces import Box
from ftrun.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from conftest import Runner
    from loading_kit import Layout

    from ftrun.checkpoint.layout import Root

STATE = {
    "weight": torch.randn(10, 6),
    "odd": torch.randn(7, 3, 5),
    "wide": torch.randn(2, 24).double(),
    "few": torch.randn(3),
    "scalar": torch.tensor(2.5),
}


def value(rank: int) -> dict[str, Any]:
    return {"tracked": {"model": dict(STATE)}, "random": {"draws": torch.full((4,), float(rank))}}


def by_columns(world_size: int) -> Layout:
    """Tensor parallelism: matrices in columns, the rest on all ranks."""
    return lambda name, tensor: (
        None
        if not name.startswith("tracked")
        else [
            cut(tuple(tensor.shape), 1, rank, world_size) if tensor.dim() > 1 else Box.whole(tuple(tensor.shape))
            for rank in range(world_size)
        ]
    )


WRITERS = {
    "DDP on 4": (4, replicated(4)),
    "FSDP on 3": (3, in_rows(3)),
    "FSDP on 8": (8, in_rows(8)),
    "HSDP 2 by 2": (4, in_rows(4, 2)),
    "HSDP 3 by 2": (6, in_rows(6, 2)),
    "TP on 3": (3, by_columns(3)),
    "one": (1, replicated(1)),
}

READERS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "FSDP on 1": ((1,), [Shard(0)]),
    "FSDP on 2": ((2,), [Shard(0)]),
    "FSDP on 3": ((3,), [Shard(0)]),
    "FSDP on 5": ((5,), [Shard(0)]),
    "HSDP 2 by 2": ((2, 2), [Replicate(), Shard(0)]),
    "TP on 2": ((2,), [Shard(1)]),
    "TP on 4, uneven": ((4,), [Shard(1)]),
    "FSDP 2 by TP 2 in columns": ((2, 2), [Shard(0), Shard(1)]),
    "FSDP 2 by TP 2 in rows": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "replicas": ((3,), [Replicate()]),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_every_rank_gets_its_own_part(root: Root, writer: str, reader: str) -> None:
    world_size, layout = WRITERS[writer]
    commit(root, written(world_size, value, layout))
    sizes, placements = READERS[reader]
    if TORCH_2_9 and isinstance(placements[0], _StridedShard):
        pytest.skip(
            "distribute_tensor of torch 2.9 splits rows otherwise than its own fully_shard, which is tried below"
        )
    readers = torch.Size(sizes).numel()
    for rank in range(readers):
        with rank_of(rank, readers):
            mesh = init_device_mesh("cpu", sizes)
            expected = {
                key: distribute_tensor(each, mesh, possible(each, placements), src_data_rank=None)
                for key, each in STATE.items()
            }
            template = {key: torch.full_like(each, -1.0) for key, each in expected.items()}
            stored = open_stored(root, NAME, rank, readers)
            back = stored.value("tracked", "model", template)
            for key, each in expected.items():
                assert back[key] is template[key]
                assert torch.equal(back[key].to_local(), each.to_local()), (key, rank)
            assert stored.own == (rank < world_size)
            assert torch.equal(stored.value("random", "draws"), torch.full((4,), float(rank if stored.own else 0)))


def possible(tensor: torch.Tensor, placements: list[Any]) -> list[Any]:
    """Placements for a tensor with fewer dimensions."""
    return [each if getattr(each, "dim", -1) < tensor.dim() else Replicate() for each in placements]


def test_four_then_three_then_one_then_two(root: Root) -> None:
    """Each world reads what the one before wrote, and writes it again."""
    state = value(0)["tracked"]["model"]
    for step, (world_size, following) in enumerate([(4, 3), (3, 1), (1, 2), (2, 2)]):
        name = type(NAME)(1, step, "0123abcd")
        tracked = {"tracked": {"model": state}}
        commit(root, written(world_size, lambda rank, now=tracked: now, replicated(world_size), name))
        for rank in range(following):
            state = open_stored(root, name, rank, following).value("tracked", "model")
            assert all(torch.equal(state[key], each) for key, each in STATE.items())


def test_a_part_of_which_nothing_is_left_for_a_rank(root: Root) -> None:
    commit(root, written(2, value, in_rows(2)))
    with rank_of(4, 5):
        mesh = init_device_mesh("cpu", (5,))
        template = {"few": distribute_tensor(torch.zeros(3), mesh, [Shard(0)], src_data_rank=None)}
        assert template["few"].to_local().numel() == 0
        back = open_stored(root, NAME, 4, 5).value("tracked", "model", template)
        assert back["few"] is template["few"]
        assert torch.equal(back["weight"], STATE["weight"])


def test_a_hole_between_parts_is_found_and_only_by_who_needs_it(root: Root) -> None:
    made = written(3, value, in_rows(3))
    record = made.records[1]
    fields = record.__dict__ | {
        "pieces": tuple(each for each in record.pieces if each.tensor != "tracked/model/weight")
    }
    made.files["r00001.json"] = type(record)(**fields).to_bytes()
    commit(root, made)
    for rank, reached in ((0, True), (1, False), (2, True)):
        with rank_of(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            template = {"weight": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)], src_data_rank=None)}
            with contextlib.nullcontext() if reached else pytest.raises(CorruptCheckpoint, match="make up 0 of 24"):
                open_stored(root, NAME, rank, 3).value("tracked", "model", template)


def build() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))


@pytest.mark.parametrize("rows", [2, 7, 10])
def test_rows_of_tensor_parallel_parts_that_are_sharded_again(rows: int) -> None:
    whole = torch.arange(float(rows))[:, None].expand(rows, 3).contiguous()
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = nn.Linear(3, rows, bias=False)
            model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
            fully_shard(model, mesh=mesh["dp"])
            weight = model.state_dict()["weight"]
            blocks = Geometry().holding(weight).blocks
            assert sum(box.numel for box, _ in blocks) == weight.to_local().numel()
            for box, part in blocks:
                first, count = box.offset[0], box.shape[0]
                assert torch.equal(part, whole[first : first + count]), (rank, box)


def test_an_fsdp_model_is_filled_in_place(root: Root) -> None:
    stored_state = build().state_dict()
    commit(root, written(4, lambda rank: {"tracked": {"model": stored_state}}, in_rows(4)))
    for rank in range(3):
        with rank_of(rank, 3):
            model = build()
            for layer in model:
                fully_shard(layer, mesh=init_device_mesh("cpu", (3,)))
            fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
            mine = model.state_dict(keep_vars=True)
            with torch.no_grad():
                for each in mine.values():
                    (each.to_local() if isinstance(each, DTensor) else each).fill_(-1)
            places = {key: each.to_local().data_ptr() for key, each in mine.items() if isinstance(each, DTensor)}
            assert places
            back = open_stored(root, NAME, rank, 3).value("tracked", "model", mine)
            model.load_state_dict(back)
            for key, each in model.state_dict().items():
                if isinstance(each, DTensor):
                    whole = distribute_tensor(stored_state[key], each.device_mesh, each.placements, src_data_rank=None)
                    assert torch.equal(each.to_local(), whole.to_local())
                    # torch 2.9 moves what it pads, when a module is given its own state back, too.
                    assert TORCH_2_9 or each.to_local().data_ptr() == places[key]
                else:
                    assert torch.equal(each, stored_state[key])


def test_optimizer_states_are_spread_as_their_parameters(root: Root) -> None:
    moments = {"exp_avg": torch.randn(10, 6), "exp_avg_sq": torch.rand(10, 6), "step": torch.tensor(4.0)}
    state = {"state": {0: moments}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    commit(root, written(4, lambda rank: {"tracked": {"optimizer": state}}, in_rows(4)))
    for rank in range(3):
        with rank_of(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            parameter = nn.Parameter(distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)], src_data_rank=None))
            optimizer = torch.optim.Adam([parameter])
            stored = open_stored(root, NAME, rank, 3)
            outline = stored.outline("tracked", "optimizer")
            back = stored.fill(outline, gathering.optimizer_template(optimizer, outline))
            for key in ("exp_avg", "exp_avg_sq"):
                whole = distribute_tensor(moments[key], mesh, [Shard(0)], src_data_rank=None)
                assert back["state"][0][key].placements == (Shard(0),)
                assert torch.equal(back["state"][0][key].to_local(), whole.to_local())
            assert torch.equal(back["state"][0]["step"], moments["step"])
            assert back["param_groups"] == state["param_groups"]


# --- parts that were dealt out among ranks ---------------------------------------------------------------------


def layers(*numbers: int) -> dict[str, torch.Tensor]:
    return {f"{number}.weight": torch.full((4, 2), float(number)) for number in numbers}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [((0, 1), (0, 1)), ((0, 1, 2, 3), (0, 1, 2, 3)), ((3,), (3,)), ((1, 2), (1, 2)), ((0, 7), (0,))],
)
def test_stages_of_a_pipeline_find_their_layers(root: Root, wanted: tuple[int, ...], expected: tuple[int, ...]) -> None:
    stages = [layers(0, 1), layers(2, 3)]
    commit(root, written(2, lambda rank: {"tracked": {"model": stages[rank]}}, lambda name, tensor: None))
    stored = open_stored(root, NAME, 0, 3)
    outline = stored.outline("tracked", "model")
    gathering.gather(outline, layers(*wanted), stored.others("tracked", "model"))
    back = stored.fill(outline)
    assert sorted(back) == sorted(layers(*expected))
    assert all(torch.equal(back[key], each) for key, each in layers(*expected).items())


def test_where_all_ranks_had_the_same_layers_nothing_is_dropped(root: Root) -> None:
    commit(root, written(2, lambda rank: {"tracked": {"model": layers(0, 1)}}, replicated(2)))
    stored = open_stored(root, NAME, 0, 2)
    outline = stored.outline("tracked", "model")
    gathering.gather(outline, layers(1, 2), stored.others("tracked", "model"))
    assert sorted(outline) == sorted(layers(0, 1))


def test_ranks_that_track_other_things_are_passed_over(root: Root) -> None:
    parts = [{"a": layers(0)}, {"b": layers(1)}, {"a": layers(2)}]
    commit(root, written(3, lambda rank: {"tracked": parts[rank]}, lambda name, tensor: None))
    assert [sorted(each) for each in open_stored(root, NAME, 0, 1).others("tracked", "a")] == [sorted(layers(2))]


def optimizer_state(*numbers: int) -> dict[str, Any]:
    names = [f"{number}.weight" for number in numbers]
    return {
        "state": {
            name: {"exp_avg": torch.full((4, 2), float(number))} for name, number in zip(names, numbers, strict=True)
        },
        "param_groups": [{"lr": 0.1, "params": names}],
    }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((3, 2, 1, 0), (3, 2, 1, 0)), ((1, 9), (0, 1, 2, 3))],
)
def test_stages_of_a_pipeline_find_the_states_of_their_parameters(
    wanted: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    own = optimizer_state(0, 1)
    gathering.gather_optimizer(own, optimizer_state(*wanted), iter([optimizer_state(2, 3)]))
    assert sorted(own["state"]) == sorted(optimizer_state(*expected)["state"])
    changed = wanted if 9 not in wanted else (0, 1)
    assert own["param_groups"][0]["params"] == [f"{number}.weight" for number in changed]


def test_an_optimizer_of_other_parameters_is_left_as_it_is() -> None:
    own = optimizer_state(0, 1)
    gathering.gather_optimizer(own, optimizer_state(0, 1, 2), iter([optimizer_state(0, 1)]))
    assert own["param_groups"] == optimizer_state(0, 1)["param_groups"]
    indexed = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    gathering.gather_optimizer(indexed, optimizer_state(0, 1), iter([optimizer_state(2)]))
    assert indexed == {"state": {}, "param_groups": [{"params": [0, 1]}]}


# --- real ranks ----------------------------------------------------------------------------------------------

_JOB = """
import hashlib, json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

tests, where, name, resume, first, last = sys.argv[1:]
sys.path.insert(0, tests)
from ftrun.checkpoint import manifest
from ftrun.checkpoint.dtensors import Geometry
from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root, attempt_key, rank_json, rank_shard
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.records import RankRecord
from ftrun.checkpoint.state import encode
from ftrun.contract import WorkerContract
from ftrun.session import tracked
from ftrun.session.place import Place
from ftrun.session.restoration import Restoration
from loading_kit import STATE, Written, bytes_of, manifest_of

manifest.FORMAT = 2
torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (world_size,))
root = Root.open(where)

torch.manual_seed(1 if resume == "none" else 99)
model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
objects = {"model": model, "optimizer": optimizer}
contract = WorkerContract(where, "run", where, 1, 1, None if resume == "none" else resume, 0, "")
back = Restoration(contract, Place(rank, world_size))
for each, value in objects.items():
    back.give_all({each: value}, objects)
back.forget()


def state():
    return {each: tracked.state_of(each, value, objects) for each, value in objects.items()}


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def digest():
    now, sums = state(), hashlib.sha256()
    for key, value in sorted(now["model"].items()):
        sums.update(key.encode() + bytes_of(full(value)))
    for key, values in sorted(now["optimizer"]["state"].items()):
        for kind, value in sorted(values.items()):
            sums.update(f"{key} {kind}".encode() + bytes_of(full(value)))
    return sums.hexdigest()


def train(steps):
    for step in steps:
        torch.manual_seed(1000 + step)
        inputs = torch.randn(8, 6)[rank :: world_size]
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save():
    attempt = AttemptName.of(name)
    encoded = encode(STATE | {"tracked": state()})
    plan = Planner(rank, world_size, dist.distributed_c10d._get_default_store()).plan(encoded, objects, 1)
    entries = plan.with_digests({each: "00000000" for each in plan.verify})
    pieces = tuple(copy.piece for copy in plan.copies)
    record = RankRecord(name, rank, attempt.step, None, None, encoded.tree, entries, pieces)
    payload = bytearray(plan.size)
    payload[: len(plan.header)] = plan.header
    for copy in plan.copies:
        data = bytes_of(copy.tensor)
        payload[copy.piece.offset : copy.piece.offset + len(data)] = data
    root.create(attempt_key(attempt, rank_json(rank)), record.to_bytes())
    if payload:
        root.create(attempt_key(attempt, rank_shard(rank)), bytes(payload))
    dist.barrier()
    if rank == 0:
        files = {file: root.read(attempt_key(attempt, file)) for file in root.files(attempt)}
        made = Written(attempt, world_size, files)
        root.create(attempt_key(attempt, MANIFEST), manifest_of(made).to_bytes())
    dist.barrier()
    return len(payload)


begun = digest()
size = 0
if name != "none":
    train(range(int(first)))
    begun = digest()
    size = save()
train(range(int(first), int(last)))
print(json.dumps({"begun": begun, "ended": digest(), "size": size}))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch may abort when an interpreter ends with its threads
"""


def run_ranks(runner: Runner, world_size: int, *arguments: str) -> list[dict[str, Any]]:
    script = runner.cwd / "job.py"
    script.write_text(_JOB)
    started = []
    with held_port() as port:
        for rank in range(world_size):
            env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            where = str(runner.cwd / "root")
            started.append(runner.start_python(script, str(Path(__file__).parent), where, *arguments, env=env))
        results = [each.wait(100) for each in started]
    assert all(each.code == 0 for each in results), results
    return [json.loads(each.out.splitlines()[-1]) for each in results]


@pytest.mark.slow
def test_fsdp_goes_on_from_two_ranks_on_one_and_on_two_again(runner: Runner) -> None:
    first, second = "e00000001-s0000000003-00000001", "e00000002-s0000000003-00000002"
    calm = run_ranks(runner, 2, first, "none", "3", "5")
    assert calm[0]["begun"] == calm[1]["begun"]
    assert all(each["size"] for each in calm)
    again = run_ranks(runner, 2, "none", first, "3", "5")
    assert again == [{**each, "size": 0} for each in calm]
    alone = run_ranks(runner, 1, second, first, "0", "0")
    assert alone[0]["begun"] == calm[0]["begun"]
    back = run_ranks(runner, 2, "none", second, "3", "5")
    assert back == again
