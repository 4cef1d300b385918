"""Random states: what is captured comes back exactly, and a new rank's streams are its own."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ftrun.checkpoint.state import decode, encode
from ftrun.session import random_state

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def keep_the_generators() -> Iterator[None]:
    before = random_state.capture()
    yield
    random_state.restore(before)


def draw(count: int = 3) -> list[object]:
    """Numbers of every generator, with those kinds that keep half a draw for the next call."""
    numbers: list[object] = []
    for _ in range(count):
        numbers += [random.random(), random.gauss(0.0, 1.0), random.getrandbits(70)]
        numbers += [np.random.rand(), np.random.standard_normal(), int(np.random.randint(1 << 62))]
        numbers += [torch.rand(2).tolist(), torch.randn(3).tolist(), torch.randperm(9).tolist()]
        if CUDA:
            numbers.append(torch.rand(2, device="cuda").tolist())
    return numbers


def test_every_stream_goes_on_where_it_was() -> None:
    draw(1)  # an odd number of normal draws: the other half is part of the state
    state = random_state.capture()
    expected = draw()
    assert draw() != expected
    random_state.restore(state)
    assert draw() == expected


def test_a_captured_state_is_not_moved_by_later_draws() -> None:
    state = random_state.capture()
    expected = draw()
    random_state.restore(state)
    random_state.restore(state)
    assert draw() == expected


def test_states_survive_the_checkpoint() -> None:
    draw(1)
    encoded = encode(random_state.capture())
    expected = draw()
    random_state.restore(decode(encoded.tree, {name: each.clone() for name, each in encoded.tensors.items()}))
    assert draw() == expected


@pytest.mark.skipif(CUDA, reason="needs a machine without a GPU")
def test_a_cuda_state_is_passed_over_where_there_is_no_device() -> None:
    state = random_state.capture()
    assert state["cuda"] is None
    expected = draw()
    random_state.restore({**state, "cuda": bytes(16)})
    assert draw() == expected


def derived(checkpoint: str, rank: int) -> list[object]:
    random_state.derive(checkpoint, rank)
    return draw()


def test_derived_states_depend_on_checkpoint_and_rank_alone() -> None:
    name = "e00000001-s0000000005-0123abcd"
    once = derived(name, 2)
    draw()
    assert derived(name, 2) == once


def test_derived_states_differ_in_every_generator() -> None:
    one, other = "e00000001-s0000000005-0123abcd", "e00000001-s0000000006-0123abcd"
    rows = [derived(one, 2), derived(one, 3), derived(one, 20), derived(other, 2)]
    for column in zip(*rows, strict=True):
        assert len({repr(value) for value in column}) == len(rows)
