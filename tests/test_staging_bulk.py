"""What is remembered of tensors that are moved by address, and how they are cut into what is moved when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import eventually
from staging_kit import HeldBack, raw

from ftrun.checkpoint.plan.encoding import Encoding
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.staging.bulk import _Owners
from ftrun.checkpoint.staging.cut import Cut
from ftrun.checkpoint.staging.moves import LARGE, PROBES, SLICE
from ftrun.checkpoint.staging.runs import Runs
from ftrun.checkpoint.staging.trust import TRIALS, Owned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZES = [3 * LARGE + 5, 10, LARGE, 100_000, 7 * LARGE + 1, LARGE - 1]


def whole(cuts: list[Cut]) -> list[bool | None]:
    """Of each tensor whether every byte of it is in one of some cuts, once; None where none is."""
    found: list[list[tuple[int, int]]] = [[] for _ in SIZES]
    for cut in cuts:
        for of, start, size in zip(cut.of.tolist(), cut.starts.tolist(), cut.sizes.tolist(), strict=True):
            found[of].append((start, start + size))
    return [_side_by_side(sorted(each), size) if each else None for each, size in zip(found, SIZES, strict=True)]


def _side_by_side(parts: list[tuple[int, int]], size: int) -> bool:
    starts, stops = [start for start, _ in parts], [stop for _, stop in parts]
    return starts == [0, *stops[:-1]] and stops[-1] == size


def test_every_byte_is_moved_once_and_probed_once_in_so_many_saves() -> None:
    late = np.array([True, False, True, True, True, True])
    probed = []
    for turn in range(PROBES):
        parts = Cut.of_all(SIZES).at(late, turn)
        assert whole([parts.now, parts.probes, parts.later]) == [True] * len(SIZES)
        assert set(parts.now.of.tolist()) == {1}
        assert set(parts.small.of.tolist()) <= {3, 5}
        assert {0, 2, 4} <= set(parts.probes.of.tolist()), "a part of every large one"
        probed.append(parts.probes)
    assert whole(probed) == [True if each else None for each in late]


def test_owners_are_looked_for_again_when_either_side_changes() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer, owners = torch.optim.SGD([first, second], lr=0.1), _Owners()

    def among(*given: torch.Tensor) -> list[bool]:
        answer: list[bool] = owners.among(given, Owned([optimizer])).tolist()
        return answer

    assert among(first, third, second) == [True, False, True]
    assert owners.are_all
    assert among(first, second, third) == [True, True, False]
    optimizer.param_groups[0]["params"].pop()
    assert among(first, second, third) == [True, False, False]
    optimizer.param_groups[0]["params"].append(third)
    assert among(first, second) == [True, False]
    assert not owners.are_all


class Loop:
    """A loop that saves as a Session does it: the parameters themselves, and what an optimizer has of them."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.small = torch.nn.Parameter(torch.randn(100, 100))
        self.large = torch.nn.Parameter(torch.randn(600, 600))
        self.optimizer = torch.optim.SGD([self.small, self.large], lr=0.1, momentum=0.9)
        self.alias = self.small.data  # the same memory, with a counter of its own
        self.state: Callable[[], dict[str, Any]] = lambda: {"small": self.small, "large": self.large}
        self.slot = HeldBack(directory)
        self.slot.stager.watch([self.optimizer])
        self._encoding, self._planner, self._saves = Encoding(), Planner(0, 1, None), 0
        self.step()

    @property
    def momentum(self) -> torch.Tensor:
        found: torch.Tensor = self.optimizer.state[self.small]["momentum_buffer"]
        return found

    def step(self) -> None:
        for each in (self.small, self.large):
            each.grad = torch.ones_like(each)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, before_the_step: Callable[[], object] = lambda: None) -> tuple[set[str], set[str]]:
        """Save and step; what was waited for, and what is torn. What isn't is what it was."""
        self._saves += 1
        encoded = self._encoding.encode(self.state())
        boundary = {name: raw(each) for name, each in encoded.tensors.items()}
        plan = self._planner.plan(encoded, {}, self._saves)
        late = self.slot.stage(plan, encoded)
        del encoded
        before_the_step()
        torn, content = self.slot.step(self.step)
        for piece in plan.pieces if not torn else ():
            before = boundary[piece.tensor]
            assert content[piece.offset : piece.offset + len(before)] == before, piece.tensor
        return late, torn

    def trials(self) -> None:
        """Until the save is one of those that know all from the one before."""
        for _ in range(TRIALS + 1):
            assert self.save()[1] == set()

    def writes(self, name: str) -> Callable[[], None]:
        """Adds nothing, so that no word of it tells."""

        def write() -> None:
            with torch.no_grad():
                getattr(self, name).add_(0)

        return write


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.slot.close()


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_write_that_torch_counts_is_seen(loop: Loop, name: str) -> None:
    loop.trials()
    assert loop.save(loop.writes(name)) == ({"small", "large"}, {name})
    assert loop.save(loop.writes(name)) == ({"small", "large"} - {name}, set())


def test_a_write_through_the_owner_of_the_memory_is_seen(loop: Loop) -> None:
    loop.state = lambda: {"alias": loop.alias}
    loop.trials()
    assert loop.save(loop.writes("small")) == ({"alias"}, {"alias"})


def test_what_an_optimizer_takes_up_again_is_watched_again(loop: Loop) -> None:
    parameters = loop.optimizer.param_groups[0]["params"]
    loop.trials()
    parameters.pop()
    state = loop.optimizer.state.pop(loop.large)
    assert loop.save(loop.writes("large")) == ({"small"}, set())
    parameters.append(loop.large)
    loop.optimizer.state[loop.large] = state
    assert loop.save(loop.writes("large")) == ({"small", "large"}, {"large"})


def test_other_values_for_a_while_past_torch_are_seen_in_a_trial(loop: Loop) -> None:
    def evaluate_another() -> None:
        kept = loop.small.detach().clone()
        loop.small.data.add_(1)
        under_way = loop.slot.stager._pending
        assert under_way is not None
        if under_way.is_trial:  # an evaluation of an average takes many times what a look does
            eventually(lambda: under_way._differed, 60, "a look")
        loop.small.data.copy_(kept)

    assert loop.save(evaluate_another) == (set(), set())
    for _ in range(TRIALS):
        loop.save()
    assert loop.save(evaluate_another) == (set(), set()), "no other one is trusted either"


@pytest.mark.parametrize("turn", range(5))
def test_what_was_other_while_it_was_copied_is_seen_though_all_is_as_it_was(turn: int) -> None:
    rng = np.random.default_rng(turn)
    sizes = [0, 7, 8, 9, 100_003, 2 * SLICE]
    live = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    copies = [np.zeros(size, dtype=np.uint8) for size in sizes]
    targets, sources = (np.array([x.ctypes.data for x in each], dtype=np.uint64) for each in (copies, live))
    runs = Runs([str(size) for size in sizes], targets, sources, np.array(sizes, dtype=np.uint64))
    for swapped in ([], [2, 4], [3, 5]):
        for number in swapped:
            live[number] ^= 1
        for task in runs.tasks():
            task()
        for number in swapped:
            live[number] ^= 1
        assert runs.changed_somewhere(turn) == {str(sizes[number]) for number in swapped}


def test_a_write_past_torch_to_what_has_no_probe_is_seen(loop: Loop) -> None:
    loop.trials()
    assert loop.save(lambda: loop.small.data.add_(1)) == ({"small", "large"}, {"small"})


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("saves", range(TRIALS + 3))
def test_memory_that_a_parameter_gives_up_is_kept_until_it_is_copied(loop: Loop, name: str, saves: int) -> None:
    def replace() -> None:
        parameter = getattr(loop, name)
        parameter.data = torch.zeros_like(parameter)  # as `module.half()` and its like do
        torch.full_like(parameter, 7)

    for _ in range(saves):
        loop.save()
    assert loop.save(replace)[1] == set()
    assert loop.save()[1] == set()


def test_memory_that_the_state_of_an_optimizer_gives_up_is_kept_through_a_trial(loop: Loop) -> None:
    loop.state = lambda: {"momentum": loop.momentum}

    def replace() -> None:
        loop.momentum.data = torch.zeros_like(loop.momentum)
        torch.full_like(loop.momentum, 7)

    for _ in range(TRIALS + 2):
        assert loop.save(replace)[1] == set()
    assert loop.save(replace) == ({"momentum"}, set())
