"""A Session in this process, one rank: what it restores, when it saves and stops, and what it refuses."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import eventually
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import ftrun
from ftrun import events, pulse
from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.layout import Root
from ftrun.contract import Every, Fault, WorkerContract
from ftrun.errors import CorruptCheckpoint, NotStorable, RunDirError, StateMismatch, UsageError
from ftrun.inject import InjectedFault
from ftrun.rundir import RunDir
from ftrun.session import callbacks, random_state
from ftrun.session.callbacks import Registry

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator

    from ftrun import Session
    from ftrun.data.loader import DataLoader

    E = TypeVar("E", bound=events.Event)

TOTAL = 22
EPOCH = 5  # steps: 32 samples in batches of 6


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory, an environment, callbacks, signal handlers and random streams of the test's own."""
    for name in list(os.environ):
        if name.startswith(("FTRUN_", "TORCHELASTIC_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FTRUN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    registry = Registry()
    monkeypatch.setattr(callbacks, "REGISTRY", registry)
    monkeypatch.setattr("ftrun.session.session.REGISTRY", registry)
    monkeypatch.setattr("ftrun.session.restoring.REGISTRY", registry)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    streams = random_state.capture()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are tiny here, and threads would only wait for each other
    yield
    torch.set_num_threads(threads)
    random_state.restore(streams)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def of(kind: type[E], run: str = "run") -> list[E]:
    return [each.event for each in events.read(RunDir(_path(run)).events()) if isinstance(each.event, kind)]


def _path(run: str) -> Path:
    return Path.cwd() / run


def committed(run: str = "run") -> list[int]:
    """Steps of the commits of a run, newest first."""
    return [each.name.step for each in reader.attempts(Root.open(RunDir(_path(run)).checkpoints)) if each.manifest]


def open_session(run: str = "run", every: int | None = 5) -> contextlib.AbstractContextManager[Session]:
    os.environ["FTRUN_RUN_DIR"] = str(_path(run))  # the fixture puts it back
    return ftrun.Session.open(every=every)


class Broken(Exception):
    """What the loops under test raise."""


def fall() -> None:
    raise Broken


# ---------------------------------------------------------------- a job with everything that must be continued


class Augmented(Dataset[torch.Tensor]):
    """A sample, its index first, with noise from the three generators."""

    def __init__(self, n: int = 32) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(()).item()]
        return torch.tensor([float(index), (index % 7) / 7, (index % 3) / 3, *noise])


def scramble(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Job:
    """Model with batch norm and dropout, EMA, two optimizers, schedulers and a plain Stateful."""

    def __init__(self) -> None:
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)
        self.model = nn.ModuleList([self.body, self.head])
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.often = torch.optim.AdamW(self.body.parameters(), lr=0.02)
        self.seldom = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.often, max_lr=0.05, total_steps=TOTAL + 2)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.seldom, patience=1)

    @property
    def tracked(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in ("body", "head")}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        # Draws in the loop itself, from every generator.
        scale = 1.0 + 0.1 * random.random() + 0.1 * np.random.rand()
        inputs = batch[:, 1:] * scale + 0.1 * torch.randn(len(batch), 5)
        return (self.head(self.body(inputs)).squeeze(1) - batch[:, 0] / 32).square().mean()

    def averages(self, loss: torch.Tensor) -> None:
        self.ema.update_parameters(self.model)
        self.schedule.step()
        self.plateau.step(loss.item())

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": value.clone()
            for name, each in (("model", self.model), ("ema", self.ema))
            for key, value in each.state_dict().items()
        }


def zero_first(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    job.often.zero_grad()
    job.seldom.zero_grad()
    loss = job.loss(batch)
    loss.backward()
    job.often.step()
    job.seldom.step()
    return loss


def zero_first_in_place(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    job.often.zero_grad(set_to_none=False)
    job.seldom.zero_grad(set_to_none=False)
    loss = job.loss(batch)
    loss.backward()
    job.often.step()
    job.seldom.step()
    return loss


def zero_last(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    loss = job.loss(batch)
    loss.backward()
    job.often.step()
    job.seldom.step()
    job.model.zero_grad()
    return loss


def zero_last_in_place(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    loss = job.loss(batch)
    loss.backward()
    job.often.step()
    job.seldom.step()
    job.model.zero_grad(set_to_none=False)
    return loss


def step_first(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    job.often.step()
    job.seldom.step()
    job.model.zero_grad()
    loss = job.loss(batch)
    loss.backward()
    return loss


def accumulate_four(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    loss = job.loss(batch)
    (loss / 4).backward()
    if step % 4 == 3:
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.often.step()
        job.seldom.step()
        job.model.zero_grad()
    return loss


def every_third(job: Job, batch: torch.Tensor, step: int) -> torch.Tensor:
    loss = job.loss(batch)
    loss.backward()
    job.often.step()
    job.often.zero_grad()
    if step % 3 == 2:
        job.seldom.step()
        job.seldom.zero_grad()
    return loss


STYLES = [zero_first, zero_first_in_place, zero_last, zero_last_in_place, step_first, accumulate_four, every_third]


@dataclass
class Story:
    """What one run did: for each step the samples and the loss, as it came to count in the end."""

    steps: dict[int, tuple[list[float], float]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    redone: int = 0

    def tell(self, step: int, batch: torch.Tensor, loss: torch.Tensor) -> None:
        told = (batch.flatten().tolist(), loss.item())
        if step in self.steps:
            assert self.steps[step] == told, f"step {step} differs when it is done again"
            self.redone += 1
        self.steps[step] = told


def driven(ft: Session, loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from ft.steps(loader, total=TOTAL)


def of_ones_own(ft: Session, loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while ft.step < TOTAL:
        for batch in loader:
            yield batch
            ft.step_end()
            if ft.should_save():
                ft.save()
            if ft.should_stop() or ft.step == TOTAL:
                return


def live(
    story: Story,
    style: Callable[[Job, torch.Tensor, int], torch.Tensor],
    falls: list[int],
    *,
    drive: Callable[..., Iterator[torch.Tensor]] = driven,
    run: str = "run",
) -> None:
    """One life of a process: to the end, or to the next step at which it falls."""
    with open_session(run) as ft:
        scramble(7 if ft.resume is None else 1000 + ft.step)  # building draws other numbers in each life
        job = Job()
        loader = ft.loader(Augmented(), global_batch=6, shuffle=True, seed=17)
        ft.track(**job.tracked)
        if drive is driven and ft.resume is not None:
            scramble(2000 + ft.step)  # what is built after track() draws numbers too
        for batch in drive(ft, loader):
            if falls and ft.step >= falls[0]:
                falls.pop(0)
                torch.rand(3)
                raise Broken
            loss = style(job, batch, ft.step)
            job.averages(loss)
            story.tell(ft.step, batch, loss)
            ft.log(loss=loss)
        story.weights = job.weights()


def lives(style: Callable[..., torch.Tensor], falls: list[int], **options: Any) -> Story:
    story = Story()
    for _ in range(len(falls)):
        with pytest.raises(Broken):
            live(story, style, falls, **options)
    live(story, style, [], **options)
    return story


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # schedules step more often than optimizers here
@pytest.mark.parametrize("style", STYLES)
def test_an_interrupted_run_is_the_run_that_was_never_interrupted(style: Callable[..., torch.Tensor]) -> None:
    calm = lives(style, [], run="calm")
    # Before the first commit, at the start of an epoch, in the middle of one, right after a commit, at the last step.
    stormy = lives(style, [3, 7, 10, 14, 21], run="stormy")
    assert sorted(calm.steps) == list(range(TOTAL))
    assert len({batch[0] for batch, _ in calm.steps.values()}) > EPOCH
    assert stormy.steps == calm.steps
    assert stormy.redone >= 3 + 2
    assert same(stormy.weights, calm.weights)
    assert [each.resume_step for each in of(events.AttemptStarted, "stormy")] == [0, 0, 5, 10, 10, 20]
    assert committed("stormy") == [22, 20, 15]


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("style", [zero_first, accumulate_four])
def test_a_loop_of_ones_own_continues_exactly_too(style: Callable[..., torch.Tensor]) -> None:
    calm = lives(style, [], run="calm", drive=of_ones_own)
    stormy = lives(style, [3, 7, 14], run="stormy", drive=of_ones_own)
    assert stormy.steps == calm.steps
    assert same(stormy.weights, calm.weights)


def test_a_loop_of_ones_own_makes_the_same_run_as_steps() -> None:
    one, other = lives(zero_first, [], run="one", drive=of_ones_own), lives(zero_first, [], run="other")
    assert one.steps == other.steps
    assert same(one.weights, other.weights)
    assert committed("one") == [20, 15, 10]


def test_a_fused_optimizer_of_a_model_in_channels_last_continues_exactly() -> None:
    def life(run: str, until: int) -> list[torch.Tensor]:
        with open_session(run, every=3) as ft:
            torch.manual_seed(1)
            model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
            ft.track(model=model, optimizer=optimizer)
            for step in ft.steps(total=6):
                if step == until:
                    raise Broken
                inputs = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
                model(inputs).square().sum().backward()
                if step % 2:  # at the save of step 3 gradients are pending
                    optimizer.step()
                    optimizer.zero_grad()
            return [each.detach().clone() for each in model.parameters()]

    calm = life("calm", 99)
    with pytest.raises(Broken):
        life("stormy", 4)
    assert all(map(torch.equal, life("stormy", 99), calm))


# ---------------------------------------------------------------- when it saves


def idle(ft: Session, total: int, at: dict[int, Callable[[], Any]] | None = None) -> None:
    for step in ft.steps(total=total):
        if at and step in at:
            at[step]()


def test_saves_every_so_many_steps_and_at_the_end() -> None:
    with open_session(every=4) as ft:
        assert (ft.step, ft.resume, ft.rank, ft.world_size, ft.local_rank) == (0, None, 0, 1, 0)
        idle(ft, 10)
        assert ft.step == 10
        assert committed() == [10, 8, 4]
    assert [(each.step, each.reason) for each in of(events.Saved)] == [(4, "interval"), (8, "interval"), (10, "last")]
    assert of(events.StepsEnded) == [events.StepsEnded(step=10, finished=True)]
    assert of(events.RunEnded) == [events.RunEnded(outcome="finished", exit_code=0)]


def test_a_save_of_the_last_step_is_not_made_twice() -> None:
    with open_session(every=5) as ft:
        idle(ft, 10)
    assert [(each.step, each.reason) for each in of(events.Saved)] == [(5, "interval"), (10, "interval")]


def test_a_second_save_at_one_step_does_nothing() -> None:
    with open_session(every=100) as ft:

        def save() -> None:
            ft.save()
            assert not ft.should_save()
            ft.save()

        idle(ft, 5, {3: save})
    assert [(each.step, each.reason) for each in of(events.Saved)] == [(3, "user"), (5, "last")]


def test_should_save_is_true_once_at_a_due_step() -> None:
    with open_session(every=2) as ft:
        due = []
        for _ in range(5):
            ft.step_end()
            due.append((ft.step, ft.should_save(), ft.should_save()))
            if ft.should_save():
                ft.save()
                assert not ft.should_save()
    assert due == [(1, False, False), (2, True, True), (3, False, False), (4, True, True), (5, False, False)]
    assert committed() == [4, 2]
    with open_session(every=2) as ft:
        assert ft.step == 4
        assert not ft.should_save()


def test_a_save_before_the_first_step_holds_the_beginning() -> None:
    model = nn.Linear(2, 2)
    with open_session(every=100) as ft:
        ft.track(model=model)
        ft.save()
    with open_session() as ft:
        other = nn.Linear(2, 2)
        ft.track(model=other)
        assert (ft.step, ft.resume.step if ft.resume else None) == (0, 0)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("every", [0, -1, 2.5, "10"])
def test_an_interval_is_a_whole_number_of_steps(every: Any) -> None:
    with pytest.raises(UsageError, match="whole number from 1"), ftrun.Session.open(every=every):
        pytest.fail("must not open")


@dataclass
class Launch:
    """What the launcher does around one attempt, as far as a worker can see."""

    run: RunDir
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, **changes: Any) -> WorkerContract:
        if not self.run.exists():
            self.run.create({"run_id": "run"})
        root = Root.open(self.run.checkpoints)
        before = epochs.current(root)
        commit = reader.latest(root, "run", since=before.since).commit if before else None
        name = str(commit.name) if commit else None
        record = epochs.claim(root, "run", fresh=False, parent=name)
        attempt = self.run.next_attempt()
        directory = self.run.worker(attempt, 0, 0)
        directory.mkdir(parents=True)
        pulse.create(directory / "pulse")
        contract = WorkerContract(
            run_dir=str(self.run.path),
            run_id="run",
            root=str(root.path),
            attempt=attempt,
            epoch=record.epoch,
            since=record.since,
            resume=name,
            node=0,
            worker_dir=str(directory),
            **changes,
        )
        for variable, value in contract.to_environment().items():
            self.monkeypatch.setenv(variable, value)
        return contract

    def beat(self, contract: WorkerContract) -> pulse.Beat:
        beat = pulse.read(self.run.worker(contract.attempt, 0, 0) / "pulse")
        assert beat is not None
        return beat


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    return Launch(RunDir(tmp_path / "run"), monkeypatch)


def test_the_job_decides_the_interval_before_the_script(launch: Launch) -> None:
    launch(every=Every(steps=3))
    with open_session(every=2) as ft:
        idle(ft, 7)
    assert committed() == [7, 6, 3]


def test_an_interval_in_seconds(launch: Launch) -> None:
    launch(every=Every(seconds=0.05), keep_last=100)
    with ftrun.Session.open() as ft:
        waiting = iter(ft.steps(total=100_000))
        eventually(lambda: next(waiting, None) is None or len(of(events.Saved)) >= 2, 20, "a second save")
    saved = of(events.Saved)
    assert len(saved) >= 2
    assert {each.reason for each in saved} == {"interval"}
    assert sorted(committed()) == [each.step for each in saved]


def test_an_interval_in_seconds_in_a_loop_of_ones_own(launch: Launch) -> None:
    launch(every=Every(seconds=0.05))
    with ftrun.Session.open() as ft:

        def made_a_save() -> bool:
            ft.step_end()
            due = ft.should_save()
            if due:
                ft.save()
                assert not ft.should_save()
            return due

        eventually(made_a_save, 20, "a save")
        step = ft.step
    assert committed() == [step]


def test_a_very_long_interval_saves_at_the_end_only(launch: Launch) -> None:
    launch(every=Every(seconds=3600.0))
    with ftrun.Session.open() as ft:
        idle(ft, 50)
    assert committed() == [50]


def test_the_pulse_says_how_far_the_run_is(launch: Launch) -> None:
    contract = launch(every=Every(steps=4))
    with pytest.raises(Broken), ftrun.Session.open() as ft:
        idle(ft, 9, {6: fall})
    beat = launch.beat(contract)
    assert (beat.step, beat.base, beat.total, beat.owned) == (6, 0, 9, True)
    contract = launch()
    with ftrun.Session.open() as ft:
        beat = launch.beat(contract)
        assert (beat.step, beat.base, beat.made_a_step) == (4, 4, False)
        idle(ft, 9)
    beat = launch.beat(contract)
    assert (beat.step, beat.base, beat.phase) == (9, 4, pulse.Phase.END)


@pytest.mark.parametrize("own", [False, True])
def test_a_scripted_fault_fires_once_before_its_step(launch: Launch, own: bool) -> None:
    fault = (Fault(at_step=3, rank=0, do="raise"), Fault(at_step=2, rank=1, do="raise"))

    def loop() -> list[int]:
        made = []
        with ftrun.Session.open() as ft:
            if own:
                while ft.step < 5:
                    made.append(ft.step)
                    ft.step_end()
            else:
                made.extend(ft.steps(total=5))
        return made

    launch(faults=fault, every=Every(steps=1))
    with pytest.raises(InjectedFault, match="step 3 on rank 0"):
        loop()
    launch(faults=fault)
    assert loop() == ([0, 1, 2, 3, 4] if own else [2, 3, 4])


def test_a_failed_save_is_reported_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDir(_path("run")).checkpoints / "ckpt"
    away = directory.with_name("away")

    def break_it() -> None:
        eventually(lambda: len(of(events.Committed)) == 1, 20, "the first commit")
        directory.rename(away)
        directory.write_text("in the way")

    def repair_it() -> None:
        eventually(lambda: of(events.SaveFailed), 20, "the failure")
        directory.unlink()
        away.rename(directory)

    with caplog.at_level(logging.WARNING), open_session() as ft:
        idle(ft, 17, {7: break_it, 13: repair_it})
    (failure,) = of(events.SaveFailed)
    assert (failure.step, [each.step for each in of(events.Committed)]) == (10, [5, 15, 17])
    assert "was not committed" in failure.error
    assert "training goes on" in failure.error
    assert f"ftrun: {failure.error}" in [each.getMessage() for each in caplog.records]
    assert committed() == [17, 15, 5]


def test_a_run_whose_last_state_can_not_be_committed_fails() -> None:
    def break_it() -> None:
        eventually(lambda: of(events.Committed), 20, "the first commit")
        directory = RunDir(_path("run")).checkpoints / "ckpt"
        directory.rename(directory.with_name("away"))
        directory.write_text("in the way")

    with pytest.raises(ftrun.FtrunError, match="was not committed"), open_session(every=5) as ft:
        idle(ft, 8, {7: break_it})
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


def test_a_save_under_way_when_the_script_fails_is_committed_still() -> None:
    with pytest.raises(Broken), open_session() as ft:
        idle(ft, 20, {5: fall})
    assert committed() == [5]
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


# ---------------------------------------------------------------- when it stops


def test_a_requested_stop_saves_and_leaves_with_75() -> None:
    with pytest.raises(SystemExit) as leaving, open_session(every=None) as ft:
        idle(ft, 1_000_000, {3: ft.request_stop})
    assert leaving.value.code == 75
    (saved,) = of(events.Saved)
    assert saved.reason == "stop"
    assert committed() == [saved.step]
    assert of(events.StepsEnded) == [events.StepsEnded(step=saved.step, finished=False)]
    assert of(events.RunEnded) == [events.RunEnded(outcome="stopped", exit_code=75)]
    with open_session() as ft:
        assert ft.step == saved.step > 3
        assert ft.resume is not None
        assert ft.resume.reason == "stop"


def test_a_stop_is_honoured_in_a_loop_of_ones_own() -> None:
    def loop(ft: Session) -> None:
        ft.request_stop("enough")
        while not ft.should_stop():
            ft.step_end()

    with pytest.raises(SystemExit) as leaving, open_session(every=None) as ft:
        loop(ft)
    assert leaving.value.code == 75
    assert committed() == [ft.step]
    assert of(events.RunEnded) == [events.RunEnded(outcome="stopped", exit_code=75)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_a_stop(number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as leaving, open_session() as ft:
        idle(ft, 1_000_000, {2: lambda: os.kill(os.getpid(), number)})
    assert leaving.value.code == 75
    assert committed()


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with open_session() as ft:
        idle(ft, 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_script_that_leaves_with_a_code_of_its_own_failed() -> None:
    with pytest.raises(SystemExit) as leaving, open_session() as ft:
        idle(ft, 20, {4: lambda: sys.exit(3)})
    assert leaving.value.code == 3
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


def test_breaking_out_of_steps_is_allowed_and_resumes_at_the_last_commit() -> None:
    with open_session() as ft:
        for step in ft.steps(total=20):
            if step == 7:
                break
        assert ft.step == 7
    with open_session() as ft:
        assert ft.step == 5


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


def trained(ft: Session, total: int = 5, **objects: Any) -> None:
    ft.track(**objects)
    idle(ft, total)


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
    assert "--fresh" in str(refused.value)
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


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return repr(one) == repr(other)


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
    newest = max((RunDir(_path("run")).checkpoints / "ckpt").glob("*-s0000000010-*/r00000.0.safetensors"))
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
    for manifest in (RunDir(_path("run")).checkpoints / "ckpt").glob("*-s0000000010-*/r00000.0.safetensors"):
        manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptCheckpoint) as failed, open_session():
        pytest.fail("must not open")
    assert failed.value.__traceback__ is not None  # held here, as a notebook or a debugger would
    with open_session() as ft:
        assert ft.step == 5


def test_a_run_directory_that_can_not_be_used_is_let_go_of() -> None:
    with open_session() as ft:
        idle(ft, 10)
    for manifest in (RunDir(_path("run")).checkpoints / "ckpt").glob("*/MANIFEST.json"):
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


# ---------------------------------------------------------------- metrics and callbacks


def test_metrics_are_numbers_or_tensors_of_one_element() -> None:
    with open_session() as ft:
        for _ in ft.steps(total=1):
            ft.log(loss=torch.tensor([[0.5]], requires_grad=True), rate=np.float32(0.25))
            ft.log(count=3, rate=1.0)
    (step,) = of(events.Step)
    assert step.metrics == {"loss": 0.5, "rate": 1.0, "count": 3.0}


@pytest.mark.parametrize("value", [torch.zeros(2), None, "much", [1.0], 1j], ids=repr)
def test_other_metrics_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"ft\.log\(loss=\.\.\.\): a metric is one number"), open_session() as ft:
        idle(ft, 1, {0: lambda: ft.log(loss=value)})


def test_metrics_that_are_not_finite_do_not_break_the_log() -> None:
    with open_session() as ft:
        for _ in ft.steps(total=1):
            ft.log(loss=float("nan"))
    assert of(events.Step)[0].metrics == {"loss": None}


def test_metrics_belong_to_one_step() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    ftrun.on("step")(lambda step, metrics: seen.append((step, metrics)))
    with open_session() as ft:
        for step in ft.steps(total=3):
            if step != 1:
                ft.log(loss=float(step))
        ft.step_end(more=1)
    assert seen == [(1, {"loss": 0.0}), (2, {}), (3, {"loss": 2.0}), (4, {"more": 1})]


def test_save_and_restore_callbacks() -> None:
    restored: list[ftrun.Checkpoint] = []
    order: list[str] = []

    @ftrun.on("save")
    def one() -> dict[str, Any]:
        order.append("one")
        return {"counter": (1, 2), "shared": "one"}

    @ftrun.on("save")
    def two() -> dict[str, Any]:
        order.append("two")
        return {"shared": "two", 3: torch.ones(2)}

    ftrun.on("save")(lambda: None)
    ftrun.on("restore")(restored.append)
    model = nn.Linear(2, 2)
    with open_session() as ft:
        trained(ft, model=model)
    assert order == ["one", "two"]
    assert restored == []

    other = nn.Linear(2, 2)
    weights: list[torch.Tensor] = []
    ftrun.on("restore")(lambda _checkpoint: weights.append(other.weight.detach().clone()))
    with open_session() as ft:
        ft.track(model=other)
        idle(ft, 5)
        assert restored == [ft.resume]
    assert (restored[0].step, restored[0].total, restored[0].reason) == (5, 5, "interval")
    assert alike(restored[0].extra, {"counter": (1, 2), "shared": "two", 3: torch.ones(2)})
    assert torch.equal(weights[0], model.weight)  # called after what is tracked was restored


def test_a_commit_callback_hears_of_every_commit_of_this_session_in_order() -> None:
    heard: list[ftrun.Checkpoint] = []
    ftrun.on("commit")(heard.append)
    with open_session(every=2) as ft:
        for step in ft.steps(total=6):
            if step == 5:
                # Both are durable: the next boundary must tell.
                eventually(lambda: len(of(events.Committed)) == 2, 20, "two commits")
        assert [each.step for each in heard] == [2, 4, 6]
    assert [(each.step, each.reason, each.total) for each in heard] == [(step, "interval", 6) for step in (2, 4, 6)]
    assert [each.name for each in heard] == [each.checkpoint for each in of(events.Committed)]
    assert heard[0].root == str(RunDir(_path("run")).checkpoints)


def test_callbacks_run_in_the_order_of_a_step() -> None:
    order: list[str] = []
    ftrun.on("step")(lambda step, _metrics: order.append(f"step {step}"))
    ftrun.on("save")(lambda: order.append("save"))
    with open_session(every=2) as ft:
        order.extend(f"body {step}" for step in ft.steps(total=3))
    assert order == ["body 0", "step 1", "body 1", "step 2", "save", "body 2", "step 3", "save"]


def test_what_a_callback_raises_fails_the_run() -> None:
    @ftrun.on("step")
    def fail(step: int, _metrics: dict[str, Any]) -> None:
        if step == 7:
            raise Broken

    with pytest.raises(Broken), open_session() as ft:
        idle(ft, 10)
    assert committed() == [5]


def test_a_save_callback_that_returns_no_dict_is_named() -> None:
    @ftrun.on("save")
    def careless() -> Any:
        return 3

    with pytest.raises(UsageError, match=r"careless.*int"), open_session() as ft:
        idle(ft, 10)


def test_a_moment_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"ftrun\.on\('saved'\): no such moment.*save, restore, commit"):
        ftrun.on("saved")
    with pytest.raises(UsageError, match="no such moment"):
        ftrun.on(lambda: None)  # type: ignore[arg-type]  # @ftrun.on without parentheses


def test_a_function_registered_twice_runs_once() -> None:
    seen: list[int] = []

    def count(step: int, _metrics: dict[str, Any]) -> None:
        seen.append(step)

    assert ftrun.on("step")(count) is count
    ftrun.on("step")(count)
    with open_session() as ft:
        idle(ft, 2)
    assert seen == [1, 2]


def test_modules_of_the_job_are_imported_for_their_callbacks(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks_of_the_job.py").write_text(
        "import ftrun\n\n@ftrun.on('save')\ndef f():\n    return {'hooked': 1}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launch(callbacks=("hooks_of_the_job",))
    with open_session() as ft:
        idle(ft, 5)
    launch(callbacks=("hooks_of_the_job",))
    with open_session() as ft:
        assert ft.resume is not None
        assert ft.resume.extra == {"hooked": 1}


def test_a_missing_module_of_callbacks_is_named(launch: Launch) -> None:
    launch(callbacks=("no_such_module_anywhere.hooks",))
    with pytest.raises(UsageError, match=r"no module 'no_such_module_anywhere\.hooks'"), open_session():
        pytest.fail("must not open")


def test_a_module_of_callbacks_that_lacks_one_of_its_own_imports_shows_that(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks_that_break.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    launch(callbacks=("hooks_that_break",))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"), open_session():
        pytest.fail("must not open")


# ---------------------------------------------------------------- the entry point


def test_an_entry_point_passes_arguments_and_values_on() -> None:
    @ftrun.entrypoint
    def main(ft: Session, one: int, *, two: int) -> tuple[int, int, int]:
        """What it does."""
        idle(ft, 3)
        return ft.step, one, two

    assert (main.__name__, main.__doc__) == ("main", "What it does.")
    assert main(1, two=2) == (3, 1, 2)


def test_an_entry_point_with_arguments() -> None:
    @ftrun.entrypoint(every=2, process_group=False)
    def main(ft: Session) -> None:
        idle(ft, 5)

    main()
    assert committed() == [5, 4, 2]


def test_a_users_mistake_is_one_message_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        ft.track(model=3)

    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftrun: ft.track(model=...): a value of type int has no state_dict")
    assert "Traceback" not in err
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


def test_under_a_launcher_the_mistake_is_left_to_it(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        ft.track(model=3)

    launch()
    with pytest.raises(UsageError, match="has no state_dict"):
        main()
    assert capsys.readouterr().err == ""


def test_other_errors_pass_through_an_entry_point() -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        raise Broken

    with pytest.raises(Broken):
        main()


def test_a_stop_leaves_an_entry_point_with_75() -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        ft.request_stop()
        idle(ft, 1_000_000)

    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 75
    assert committed()


# ---------------------------------------------------------------- runs without a name


def test_a_script_alone_gets_a_run_directory_by_its_name_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTRUN_RUN_DIR")
    monkeypatch.setattr("sys.argv", ["some/where/train_it.py", "--lr", "1"])
    with ftrun.Session.open(every=5) as ft:
        idle(ft, 5)
    (run,) = (path for path in (tmp_path / "runs" / "train_it").iterdir() if path.is_dir())
    assert RunDir(run).identity()["run_id"] == f"train_it/{run.name}"
    (started,) = of(events.RunStarted, f"runs/train_it/{run.name}")
    assert started.command == ["some/where/train_it.py", "--lr", "1"]
    assert not started.continued


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(RunDirError, match=r"thesis\.tex"), open_session():
        pytest.fail("must not open")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_events_tell_the_whole_story() -> None:
    with pytest.raises(Broken), open_session() as ft:
        idle(ft, 9, {7: fall})
    with open_session() as ft:
        idle(ft, 9)
    assert [each.continued for each in of(events.RunStarted)] == [False, True]
    assert [(each.epoch, each.resume_step) for each in of(events.AttemptStarted)] == [(1, 0), (2, 5)]
    assert [(each.step, each.total) for each in of(events.StepsBegan)] == [(0, 9), (5, 9)]
    assert [each.step for each in of(events.Restored)] == [5]
    assert of(events.Step)[-1].step == 9
    assert [each.outcome for each in of(events.RunEnded)] == ["failed", "finished"]
