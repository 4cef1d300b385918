"""Which gradients a checkpoint holds: those that no optimizer step has used yet, and no others."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ftrun.session.gradients import PendingGradients

if TYPE_CHECKING:
    from collections.abc import Callable


class Job:
    """A model of two layers, of which a backward may skip the second, and one watched optimizer."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, **options)
        self.pending = PendingGradients()
        self.pending.watch("optimizer", self.optimizer)

    def backward(self, *, both: bool = True) -> None:
        hidden = self.model[0](torch.ones(5, 3))
        (self.model[1](hidden) if both else hidden).square().sum().backward()

    def held(self) -> list[str]:
        """Indices of the parameters whose gradients a checkpoint would hold now."""
        return sorted(self.pending.capture().get("optimizer", {}))


ALL = ["0", "1", "2", "3"]


def nothing(job: Job) -> None:
    pass


def step(job: Job) -> None:
    job.optimizer.step()


def drop(job: Job) -> None:
    job.optimizer.zero_grad()


def zero_in_place(job: Job) -> None:
    job.optimizer.zero_grad(set_to_none=False)


def backward(job: Job) -> None:
    job.backward()


def backward_of_first_layer(job: Job) -> None:
    job.backward(both=False)


def collect_garbage(job: Job) -> None:
    gc.collect()


def clip(job: Job) -> None:
    nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("actions", "held"),
    [
        ([nothing], []),
        ([backward], ALL),
        ([backward, backward], ALL),
        ([backward, step], []),
        ([backward, step, collect_garbage], []),
        ([backward, step, drop], []),
        ([backward, step, drop, step], []),
        ([backward, step, backward], ALL),
        ([backward, step, drop, backward], ALL),
        ([backward, step, drop, backward, step], []),
        ([backward, clip], ALL),
        ([backward, clip, step], []),
        ([backward, step, clip], ALL),  # touched after the step: somebody means to use them
        ([backward, step, zero_in_place], ALL),  # zeros, but an optimizer sees a difference between them and None
        ([backward, step, zero_in_place, backward], ALL),
        ([backward, step, zero_in_place, backward, step], []),
        ([backward_of_first_layer], ["0", "1"]),
        ([backward_of_first_layer, step], []),
        ([backward_of_first_layer, step, backward], ALL),
        ([backward, step, backward_of_first_layer], ["0", "1"]),
        ([backward, step, drop, backward_of_first_layer], ["0", "1"]),
    ],
    ids=lambda value: "-".join(each.__name__ for each in value) if value and callable(value[0]) else "",
)
def test_pending_means_changed_since_the_last_step(actions: list[Callable[[Job], None]], held: list[str]) -> None:
    job = Job()
    for action in actions:
        action(job)
    assert job.held() == held


def test_a_backward_of_a_graph_that_was_kept_is_seen() -> None:
    job = Job()
    loss = job.model[1](job.model[0](torch.ones(5, 3))).sum()  # without what an optimizer's step would spoil
    other = nn.Linear(3, 3)
    sum_of_other = other(torch.ones(2, 3)).sum()
    pending = PendingGradients()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    pending.watch("other", optimizer)
    sum_of_other.backward(retain_graph=True)
    optimizer.step()
    assert pending.capture() == {}
    loss.backward()
    assert pending.capture() == {}
    sum_of_other.backward()
    assert sorted(pending.capture()["other"]) == ["0", "1"]


def test_a_backward_on_another_thread_is_seen() -> None:
    job = Job()
    job.backward()
    job.optimizer.step()
    thread = threading.Thread(target=job.backward)
    thread.start()
    thread.join(20)
    assert job.held() == ALL


def by_a_graph_from_before(parameters: list[nn.Parameter], early: torch.Tensor) -> None:
    early.backward()


def of_a_leaf(parameters: list[nn.Parameter], early: torch.Tensor) -> None:
    torch.autograd.backward([parameters[7]], [torch.ones(3)])


def by_hand(parameters: list[nn.Parameter], early: torch.Tensor) -> None:
    parameters[7].grad = torch.ones(3)


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("change", [by_a_graph_from_before, of_a_leaf, by_hand])
def test_one_of_many_gradients_is_seen_though_nothing_was_recorded_since_the_step(
    change: Callable[[list[nn.Parameter], torch.Tensor], None], cleared: bool
) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(500)]
    optimizer, pending = torch.optim.SGD(parameters, lr=0.1), PendingGradients()
    pending.watch("it", optimizer)
    early = parameters[7].sum()
    torch.stack([each.sum() for each in parameters]).sum().backward()
    optimizer.step()
    if cleared:
        optimizer.zero_grad()
    assert pending.capture() == {}
    change(parameters, early)
    assert sorted(pending.capture()["it"]) == ["7"]


def test_a_new_gradient_in_the_place_of_a_used_one_is_pending() -> None:
    # Freed memory is used again at once, so the new gradient may have the old one's address, id and version.
    job = Job()
    job.backward()
    job.optimizer.step()
    for parameter in job.model.parameters():
        shape = parameter.shape
        parameter.grad = None
        parameter.grad = torch.ones(shape)
    assert job.held() == ALL


def test_optimizers_are_told_apart() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    pending = PendingGradients()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    for name, optimizer in zip("ab", optimizers, strict=True):
        pending.watch(name, optimizer)
    (model[0](torch.ones(1, 2)) + model[1](torch.ones(1, 2))).sum().backward()
    optimizers[0].step()
    assert {name: sorted(each) for name, each in pending.capture().items()} == {"b": ["0"]}


def test_an_optimizer_that_took_another_ones_name_is_watched_alone() -> None:
    parameter = nn.Parameter(torch.ones(2))
    old, new = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
    pending = PendingGradients()
    pending.watch("it", old)
    pending.watch("it", new)
    parameter.sum().backward()
    old.step()
    assert pending.capture() == {"it": {"0": parameter.grad}}
    new.step()
    assert pending.capture() == {}


def test_a_gradient_of_another_group_added_later_is_pending() -> None:
    job = Job()
    job.backward()
    job.optimizer.step()
    late = nn.Parameter(torch.ones(2))
    job.optimizer.add_param_group({"params": [late]})
    late.sum().backward()
    assert job.held() == ["4"]


def copied(captured: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """As a checkpoint gives them back: contiguous and on their own."""
    return {
        name: {index: each.clone(memory_format=torch.contiguous_format) for index, each in gradients.items()}
        for name, gradients in captured.items()
    }


def test_restored_gradients_go_on_accumulating() -> None:
    whole, first, second = Job(), Job(), Job()
    first.backward()
    second.pending.restore(copied(first.pending.capture()))
    second.pending.restore(copied(first.pending.capture()))  # a Session restores more than once
    assert second.held() == ALL
    second.backward()
    second.optimizer.step()
    whole.backward()
    whole.backward()
    whole.optimizer.step()
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_was_restored_does_not_change_with_the_gradient() -> None:
    job, stored = Job(), {"optimizer": {"0": torch.ones(4, 3)}}
    job.pending.restore(stored)
    job.backward()
    assert torch.equal(stored["optimizer"]["0"], torch.ones(4, 3))


def test_gradients_that_are_there_keep_their_memory() -> None:
    # CUDA graphs and DistributedDataParallel's buckets write to the address that they know.
    job = Job()
    job.backward()
    before = job.model[0].weight.grad
    assert before is not None
    address = before.data_ptr()
    job.pending.restore({"optimizer": {"0": torch.full((4, 3), 7.0)}})
    after = job.model[0].weight.grad
    assert after is not None
    assert after.data_ptr() == address
    assert torch.equal(after, torch.full((4, 3), 7.0))


def test_restored_gradients_are_laid_out_like_their_parameters() -> None:
    # A fused optimizer walks both in memory order.
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(conv.parameters(), fused=True)
    pending = PendingGradients()
    pending.watch("optimizer", optimizer)
    conv(torch.ones(1, 3, 4, 4)).sum().backward()
    stored = copied(pending.capture())
    assert conv.weight.grad is not None
    expected = conv.weight.grad.clone()
    conv.weight.grad = None
    pending.restore(stored)
    assert torch.equal(conv.weight.grad, expected)
    assert conv.weight.grad.stride() == conv.weight.stride() != stored["optimizer"]["0"].stride()


def test_half_precision_gradients_come_back_exactly() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    pending = PendingGradients()
    pending.watch("optimizer", torch.optim.SGD([parameter], lr=0.1))
    pending.restore({"optimizer": {"0": torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)}})
    assert parameter.grad is not None
    assert parameter.grad.dtype is torch.bfloat16
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16))
