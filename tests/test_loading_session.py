"""What a Session gets back: tracked objects, filled in place; damage, mismatches and random states."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loading_kit import NAME, commit, flip, in_rows, path_of, replicated, seal, written
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from ftrun.checkpoint import reader
from ftrun.checkpoint.layout import MANIFEST, Root, rank_shard
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import WorkerContract
from ftrun.errors import CheckpointError, CorruptCheckpoint, StateMismatch
from ftrun.session import random_state, tracked
from ftrun.session.gradients import PendingGradients
from ftrun.session.place import Place
from ftrun.session.restoration import Restoration

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    streams = random_state.capture()
    yield
    random_state.restore(streams)


def contract(root: Root, **changes: Any) -> WorkerContract:
    made = WorkerContract(
        run_dir=str(root.path.parent),
        run_id="run",
        root=str(root.path),
        attempt=2,
        epoch=4,
        resume=str(NAME),
        node=0,
        worker_dir="",
    )
    return replace(made, **changes)


def restoration(root: Root, rank: int = 0, world_size: int = 1, **changes: Any) -> Restoration:
    return Restoration(contract(root, **changes), Place(rank, world_size))


class Job:
    """A model with buffers and tied weights, an optimizer that has stepped, and a schedule."""

    def __init__(self, seed: int, steps: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.model[2].weight = nn.Parameter(self.model[0].weight.t().clone())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.randn(5, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def state(self) -> dict[str, Any]:
        return {name: tracked.state_of(name, each, self.objects) for name, each in self.objects.items()}


def value(job: Job) -> Any:
    def of(rank: int) -> dict[str, Any]:
        random_state.derive("elsewhere", rank)
        return {"tracked": job.state(), "random": random_state.capture(), "extra": {"note": rank}}

    return of


def equal(one: Job, other: Job) -> bool:
    mine, theirs = one.state(), other.state()
    weights = all(torch.equal(mine["model"][key], each) for key, each in theirs["model"].items())
    states = all(
        torch.equal(mine["optimizer"]["state"][name][key], each)
        for name, values in theirs["optimizer"]["state"].items()
        for key, each in values.items()
    )
    groups = mine["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    return weights and states and groups and mine["schedule"] == theirs["schedule"]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("layout", [replicated(3), in_rows(3)], ids=["replicated", "rows"])
def test_everything_tracked_comes_back_on_any_number_of_ranks(root: Root, world_size: int, layout: Any) -> None:
    saved = Job(1, steps=5)
    commit(root, written(3, value(saved), layout))
    for rank in range(world_size):
        job = Job(2)
        places = {key: each.data_ptr() for key, each in job.model.state_dict().items()}
        back = restoration(root, rank, world_size)
        assert back.checkpoint is not None
        assert (back.step, back.checkpoint.extra, back.checkpoint.reason) == (20, {"note": rank}, "user")
        for name, each in job.objects.items():
            back.give_all({name: each}, job.objects)
        assert equal(job, saved)
        assert places == {key: each.data_ptr() for key, each in job.model.state_dict().items()}
        assert back.all_claimed
        back.require_all_claimed()
        event = back.event()
        assert event is not None
        assert event.step == 20
        assert event.seconds > 0
        back.forget()
    saved.step()
    job.step()  # an optimizer that was restored goes on as one that was not; they drew different inputs
    assert job.optimizer.state[job.model[0].weight]["step"] == 6


def moments(job: Job) -> dict[tuple[str, str], torch.Tensor]:
    state = job.state()["optimizer"]["state"]
    return {(name, key): state[name][key] for name in state for key in ("exp_avg", "exp_avg_sq")}


def test_an_optimizer_that_has_stepped_is_read_into_the_memory_of_its_state(root: Root) -> None:
    saved = Job(1, steps=5)
    commit(root, written(1, value(saved), replicated(1)))
    job = Job(2, steps=2)
    before = moments(job)
    restoration(root).give_all(job.objects, job.objects)
    assert equal(job, saved)
    assert {key: each.data_ptr() for key, each in moments(job).items()} == {
        key: each.data_ptr() for key, each in before.items()
    }
    tied = Job(3, steps=2)
    states = tied.optimizer.state
    for parameter in (tied.model[0].bias, tied.model[1].weight):
        states[parameter]["exp_avg"] = states[tied.model[1].bias]["exp_avg"]  # three in one place
    restoration(root).give_all(tied.objects, tied.objects)
    assert equal(tied, saved)


def test_an_optimizer_that_is_tracked_before_its_model_comes_back(root: Root) -> None:
    saved = Job(1, steps=3)
    commit(root, written(1, value(saved), replicated(1)))
    job = Job(2)
    back = restoration(root)
    back.give_all({"optimizer": job.optimizer}, {"optimizer": job.optimizer})
    back.give_all({"schedule": job.schedule}, {})
    back.give_all({"model": job.model}, {})
    assert equal(job, saved)


def wide() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(512, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def bytes_read() -> int:
    """By this process so far, from files of any kind."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_objects_that_come_back_together_are_read_together(root: Root) -> None:
    saved = wide()
    state = {name: tracked.state_of(name, each, saved) for name, each in saved.items()}
    commit(root, written(1, lambda _: {"tracked": state}, replicated(1)))
    size = path_of(root, rank_shard(0)).stat().st_size
    back, job = restoration(root), wide()
    with torch.no_grad():
        job["model"].weight.zero_()
    before = bytes_read()
    back.give_all(job, job)
    assert size <= bytes_read() - before < 1.5 * size
    assert torch.equal(job["model"].weight, saved["model"].weight)
    assert torch.equal(*(each["optimizer"].state[each["model"].weight]["exp_avg"] for each in (job, saved)))
    assert back.all_claimed


def test_where_one_of_several_does_not_fit_none_is_changed(root: Root) -> None:
    saved = Job(1, steps=5)
    commit(root, written(1, value(saved), replicated(1)))
    job = Job(2)
    before = snapshot(job.model)
    other = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    objects = {"model": job.model, "optimizer": other, "schedule": job.schedule}
    with pytest.raises(StateMismatch, match="optimizer"):
        restoration(root).give_all(objects, objects)
    assert all(torch.equal(each, before[key]) for key, each in job.model.state_dict().items())


def test_a_large_state_that_needs_fresh_memory_is_read_by_itself(root: Root) -> None:
    """All together they could take as much memory as the model itself."""
    saved = {name: Holder(torch.full((5 * 2**20,), number).half()) for number, name in enumerate("abc", 1)}
    state = {name: each.state_dict() for name, each in saved.items()}
    commit(root, written(1, lambda _: {"tracked": state}, replicated(1)))
    back = {name: Holder(torch.empty(0)) for name in saved}
    gc.freeze()  # what was there before isn't looked at, nor counted
    try:
        restoration(root).give_all(back, back)
    finally:
        gc.unfreeze()
    assert [each.most for each in back.values()] == [1] * 3
    assert all(torch.equal(back[name].tensor, saved[name].tensor) for name in saved)


def full() -> int:
    """How many large tensors in full precision there are."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and not each.is_meta]
    return sum(each.dtype is torch.float32 and each.numel() == 5 * 2**20 for each in tensors)


class Holder:
    """Keeps a tensor in half precision, and notes how many in full there are when its own arrives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.most = 0

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor.float()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.most = full()
        self.tensor = state["tensor"].half()


def test_a_fresh_start_gives_nothing(root: Root) -> None:
    job, before = Job(2, steps=1), Job(2, steps=1)
    back = restoration(root, resume=None)
    for name, each in job.objects.items():
        back.give_all({name: each}, job.objects)
    back.settle_optimizers(job.objects)
    back.give_rest(PendingGradients(), set(job.objects))
    back.tell()
    back.forget()
    assert (back.checkpoint, back.step, back.event(), back.all_claimed) == (None, 0, None, True)
    assert equal(job, before)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: each.clone() for key, each in model.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6)), ["1.weight: only in the checkpoint", "and 2 more"]),
        (
            lambda: nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(6), nn.Linear(6, 4)),
            ["0.weight: [7, 4] in the script, [6, 4] in the checkpoint", "0.bias: [7] in the script"],
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(1, 1)),
            ["3.weight: only in the script"],
        ),
    ],
)
def test_another_model_is_refused_and_left_as_it_is(root: Root, make: Any, messages: list[str]) -> None:
    commit(root, written(2, value(Job(1)), replicated(2)))
    model = make()
    before = snapshot(model)
    with pytest.raises(StateMismatch, match=f"tracked 'model' doesn't fit checkpoint {NAME}") as refused:
        restoration(root).give_all({"model": model}, {})
    assert all(message in str(refused.value) for message in messages), refused.value
    assert all(torch.equal(before[key], each) for key, each in model.state_dict().items())


def test_another_optimizer_is_refused_and_left_as_it_is(root: Root) -> None:
    saved = Job(1, steps=2)
    commit(root, written(1, value(saved), replicated(1)))
    job = Job(2, steps=1)
    other = torch.optim.SGD(job.model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(StateMismatch, match="another optimizer: options"):
        restoration(root).give_all({"optimizer": other}, {"model": job.model, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.5
    fewer = torch.optim.Adam(list(job.model.parameters())[1:])
    with pytest.raises(StateMismatch, match=r"0\.weight: only in the checkpoint's optimizer"):
        restoration(root).give_all({"optimizer": fewer}, {"model": job.model, "optimizer": fewer})
    assert not fewer.state


def test_names_that_the_checkpoint_lacks_or_the_script_forgets(root: Root) -> None:
    commit(root, written(1, value(Job(1)), replicated(1)))
    back = restoration(root)
    with pytest.raises(StateMismatch, match="holds no 'ema'; it holds model, optimizer, schedule"):
        back.give_all({"ema": nn.Linear(1, 1)}, {})
    with pytest.raises(StateMismatch, match=r"holds no position of a loader 'data'; it holds none"):
        back.give_loader("data", None)  # type: ignore[arg-type]
    with pytest.raises(StateMismatch, match="holds model, optimizer, schedule, which this script doesn't track"):
        back.require_all_claimed()
    for name in ("model", "optimizer", "schedule"):
        back.give_up(name)
    back.require_all_claimed()


def test_a_damaged_checkpoint_is_marked_and_not_chosen_again(root: Root) -> None:
    state = {"w": torch.zeros(5 * 2**20)}  # larger than a chunk: the damage is not where the random states are
    commit(root, written(1, lambda rank: {"tracked": {"it": state}}, replicated(1)))
    flip(path_of(root, rank_shard(0)), 1000)
    it = Plain()
    with pytest.raises(CorruptCheckpoint, match="chunk 0"):
        restoration(root).give_all({"it": it}, {})
    assert it.state is None
    info = reader.inspect(root, NAME)
    assert info.status == "bad"
    assert "chunk 0" in info.reason


def test_a_damaged_start_is_marked_too(root: Root) -> None:
    commit(root, written(1, value(Job(1)), replicated(1)))
    flip(path_of(root, MANIFEST), 50)
    with pytest.raises(CorruptCheckpoint):
        restoration(root)
    assert reader.inspect(root, NAME).status == "bad"


class Plain:
    """A Stateful with whatever state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_other_objects_get_plain_tensors(root: Root) -> None:
    state = {"average": torch.randn(100, 3), "count": 7, "pair": (torch.ones(2), None)}
    commit(root, written(2, lambda rank: {"tracked": {"it": state}}, replicated(2)))
    it = Plain()
    assert isinstance(it, Stateful)
    restoration(root).give_all({"it": it}, {})
    assert torch.equal(it.state["average"], state["average"])
    assert torch.equal(it.state["pair"][0], torch.ones(2))
    assert (it.state["count"], it.state["pair"][1]) == (7, None)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_rank_that_was_there_gets_its_streams_back_and_a_new_one_its_own(root: Root) -> None:
    commit(root, written(2, value(Job(1)), replicated(2)))
    found = []
    for rank in range(4):
        back = restoration(root, rank, 4)
        draws()
        back.give_rest(PendingGradients(), set())
        found.append(draws())
        back.give_rest(PendingGradients(), set())
        assert draws() == found[-1]
        if rank < 2:
            random_state.derive("elsewhere", rank)
        else:
            random_state.derive(str(NAME), rank)
        assert draws() == found[-1]
    assert len(set(found)) == 4


def test_pending_gradients_come_back_on_as_many_ranks(root: Root) -> None:
    job = Job(1, steps=1)
    gradient = torch.randn(6, 4)
    state = {"tracked": job.state(), "gradients": {"optimizer": {"0": gradient}}, "random": random_state.capture()}
    commit(root, written(2, lambda rank: state, replicated(2)))
    pending = PendingGradients()
    pending.watch("optimizer", job.optimizer)
    back = restoration(root, 1, 2)
    for name, each in job.objects.items():
        back.give_all({name: each}, job.objects)
    back.give_rest(pending, set(job.objects))
    assert job.model[0].weight.grad is not None
    assert torch.equal(job.model[0].weight.grad, gradient)
    assert job.model[0].bias.grad is None
    with pytest.raises(StateMismatch, match="on 2 ranks; it resumes only on as many, not on 3"):
        restoration(root, 0, 3).give_rest(pending, set(job.objects))
    restoration(root, 0, 3).give_rest(pending, set())


def test_an_optimizer_whose_parameters_were_cast_afterwards_is_settled(root: Root) -> None:
    saved = Job(1, steps=2)
    commit(root, written(1, value(saved), replicated(1)))
    job = Job(2)
    back = restoration(root)
    for name, each in job.objects.items():
        back.give_all({name: each}, job.objects)
    job.model.double()
    back.settle_optimizers(job.objects)
    moments = job.optimizer.state[job.model[0].weight]["exp_avg"]
    assert moments.dtype == torch.float64
    assert torch.equal(moments.float(), saved.optimizer.state[saved.model[0].weight]["exp_avg"])


def test_a_model_in_another_type_and_layout_takes_its_values(root: Root) -> None:
    saved = nn.Conv2d(3, 4, 3)
    commit(root, written(2, lambda rank: {"tracked": {"model": saved.state_dict()}}, replicated(2)))
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).half()
    restoration(root).give_all({"model": model}, {})
    assert torch.equal(model.weight, saved.weight.half())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_part_that_is_compiled_now_gets_its_state(root: Root) -> None:
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    commit(root, written(1, lambda rank: {"tracked": {"model": saved.state_dict()}}, replicated(1)))
    model = nn.Sequential(torch.compile(nn.Linear(2, 3)), nn.Linear(3, 1))
    restoration(root).give_all({"model": model}, {})
    assert torch.equal(model[0]._orig_mod.weight, saved[0].weight)
    assert torch.equal(model[1].weight, saved[1].weight)


def test_stages_of_a_pipeline_that_are_dealt_out_anew(root: Root) -> None:
    torch.manual_seed(3)
    layers = {str(number): nn.Linear(2, 2) for number in range(4)}

    def stage(*numbers: str) -> tuple[nn.ModuleDict, torch.optim.SGD]:
        module = nn.ModuleDict({number: nn.Linear(2, 2) for number in numbers})
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def saved(rank: int) -> dict[str, Any]:
        module, optimizer = stage(*(("0", "1") if rank == 0 else ("2", "3")))
        for number, layer in module.items():
            layer.load_state_dict(layers[number].state_dict())
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, float(number))
        optimizer.step()
        layers.update(module.items())
        objects = {"model": module, "optimizer": optimizer}
        return {"tracked": {name: tracked.state_of(name, each, objects) for name, each in objects.items()}}

    commit(root, written(2, saved, lambda name, tensor: None))
    for rank, numbers in enumerate([("0",), ("1", "2"), ("3",)]):
        module, optimizer = stage(*numbers)
        objects = {"model": module, "optimizer": optimizer}
        back = restoration(root, rank, 3)
        for name, each in objects.items():
            back.give_all({name: each}, objects)
        for number in numbers:
            assert torch.equal(module[number].weight, layers[number].weight)
            buffer = optimizer.state[module[number].weight]["momentum_buffer"]
            assert torch.equal(buffer, torch.full((2, 2), float(number)))


def test_a_sealed_snapshot_is_given_out_like_a_commit(root: Root, tmp_path: Path) -> None:
    saved, tier = Job(1, steps=4), Tier(tmp_path / "memory")
    seal(tier, written(2, value(saved), replicated(2)))
    job = Job(2)
    back = restoration(root, 1, 2, tier=str(tier.path), resume_sealed=True)
    assert back.checkpoint is not None
    assert (back.step, back.checkpoint.reason) == (20, "interval")
    for name, each in job.objects.items():
        back.give_all({name: each}, job.objects)
    assert equal(job, saved)
    with pytest.raises(CheckpointError, match="isn't committed either"):
        restoration(root, 0, 1, tier=str(tmp_path / "elsewhere"), resume_sealed=True)
    assert not root.path.exists()
