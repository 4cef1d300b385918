"""Data positions and tracked objects: what comes back, and what is refused."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from session_kit import Augmented, Broken, Launch, alike, committed, idle, of, open_session, path_of, trained
from torch import nn

import ftrun
from ftrun import events
from ftrun.errors import CorruptCheckpoint, NotStorable, RunDirError, StateMismatch, UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun import Session

    E = TypeVar("E", bound=events.Event)

pytestmark = pytest.mark.usefixtures("here")


# ---------------------------------------------------------------- the data


def test_batches_of_unknown_position_are_refused() -> None:
    with open_session() as ft:
        with pytest.raises(UsageError, match=r"steps\(\) got a list whose position"):
            next(iter(ft.steps([1, 2, 3], total=3)))
        other = ftrun.DataLoader(Augmented(), global_batch=6)
        with pytest.raises(UsageError, match="got a DataLoader"):
            next(iter(ft.steps(other, total=3)))


class Counter:
    """An iterable that keeps its own position; an epoch has four batches."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1
            if self.next % 4 == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def test_a_tracked_iterable_is_as_good_as_a_loader() -> None:
    def life(until: int) -> list[int]:
        seen = []
        with open_session(every=3) as ft:
            counter = Counter()
            ft.track(counter=counter)
            for batch in ft.steps(counter, total=10):
                if ft.step == until:
                    raise Broken
                seen.append(batch)
        return seen

    with pytest.raises(Broken):
        life(8)
    assert life(99) == [6, 7, 8, 9]


def test_loaders_that_yield_nothing_are_an_error_and_no_endless_loop() -> None:
    class Empty(Counter):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with open_session() as ft:
        empty = Empty()
        ft.track(empty=empty)
        with pytest.raises(UsageError, match="yields no batch"):
            list(ft.steps(empty, total=3))


def test_other_data_than_the_checkpoint_knows_are_refused() -> None:
    with open_session() as ft:
        loader = ft.loader(Augmented(), global_batch=6, seed=1)
        list(ft.steps(loader, total=5))
    for dataset, seed in ((Augmented(33), 1), (Augmented(), 2)):
        with open_session() as ft, pytest.raises(StateMismatch, match="other data than this loader"):
            ft.loader(dataset, global_batch=6, seed=seed)
    with open_session() as ft, pytest.raises(StateMismatch, match="no position of a loader 'train'; it holds data"):
        ft.loader(Augmented(), name="train", global_batch=6, seed=1)
    assert committed() == [5]


def test_loaders_have_names_of_their_own() -> None:
    with open_session() as ft:
        first, second = (ft.loader(Augmented(), global_batch=size) for size in (6, 4))
        with pytest.raises(UsageError, match="that name is taken"):
            ft.loader(Augmented(), name="data2", global_batch=4)
        for _ in ft.steps(first, total=5):
            next(iter(second))
    with open_session() as ft:
        first, second = (ft.loader(Augmented(), global_batch=size) for size in (6, 4))
        assert (first.position, second.position) == ((1, 0), (0, 20))


def test_a_loader_may_take_the_share_of_another_group_than_all_ranks() -> None:
    batches = []
    for rank in (0, 1, 1):
        with open_session() as ft:
            loader = ft.loader(Augmented(), name=f"of {rank}", global_batch=6, rank=rank, world_size=2)
            batches.append(next(iter(loader)))
    assert [len(each) for each in batches] == [3, 3, 3]
    assert torch.equal(batches[1], batches[2])
    assert not torch.equal(batches[0], batches[1])


def test_a_loader_made_after_the_first_step_is_refused() -> None:
    def life(ft: Session) -> None:
        late = None
        for _ in ft.steps(total=8):
            late = late or ft.loader(Augmented(), name="late", global_batch=6)
            next(iter(late))

    with pytest.raises(UsageError, match="before the first step"), open_session(every=3) as ft:
        life(ft)


def test_steps_without_a_loader_yield_their_numbers() -> None:
    with open_session() as ft:
        assert list(ft.steps(total=3)) == [0, 1, 2]
        assert list(ft.steps(total=3)) == []
    with pytest.raises(UsageError, match="not 0"), open_session("other") as ft:
        list(ft.steps(total=0))


def test_a_total_that_is_reached_already_makes_no_step() -> None:
    with open_session() as ft:
        idle(ft, 10)
    with open_session() as ft:
        assert list(ft.steps(total=10)) == []
    assert of(events.RunEnded)[-1] == events.RunEnded(outcome="finished", exit_code=0)
    assert committed()[0] == 10


def test_a_finished_run_is_not_saved_again() -> None:
    for _ in range(2):
        with open_session() as ft:
            idle(ft, 10)
    assert committed() == [10, 5]


def test_another_total_is_refused() -> None:
    with open_session() as ft:
        idle(ft, 10)
    message = r"run of 10 steps, and the script now asks for 1,200\..*--allow-new-total"
    with pytest.raises(StateMismatch, match=message), open_session() as ft:
        idle(ft, 1200)
    assert committed() == [10, 5]
    with open_session() as ft:
        idle(ft, 10)


def test_another_total_is_allowed_by_the_launcher(launch: Launch) -> None:
    launch()
    with open_session() as ft:
        idle(ft, 10)
    launch(allow_new_total=True)
    with open_session() as ft:
        idle(ft, 12)
    assert committed()[:2] == [12, 10]


# ---------------------------------------------------------------- what is tracked


@pytest.mark.parametrize(
    "value", [3, "model", [nn.Linear(1, 1)], {"a": 1}, lambda: None], ids=lambda value: str(type(value))
)
def test_what_has_no_state_is_refused(value: Any) -> None:
    with (
        open_session() as ft,
        pytest.raises(UsageError, match=r"track\(it=\.\.\.\): a value of type \w+ has no state_dict"),
    ):
        ft.track(it=value)


def test_a_class_is_refused() -> None:
    with open_session() as ft, pytest.raises(UsageError, match="Linear is a class"):
        ft.track(it=nn.Linear)


def test_tracking_comes_before_the_first_step() -> None:
    with open_session() as ft:
        for _ in ft.steps(total=1):
            with pytest.raises(UsageError, match="before the first step"):
                ft.track(model=nn.Linear(1, 1))


def test_a_model_of_another_type_is_filled_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with open_session() as ft:
        model = nn.Linear(3, 4)
        trained(ft, model=model)
    assert "converted" not in caplog.text
    with open_session() as ft:
        half = nn.Linear(3, 4).to(torch.bfloat16)
        ft.track(model=half)
    assert torch.equal(half.weight, model.weight.to(torch.bfloat16))
    said = "model.weight is torch.bfloat16 in the script and torch.float32 in the checkpoint, and 1 more like it"
    assert said in caplog.text


def test_a_model_of_another_shape_is_refused() -> None:
    with open_session() as ft:
        trained(ft, model=nn.Linear(3, 4))
    with open_session() as ft, pytest.raises(StateMismatch) as refused:
        ft.track(model=nn.Sequential(nn.Linear(3, 4)))
    assert "0.weight: only in the script" in str(refused.value)
    assert "  bias: only in the checkpoint" in str(refused.value)
    with open_session() as ft, pytest.raises(StateMismatch) as refused:
        ft.track(model=nn.Linear(3, 5))
    assert f"the tracked 'model' doesn't fit checkpoint {of(events.Committed)[-1].checkpoint}" in str(refused.value)
    assert "weight: [5, 3] in the script, [4, 3] in the checkpoint" in str(refused.value)
    assert "start over" in str(refused.value)
    with open_session() as ft, pytest.raises(StateMismatch, match="and 3 more"):
        ft.track(model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(3))))
    assert committed() == [5]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: torch.optim.Adam(parameters(2, 3, 4)), r"groups of \[3\] parameters in the script, \[2\]"),
        (lambda: torch.optim.Adam([{"params": parameters(2)}, {"params": parameters(3)}]), r"groups of \[1, 1\]"),
        (lambda: torch.optim.Adam(parameters(2, 5)), r"parameter 1, exp_avg: \[5\] in the script, \[3\] in the check"),
        (lambda: torch.optim.SGD(parameters(2, 3), momentum=0.9), "another optimizer: options .*momentum.*only in the"),
    ],
)
def test_another_optimizer_is_refused(optimizer: Callable[[], torch.optim.Optimizer], message: str) -> None:
    with open_session() as ft:
        trained(ft, optimizer=stepped(torch.optim.Adam(parameters(2, 3))))
    with open_session() as ft, pytest.raises(StateMismatch, match=message):
        ft.track(optimizer=optimizer())


def test_options_that_another_version_of_torch_or_a_scheduler_adds_are_no_other_optimizer() -> None:
    with open_session() as ft:
        optimizer = torch.optim.Adam(parameters(2))
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
        trained(ft, optimizer=optimizer)
    with open_session() as ft:
        optimizer = torch.optim.Adam(parameters(2))
        optimizer.param_groups[0]["an_option_of_tomorrow"] = True
        ft.track(optimizer=optimizer)
        assert optimizer.param_groups[0]["max_lr"] == 0.1  # what the scheduler added came back


def test_names_that_do_not_match_are_refused() -> None:
    with open_session() as ft:
        trained(ft, model=nn.Linear(1, 1), old=nn.Linear(1, 1), older=nn.Linear(1, 1))
    with open_session() as ft, pytest.raises(StateMismatch, match="holds no 'new'; it holds model, old, older"):
        ft.track(new=nn.Linear(1, 1))
    message = r"holds old, older, which this script doesn't track.*ft\.track\(old=None\)"
    with pytest.raises(StateMismatch, match=message), open_session() as ft:
        trained(ft, model=nn.Linear(1, 1))
    with open_session() as ft:
        trained(ft, total=5, model=nn.Linear(1, 1), old=None, older=None)


def test_a_process_that_is_alone_has_a_group_of_one_while_its_session_lasts() -> None:
    with open_session() as ft:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert dist.get_world_size() == ft.world_size
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="twice") as caught, open_session():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert "process_group=False" in caught.value.__notes__[0]
    with pytest.raises(Broken), open_session():
        raise Broken
    assert not dist.is_initialized()


def test_models_fit_with_and_without_their_wrapper() -> None:
    plain = nn.Linear(2, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with open_session() as ft:
            trained(ft, model=torch.compile(nn.parallel.DistributedDataParallel(plain)))
    finally:
        dist.destroy_process_group()
    other = nn.Linear(2, 2)
    with open_session() as ft:
        ft.track(model=other)
    assert torch.equal(other.weight, plain.weight)


NESTED: dict[str, Any] = {
    "tuple": (1, (2.5, None), ["x", True]),
    "int keys": {1: "one", -2: {"deep": (0,)}},
    "big": [2**200, -(2**64), 2**63],
    "bytes": b"\x00\xff$",
    "floats": [0.1, float("inf"), -0.0, 5e-324],
    "set": {1, 2, 3},
    "complex": 1 - 2j,
    "$": "a key that looks like a tag",
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "tensors": {"half": torch.tensor([0.1, 3.0], dtype=torch.bfloat16), "scalar": torch.tensor(7)},
}


class Plain:
    """A Stateful with whatever state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def test_nested_plain_values_come_back_as_they_were() -> None:
    with open_session() as ft:
        trained(ft, plain=Plain(NESTED))
    with open_session() as ft:
        plain = Plain()
        ft.track(plain=plain)
    assert alike(plain.state, NESTED)


def test_a_snapshot_does_not_change_with_what_it_was_taken_of() -> None:
    live, plain = torch.zeros(1000), [0]
    with open_session(every=5) as ft:
        ft.track(it=Plain({"tensor": live, "list": plain}))
        for _ in ft.steps(total=6):
            live += 1
            plain[0] += 1
            if ft.step == 5:
                break
    with open_session() as ft:
        it = Plain()
        ft.track(it=it)
        assert ft.step == 5
    assert alike(it.state, {"tensor": torch.full((1000,), 5.0), "list": [5]})


def test_a_state_that_needs_pickle_is_refused_by_its_path() -> None:
    with pytest.raises(NotStorable, match=r"tracked 'tracked' .*\['bad'\].*a function"), open_session() as ft:
        trained(ft, bad=Plain(lambda: None))
    assert committed() == []


def test_damaged_checkpoints_are_not_chosen_again_without_a_launcher() -> None:
    with open_session() as ft:
        trained(ft, total=10, model=nn.Linear(2, 2))
    newest = max((RunDir(path_of("run")).checkpoints / "ckpt").glob("*-s0000000010-*/r00000.0.safetensors"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    with pytest.raises(CorruptCheckpoint), open_session():
        pytest.fail("must not open")
    gc.collect()  # the error's traceback refers to the Session, and that to the run directory's lock
    with open_session() as ft:
        assert ft.step == 5


def test_a_session_that_can_not_be_made_lets_go_of_the_run_directory(launch: Launch) -> None:
    with open_session() as ft:
        trained(ft, total=10, model=nn.Linear(2, 2))
    for manifest in (RunDir(path_of("run")).checkpoints / "ckpt").glob("*-s0000000010-*/r00000.0.safetensors"):
        manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptCheckpoint) as failed, open_session():
        pytest.fail("must not open")
    assert failed.value.__traceback__ is not None  # held here, as a notebook or a debugger would
    with open_session() as ft:
        assert ft.step == 5


def test_a_run_directory_that_can_not_be_used_is_let_go_of() -> None:
    with open_session() as ft:
        idle(ft, 10)
    for manifest in (RunDir(path_of("run")).checkpoints / "ckpt").glob("*/MANIFEST.json"):
        manifest.write_text("torn")
    failures = []
    for _ in range(2):
        with pytest.raises(UsageError, match="none that can be used") as failed, open_session():
            pytest.fail("must not open")
        failures.append(failed.value)
    assert not any(isinstance(each, RunDirError) for each in failures)


def test_a_run_directory_has_one_session_at_a_time() -> None:
    with open_session(), pytest.raises(RunDirError, match="in use"), open_session():
        pytest.fail("must not open")


def test_an_optimizer_that_was_tracked_before_its_model_was_cast_comes_back_right() -> None:
    def build() -> tuple[nn.Linear, torch.optim.Adam]:
        model = nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters())

    def train(ft: Session, model: nn.Linear, optimizer: torch.optim.Adam, total: int) -> None:
        ft.track(optimizer=optimizer)
        model.double()
        ft.track(model=model)
        for _ in ft.steps(total=total):
            optimizer.zero_grad()
            model(torch.ones(1, 3).double()).sum().backward()
            optimizer.step()
            if ft.step == 4 and ft.resume is None:
                ft.request_stop()

    model, optimizer = build()
    with pytest.raises(SystemExit), open_session() as ft:
        train(ft, model, optimizer, 9)
    again, restored = build()
    with open_session() as ft:
        train(ft, again, restored, 9)
    assert committed()[0] == 9
    assert all(each["exp_avg"].dtype == torch.float64 for each in restored.state.values())


class Masters(torch.optim.SGD):
    """An optimizer that keeps a float32 copy of each bfloat16 weight, and its momentum in float32."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"], state["exp_avg"] = parameter.detach().float(), torch.zeros(parameter.shape)
            state["exp_avg"].mul_(0.9).add_(0.001)
            state["master"].add_(state["exp_avg"])
            parameter.data.copy_(state["master"])


def test_state_of_another_type_than_its_parameter_is_not_rounded() -> None:
    def life(total: int) -> torch.Tensor:
        torch.manual_seed(2)
        model = nn.Linear(3, 3).bfloat16()
        optimizer = Masters(model.parameters(), lr=0.1)
        with open_session(every=4) as ft:
            ft.track(model=model, optimizer=optimizer)
            for step in ft.steps(total=8):
                optimizer.step()
                if step + 1 == total:
                    raise Broken
        return torch.cat([optimizer.state[model.weight][key] for key in ("master", "exp_avg")])

    calm = life(99)
    path_of("run").rename(path_of("calm"))
    with pytest.raises(Broken):
        life(6)
    again = life(99)
    assert again.dtype == torch.float32
    assert torch.equal(calm, again)
