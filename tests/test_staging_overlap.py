"""A snapshot is the state at its step boundary, bit for bit, or it is dropped and said to be: whatever mutates it."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from staging_kit import memory_for, plan_of, raw, stored

from ftrun.checkpoint import state
from ftrun.checkpoint.plan.encoding import Encoding
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.staging.moves import SLICE, Block
from ftrun.checkpoint.staging.snapshot import Orders, Snapshot
from ftrun.checkpoint.staging.stager import Stager
from ftrun.checkpoint.staging.trust import TRIALS
from ftrun.session.states import States

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from ftrun.checkpoint.staging.moves import Move


@dataclass
class Taken:
    """One snapshot, and what came of it."""

    boundary: dict[str, bytes]
    torn: set[str] | None = None
    content: dict[str, bytes] = field(default_factory=dict)
    error: BaseException | None = None

    def is_whole(self) -> bool:
        assert self.error is None
        assert self.torn is not None, "it is not finished"
        if not self.torn:
            assert {name for name in self.boundary if self.content[name] != self.boundary[name]} == set()
        return not self.torn


class Loop:
    """A training loop that saves, and whose helper waits until it is told to go on."""

    as_a_session: ClassVar[bool] = False
    """State is taken apart and planned as a Session does it, with what it remembers from save to save."""

    def __init__(self, directory: Path, overlap: bool = True, **objects: Any) -> None:
        self.objects = objects
        self._states, self._encoding, self._planner = States(), Encoding(), Planner(0, 1, None)
        self.stager = Stager(overlap=overlap)
        optimizers = [each for each in objects.values() if isinstance(each, torch.optim.Optimizer)]
        self.stager.watch(optimizers)
        self._paths = [directory / "0", directory / "1"]
        self._memories: dict[str, Any] = {}
        self._saves = 0
        self._gate = threading.Event()

    def _hold(self) -> None:
        gate = self._gate = threading.Event()
        self.stager.in_background(lambda: gate.wait(60) and None)

    def go(self) -> None:
        self._gate.set()

    def save(self, *, held: bool = False) -> Taken:
        """Take a snapshot. ``held``: the helper copies nothing until :meth:`go`."""
        assert self.stager.settle(60)
        if held:
            self._hold()
        path = self._paths[self._saves % 2]
        self._saves += 1
        encoded, plan = self._planned()
        memory = memory_for(path, plan)
        taken = Taken({name: raw(each) for name, each in encoded.tensors.items()})

        def finish(torn: Collection[str], found: Mapping[str, str], error: BaseException | None) -> None:
            taken.content = stored(path, plan)
            taken.torn, taken.error = set(torn), error
            memory.close()

        self.stager.stage(plan, memory, encoded.tensors, finish, encoded.alike)
        return taken

    def _planned(self) -> tuple[state.Encoded, Any]:
        if not self.as_a_session:
            encoded = state.encode({name: each.state_dict() for name, each in self.objects.items()})
            return encoded, plan_of(encoded.tensors)
        encoded = self._encoding.encode(self._states.of(self.objects))
        return encoded, self._planner.plan(encoded, self.objects, self._saves)

    def trials(self, step: Callable[[], None]) -> None:
        """The saves of an attempt in which nothing overlaps yet."""
        step()
        for _ in range(TRIALS):
            taken = self.save()
            step()
            self.settle()
            assert taken.is_whole()

    def settle(self) -> None:
        self.go()
        assert self.stager.settle(60)

    def overlaps(self, step: Callable[[], None]) -> set[str]:
        """Names of what is not yet copied when a save returns."""
        taken = self.save(held=True)
        # The helper hasn't begun, so what lies in the slot now was copied by the save itself.
        path = self._paths[(self._saves - 1) % 2]
        late = {name for name, content in taken.boundary.items() if content not in path.read_bytes()}
        self.go()
        step()
        self.settle()
        assert taken.is_whole()
        return late


@pytest.fixture(autouse=True, params=[False, True], ids=["by hand", "as a session"])
def _planning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "as_a_session", request.param)


class Net(torch.nn.Module):
    """Tensors of all sizes: many slices, less than one, a few bytes; strides that aren't those of the file."""

    def __init__(self, width: int = 800) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, width)
        self.wide = torch.nn.Linear(width, 900)
        self.norm = torch.nn.BatchNorm1d(900)
        self.conv = torch.nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.last = torch.nn.Linear(900, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = self.conv.weight.mean() + self.conv.bias.mean()
        return self.last(self.norm(torch.relu(self.wide(torch.relu(self.first(x)))))).sum() * kernel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def forward_backward(net: Net) -> None:
    net(torch.randn(8, 64)).backward()


def step_of(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        forward_backward(net)
        optimizer.step()
        optimizer.zero_grad()

    return step


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda each: torch.optim.AdamW(each, foreach=False),
    "foreach": lambda each: torch.optim.AdamW(each, foreach=True, amsgrad=True),
    "fused": lambda each: torch.optim.Adam(each, fused=True),
    "momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    "plain": lambda each: torch.optim.SGD(each, lr=0.1),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("held", [True, False])
def test_steps_of_optimizers(tmp_path: Path, kind: str, held: bool) -> None:
    net = Net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    loop = Loop(tmp_path, net=net, optimizer=optimizer)
    step = step_of(net, optimizer)
    loop.trials(step)
    for _ in range(3):
        taken = loop.save(held=held)  # held: the fence does it all
        step()
        loop.settle()
        assert taken.is_whole()


def test_what_overlaps(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    loop = Loop(tmp_path, net=net, optimizer=optimizer)
    step = step_of(net, optimizer)
    step()
    assert loop.overlaps(step) == set(), "on trial nothing does"
    assert loop.overlaps(step) == set()
    late = loop.overlaps(step)
    assert {"net/wide.weight", "net/conv.weight", "net/first.weight"} <= late
    assert all(name.startswith(("net/", "optimizer/state/")) for name in late)
    assert sum(name.endswith("exp_avg") for name in late) >= 3
    assert not any("norm.running" in name for name in late), "buffers are nobody's parameters"


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_overlaps_without_a_tracked_optimizer_or_the_wish(tmp_path: Path, overlap: bool) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = Loop(tmp_path, net=net) if overlap else Loop(tmp_path, overlap=False, net=net, optimizer=optimizer)
    step = step_of(net, optimizer)
    for _ in range(4):
        assert loop.overlaps(step) == set()


@pytest.fixture
def trusted(tmp_path: Path) -> tuple[Loop, Net, Callable[[], None]]:
    """A loop after its trials, whose next save overlaps."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    loop = Loop(tmp_path, net=net, optimizer=optimizer)
    step = step_of(net, optimizer)
    loop.trials(step)
    return loop, net, step


Trusted = tuple[Loop, Net, "Callable[[], None]"]


def in_place(net: Net) -> None:
    with torch.no_grad():
        net.wide.weight.add_(1)


def through_data(net: Net) -> None:
    net.wide.weight.data.mul_(0.5)


def through_numpy(net: Net) -> None:
    net.wide.weight.detach().numpy()[:] = 3


def load(net: Net) -> None:
    net.load_state_dict({name: each + 1 for name, each in net.state_dict().items()})


def one_row(net: Net) -> None:
    with torch.no_grad():
        net.conv.weight[5].zero_()


CHANGES = {"in_place": in_place, "data": through_data, "numpy": through_numpy, "load": load, "one_row": one_row}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_copy_drops_the_snapshot_and_the_next_is_whole(trusted: Trusted, change: str) -> None:
    loop, net, step = trusted
    taken = loop.save(held=True)
    CHANGES[change](net)
    loop.go()
    step()
    loop.settle()
    assert not taken.is_whole()
    assert {"net/wide.weight", "net/conv.weight"} & (taken.torn or set())
    for _ in range(TRIALS + 2):
        taken = loop.save(held=True)
        CHANGES[change](net)
        loop.go()
        step()
        loop.settle()
        assert taken.is_whole(), "what was found to change is copied at once from then on"


def test_a_change_after_the_copy_does_no_harm(trusted: Trusted) -> None:
    loop, net, step = trusted
    taken = loop.save()
    assert loop.stager._helper.wait(60)
    for change in CHANGES.values():
        change(net)
    step()
    assert taken.is_whole()


@pytest.mark.parametrize("change", ["in_place", "data", "numpy"])
def test_a_change_in_a_trial_is_found(tmp_path: Path, change: str) -> None:
    """As a loop that clamps its weights at the start of each step, past torch's counters."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    loop = Loop(tmp_path, net=net, optimizer=optimizer)
    plain = step_of(net, optimizer)

    def step() -> None:
        CHANGES[change](net)
        plain()

    loop.trials(step)
    late = loop.overlaps(step)
    assert "net/wide.weight" not in late
    assert "net/conv.weight" in late
    for _ in range(3):
        taken = loop.save(held=True)
        step()
        loop.settle()
        assert taken.is_whole()


def test_averages_and_buffers_are_copied_at_once(tmp_path: Path) -> None:
    net = Net()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loop = Loop(tmp_path, net=net, average=average, optimizer=optimizer, schedule=schedule, scaler=scaler)

    def step() -> None:
        average.update_parameters(net)  # at the start of the step, before the fence
        scaler.scale(net(torch.randn(8, 64))).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()

    loop.trials(step)
    late = loop.overlaps(step)
    assert "net/wide.weight" in late
    assert not any(name.startswith(("average", "scaler")) or "running" in name for name in late)
    for _ in range(3):
        taken = loop.save(held=True)
        step()
        loop.settle()
        assert taken.is_whole()


def test_a_step_that_the_scaler_skips(trusted: Trusted) -> None:
    loop, net, _ = trusted
    optimizer = loop.objects["optimizer"]
    scaler = torch.amp.GradScaler("cpu")
    taken = loop.save(held=True)
    scaler.scale(net(torch.randn(8, 64))).backward()
    net.wide.weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert taken.torn is None
    loop.go()
    loop.stager.fence(by_step=False)  # the end of the step
    in_place(net)
    loop.settle()
    assert taken.is_whole()


def test_any_optimizer_is_a_fence(trusted: Trusted) -> None:
    loop, net, _ = trusted
    other = torch.optim.SGD(net.parameters(), lr=0.5)  # nobody tracks it
    taken = loop.save(held=True)
    forward_backward(net)
    other.step()
    loop.settle()
    assert taken.is_whole()


def test_steps_inside_backward(trusted: Trusted) -> None:
    loop, net, _ = trusted
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    taken = loop.save(held=True)
    forward_backward(net)
    loop.settle()
    assert taken.is_whole()


def test_a_step_on_another_thread(trusted: Trusted) -> None:
    loop, _, step = trusted
    taken = loop.save(held=True)
    thread = threading.Thread(target=step)
    thread.start()
    thread.join(60)
    loop.settle()
    assert taken.is_whole()


def test_closures(tmp_path: Path) -> None:
    net = Net(200).to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=2, history_size=2)
    loop = Loop(tmp_path, net=net, optimizer=optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(torch.ones(8, 64).cumsum(0))
        loss.backward()
        return loss

    loop.trials(lambda: optimizer.step(closure))
    for _ in range(2):
        taken = loop.save(held=True)
        optimizer.step(closure)
        loop.settle()
        assert taken.is_whole()


@pytest.mark.slow
def test_steps_that_are_compiled(trusted: Trusted) -> None:
    loop, net, _ = trusted
    optimizer = loop.objects["optimizer"]

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    for _ in range(3):
        taken = loop.save(held=True)
        forward_backward(net)
        step()
        loop.settle()
        assert taken.is_whole()


def test_state_and_memory_that_are_replaced(trusted: Trusted) -> None:
    loop, net, step = trusted
    optimizer = loop.objects["optimizer"]
    taken = loop.save(held=True)
    net.wide.weight.data = torch.zeros_like(net.wide.weight)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] * 2
    loop.go()
    step()
    loop.settle()
    assert taken.is_whole(), "the memory of then is kept, and nobody wrote to it"
    taken = loop.save()
    step()
    loop.settle()
    assert taken.is_whole()


def test_a_parameter_that_leaves_the_optimizer_is_copied_at_once(trusted: Trusted) -> None:
    loop, net, step = trusted
    optimizer = loop.objects["optimizer"]
    group = optimizer.param_groups[0]
    group["params"] = [each for each in group["params"] if each is not net.wide.weight]
    del optimizer.state[net.wide.weight]
    assert "net/wide.weight" not in loop.overlaps(step)


def test_a_step_that_no_hook_sees(tmp_path: Path) -> None:
    """Its tensors are found to change in their trials, and never overlap."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loop = Loop(tmp_path, net=net, optimizer=optimizer)
    unseen = type(optimizer).step.__wrapped__

    def step() -> None:
        forward_backward(net)
        unseen(optimizer)
        optimizer.zero_grad()

    step()
    for _ in range(TRIALS + 2):
        assert loop.overlaps(step) == set()


def test_a_save_that_is_followed_by_another(trusted: Trusted) -> None:
    loop, _, step = trusted
    taken = loop.save(held=True)
    loop.go()
    again = loop.save()  # nothing has stepped
    step()
    loop.settle()
    assert taken.is_whole()
    assert again.is_whole()
    assert taken.boundary == again.boundary


def test_an_end_before_the_fence(trusted: Trusted) -> None:
    loop, net, step = trusted
    taken = loop.save(held=True)
    loop.go()
    assert loop.stager.close(60)
    assert taken.is_whole()
    before = raw(net.wide.weight)
    step()
    assert raw(net.wide.weight) != before, "and steps go on without a fence"


def test_the_first_change_of_a_hundred_kinds(trusted: Trusted) -> None:
    """All at once, at moments of their own, while the helper copies as fast as it can."""
    loop, net, step = trusted
    optimizer = loop.objects["optimizer"]
    choices = list(CHANGES.values())
    rng = random.Random(3)
    dropped = 0
    for _ in range(40):
        loop.stager._trust._changed.clear()  # make it try again, and again
        for name in loop.stager._trust._stayed:
            loop.stager._trust._stayed[name] = TRIALS
        taken = loop.save()
        for _ in range(rng.randrange(3)):
            rng.choice(choices)(net)
        if rng.random() < 0.5:
            step()
        for values in optimizer.state.values():
            values["exp_avg"].add_(1)
        loop.settle()
        dropped += not taken.is_whole()
    assert dropped < 40


def test_a_start_that_is_broken_off_makes_no_snapshot() -> None:
    """A save that somebody interrupts, in a loop that goes on: the helper copies what has changed by then."""
    size = 6 * SLICE
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    all_moves: list[Move] = [
        Block("x", target.data_ptr() + at, source.data_ptr() + at, SLICE) for at in range(0, size, SLICE)
    ]
    made = Snapshot(Orders(now=all_moves), {}, torch.cuda.Stream)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.start(interrupt)
    source.fill_(2)
    made.help()
    with pytest.raises(KeyboardInterrupt):
        made.verdict()


def test_errors_are_told(trusted: Trusted, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _net, step = trusted

    def broken(*_: Any) -> None:
        raise OSError("device is gone")

    for function in ("moves.move", "runs.move_all"):
        monkeypatch.setattr(f"ftrun.checkpoint.staging.{function}", broken)
    taken = loop.save(held=True)
    monkeypatch.undo()
    step()
    loop.settle()
    assert "device is gone" in str(taken.error)
    taken = loop.save()
    step()
    loop.settle()
    assert taken.is_whole()


def test_the_fence_is_free_when_nothing_waits(trusted: Trusted) -> None:
    loop, _net, step = trusted
    loop.save()
    step()
    held = loop.stager.held
    assert held > 0
    step()
    assert loop.stager.held == held
