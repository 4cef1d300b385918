"""A run that was interrupted, again and again, is the run that was never interrupted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from session_kit import Augmented, Broken, committed, of, open_session
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun import Session
    from ftrun.data.loader import DataLoader

    E = TypeVar("E", bound=events.Event)

pytestmark = pytest.mark.usefixtures("here")

TOTAL = 22
EPOCH = 5  # steps: 32 samples in batches of 6


# ---------------------------------------------------------------- a job with everything that must be continued


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


STYLES = [
    zero_first,
    zero_first_in_place,
    *(
        pytest.param(style, marks=pytest.mark.slow)
        for style in (zero_last, zero_last_in_place, step_first, accumulate_four, every_third)
    ),
]


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


@pytest.mark.slow
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


def test_a_loop_of_ones_own_makes_the_same_run_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its steps take no time: on a busy machine the keeper has not even started when the third save wants a slot.
    monkeypatch.setattr("ftrun.session.checkpoints._PATIENCE", 60.0)
    monkeypatch.setattr("ftrun.session.checkpoints._FREE_SECONDS", 60.0)
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
