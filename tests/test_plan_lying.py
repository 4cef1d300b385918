"""The quick look at a state's tensors says what the thorough one does, or nothing."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from ftrun.checkpoint.plan.encoding import Encoding
from ftrun.checkpoint.plan.lying import Guard, Look, look
from ftrun.checkpoint.state import encode

if TYPE_CHECKING:
    from collections.abc import Callable

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.t(),
    "reshaped": lambda tensor: tensor.view(2, 8),
    "another dtype of that size": lambda tensor: tensor.view(torch.int32),
    "half": lambda tensor: tensor.half(),
    "with gaps": lambda _: torch.zeros(4, 8)[:, :4],
    "negation pending": torch._neg_view,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "parameter": torch.nn.Parameter,
    "on meta": lambda tensor: tensor.to("meta"),
}


def guard_of(tensors: list[torch.Tensor]) -> Guard:
    guard = Guard.of(tensors, tensors, look(tensors, tensors).kinds)
    assert guard is not None, f"torch {torch.__version__} has no such guards any more: saves take longer"
    return guard


def seen(it: Look | None) -> tuple[object, ...] | None:
    return None if it is None else (it.starts.tolist(), it.kinds, it.negated, it.versions)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_of_another_kind_is_not_taken_for_the_same(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    first, second = torch.zeros(4, 4), torch.ones(4, 4)
    guard = guard_of([first, second])
    assert seen(guard.look([first, second])) == seen(look([first, second], [first, second]))
    changed = [first, change(second)]
    assert guard.look(changed) is None


@pytest.mark.parametrize("kind", ["transposed", "reshaped", "half", "with gaps", "complex"])
def test_the_same_object_may_become_another_kind(kind: str) -> None:
    tensor = torch.zeros(4, 4)
    guard = guard_of([tensor])
    tensor.data = CHANGES[kind](tensor)
    assert guard.look([tensor]) is None


def test_addresses_and_counters_are_those_of_now() -> None:
    tensors = [torch.zeros(3), torch.nn.Parameter(torch.zeros(600, 2)), *(torch.zeros(2) for _ in range(600))]
    guard = guard_of(tensors)
    tensors[0] += 1
    tensors[1].data = torch.zeros(600, 2)
    tensors[400] = torch.zeros(2)
    assert seen(guard.look(tensors)) == seen(look(tensors, tensors))
    with torch.no_grad():
        assert seen(guard.look(tensors)) in (None, seen(look(tensors, tensors)))


def test_tied_tensors_stay_tied() -> None:
    tied, other = torch.zeros(3), torch.zeros(3)
    guard = guard_of([tied, other, tied])
    assert guard.look([tied, other, tied]) is not None
    apart = [tied, other, tied.clone()]
    assert guard.look(apart) is None
    anew = guard_of([tied, other])
    assert anew.look([tied, tied]) is None, "it can't tell; the thorough look does"


def test_nothing_is_kept_alive() -> None:
    tensors = [torch.zeros(3)]
    guard, alive = guard_of(tensors), weakref.ref(tensors[0])
    tensors[0] = torch.zeros(3)
    assert alive() is None
    assert guard.look(tensors) is not None


def test_a_state_is_taken_apart_alike_with_and_without() -> None:
    again, weight = Encoding(), torch.nn.Parameter(torch.randn(4, 4))
    state = {"tracked": {"a": {"weight": weight, "tied": weight, "other": torch.randn(5)}}}
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(weight, "data", torch.randn(4, 4)),
        lambda: setattr(weight, "data", torch.randn(4, 4).t()),
        lambda: weight.requires_grad_(False),
        lambda: state["tracked"]["a"].update(other=torch.randn(6)),
        lambda: state["tracked"]["a"].update(tied=torch.randn(4, 4)),
    ]
    for step in (*steps, steps[0]):
        step()
        for _ in range(2):
            found, wanted = again.encode(state), encode(state)
            assert found.tree == wanted.tree
            assert list(found.tensors) == list(wanted.tensors)
            for name, tensor in found.tensors.items():
                assert tensor.data_ptr() == wanted.tensors[name].data_ptr()
                assert tensor.stride() == wanted.tensors[name].stride()


def test_what_does_not_count_is_looked_at_thoroughly() -> None:
    with torch.inference_mode():
        made = torch.zeros(3)
    again = Encoding()
    for _ in range(3):
        encoded = again.encode({"made": made})
        assert encoded.alike is not None
        assert encoded.alike.versions is None
