from __future__ import annotations

import subprocess
import sys
import time
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from ftrun.data.arguments import order_name
from ftrun.data.feistel import FEISTEL, Permutation
from ftrun.data.order import NONE, TORCH, Identity, Share, order_of, tickets
from ftrun.data.position import Position, Recipe, advance, check, fingerprint, from_state, to_state
from ftrun.data.torch_order import ListedOrder
from ftrun.errors import StateMismatch, UsageError

SEEDS = st.integers(min_value=-(2**70), max_value=2**70)


def recipe(n: int = 100, global_batch: int = 12, order: str = FEISTEL, batch_size: int | None = None) -> Recipe:
    return Recipe(n, f"Toy/{n}", order, 17, global_batch, batch_size, "drop")


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(deadline=None, max_examples=150)
def test_a_permutation_holds_every_index_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed, epoch).take(0, n).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 255, 256, 257, 65_535, 65_536, 65_537, 100_003])
def test_sizes_beside_powers_and_squares(n: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, 1, 2).take(0, n)), np.arange(n))


@given(n=st.integers(1, 10**12), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_stretch_is_the_same_alone_as_in_a_longer_one(n: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, min(n, start + 200)))
    step = data.draw(st.integers(1, 7))
    whole = Permutation(n, seed, 0).take(start, stop)
    assert whole.dtype == np.int64
    assert np.array_equal(Permutation(n, seed, 0).take(start, stop, step), whole[::step])


def test_the_order_never_changes_under_its_name() -> None:
    # Checkpoints hold positions in this order: another result needs another name.
    assert Permutation(10, 17, 0).take(0, 10).tolist() == [9, 6, 8, 4, 5, 2, 3, 0, 7, 1]
    assert Permutation(10**9, 17, 3).take(999_999_995, 10**9).tolist() == [
        505742138,
        193131710,
        77211066,
        923009953,
        235206893,
    ]


@pytest.mark.parametrize(
    ("order", "values"),
    [
        ("feistel6-v1", [8, 4, 2, 7, 1, 3, 9, 6, 0, 5]),
        ("none", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("torch-v1", [6, 5, 2, 9, 0, 3, 8, 4, 7, 1]),
        ("block-v1:3x2", [6, 1, 2, 0, 8, 7, 9, 3, 4, 5]),
    ],
)
def test_no_order_ever_changes_under_its_name(order: str, values: list[int]) -> None:
    assert order_of(recipe(10, order=order), 1).take(0, 10).tolist() == values


@pytest.mark.parametrize("n", [1, 2, 7, 10, 100, 1003])
@pytest.mark.parametrize("order", [FEISTEL, NONE, TORCH, *(f"block-v1:{k}x{m}" for k in (1, 3, 10) for m in (1, 2, 8))])
def test_every_order_has_every_index_once_and_its_places(n: int, order: str) -> None:
    for epoch in range(3):
        made = order_of(recipe(n, order=order), epoch)
        whole = made.take(0, n)
        assert whole.dtype == np.int64
        assert sorted(whole.tolist()) == list(range(n))
        assert made.places(whole).tolist() == list(range(n))
        some = np.array([n - 1, 0, n // 2])
        assert made.at(some).tolist() == whole[some].tolist()
        assert made.take(n // 3, n, 3).tolist() == whole[n // 3 :: 3].tolist()


def test_a_list_may_have_an_index_twice_or_not_at_all() -> None:
    order = ListedOrder(np.array([4, 2, 4, 9]))
    assert order.places(np.array([4, 9, 3, 2, 11])).tolist() == [0, 3, -1, 1, -1]


def test_blocks_stay_hot() -> None:
    whole = order_of(recipe(1_000, order="block-v1:10x4"), 0).take(0, 1_000)
    windows = (whole // 10).reshape(-1, 40)
    assert all(len(set(window)) == 4 for window in windows.tolist())
    assert all((np.diff(window) != 0).sum() > 20 for window in windows)
    assert windows[:, 0].tolist() != sorted(windows[:, 0].tolist())
    shuffled = [tuple(np.argsort(window)) for window in whole.reshape(-1, 40).tolist()]
    assert len(set(shuffled)) == 25


def test_only_the_training_script_knows_a_user_s_list() -> None:
    with pytest.raises(UsageError, match="'sampler-v1' can't be computed here"):
        order_of(recipe(order="sampler-v1"), 0)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("torch", TORCH),
        ("none", NONE),
        ("feistel6-v1", FEISTEL),
        ("block:100", "block-v1:100x8"),
        ("block:5x2", "block-v1:5x2"),
        ("block-v1:5x2", "block-v1:5x2"),
    ],
)
def test_names_in_short(given: str, name: str) -> None:
    assert order_name(given) == name


@pytest.mark.parametrize("world", [1, 2, 4])
def test_torch_s_order_is_its_distributed_sampler_s(world: int) -> None:
    position = Position(6, 0)
    for rank in range(world):
        theirs: Any = DistributedSampler(cast("Any", range(96)), world, rank, seed=17)
        theirs.set_epoch(6)
        ours = tickets(recipe(96, order=TORCH), Share(rank, world), position)
        assert [index for ticket in ours for index in ticket.indices] == list(theirs)


def test_what_the_filler_needs_imports_no_torch() -> None:
    program = "import sys, ftrun.data.order, ftrun.data.position; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_billion_samples_cost_no_more_than_a_thousand() -> None:
    n = 10**9
    began = time.process_time()
    indices = Permutation(n, 1, 0).take(n - 10_000, n)
    assert time.process_time() - began < 2.0
    assert len(np.unique(indices)) == 10_000
    assert indices.min() >= 0
    assert indices.max() < n
    assert abs(indices.mean() / n - 0.5) < 0.02


@pytest.mark.parametrize("n", [4_001, 10_007, 65_536, 10**9])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_neighbours_have_nothing_to_do_with_each_other(n: int, seed: int) -> None:
    count = min(n, 20_000)
    values = Permutation(n, seed, 0).take(0, count).astype(np.float64) / n
    for lag in (1, 2, 3, 64):
        # The standard error is 1 / sqrt(count): five of them.
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / np.sqrt(count)
    assert abs(np.corrcoef(np.arange(count), values)[0, 1]) < 5 / np.sqrt(count)


@pytest.mark.parametrize("n", [4_096, 10_007])
def test_places_and_indices_are_independent(n: int) -> None:
    values = Permutation(n, 3, 0).take(0, n)
    table, _, _ = np.histogram2d(np.arange(n), values, bins=16, range=((0, n), (0, n)))
    expected = n / 256
    chi_squared = ((table - expected) ** 2 / expected).sum()
    assert 225 - 110 < chi_squared < 225 + 110  # 15 x 15 degrees of freedom, about five standard deviations


def test_differences_of_neighbours_are_as_varied_as_in_a_shuffle() -> None:
    n = 10_007
    values = Permutation(n, 5, 0).take(0, n)
    distinct = len(np.unique(np.diff(values) % n)) / n
    assert abs(distinct - (1 - np.exp(-1))) < 0.03


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 1_000
    orders = [Permutation(n, seed, epoch).take(0, n) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    for first in range(len(orders)):
        for second in range(first):
            assert (orders[first] == orders[second]).sum() < 12  # one place on average


def test_every_permutation_of_few_samples_occurs() -> None:
    seen = {tuple(Permutation(3, seed, 0).take(0, 3).tolist()) for seed in range(200)}
    assert len(seen) == 6


@pytest.mark.parametrize("order", [Permutation(10, 0, 0), Identity(10)])
@pytest.mark.parametrize(("start", "stop", "step"), [(-1, 3, 1), (0, 11, 1), (0, 5, 0)])
def test_places_outside_the_order_are_refused(order: Permutation, start: int, stop: int, step: int) -> None:
    with pytest.raises(IndexError, match="10 samples"):
        order.take(start, stop, step)


def test_no_order_is_the_dataset_s_own() -> None:
    assert Identity(10).take(2, 9, 3).tolist() == [2, 5, 8]


@given(
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    start=st.integers(0, 7),
    order=st.sampled_from([FEISTEL, NONE]),
)
@settings(deadline=None, max_examples=60)
def test_the_shares_of_all_ranks_make_up_the_order(world: int, start: int, order: str) -> None:
    plan = recipe(order=order)
    position = Position(3, 12 * start)
    shares = [list(tickets(plan, Share(rank, world), position)) for rank in range(world)]
    assert {ticket.epoch for share in shares for ticket in share} == {3}
    placed = [shares[place % world][step].indices[place // world] for step in range(8 - start) for place in range(12)]
    whole = Permutation(100, 17, 3) if order == FEISTEL else Identity(100)
    assert placed == whole.take(12 * start, 96).tolist()


def test_tickets_cross_the_blocks_in_which_they_are_computed() -> None:
    plan = recipe(n=30_000, global_batch=1_000)
    rows = [index for ticket in tickets(plan, Share(0, 1), Position()) for index in ticket.indices]
    assert rows == Permutation(30_000, 17, 0).take(0, 30_000).tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Position(0, 0), Position(0, 12)),
        (Position(2, 72), Position(2, 84)),
        (Position(2, 84), Position(3, 0)),
    ],
)
def test_the_end_of_an_epoch_is_the_start_of_the_next(before: Position, after: Position) -> None:
    assert advance(before, 12, recipe().usable) == after


def test_a_stored_position_comes_back() -> None:
    state = to_state(Position(4, 36), recipe())
    assert state == {
        "v": 1,
        "epoch": 4,
        "samples": 36,
        "global_batch": 12,
        "batch_size": None,
        "seed": 17,
        "n": 100,
        "order": "feistel6-v1",
        "tail": "drop",
        "dataset": "Toy/100",
    }
    assert from_state(state, recipe()) == (Position(4, 36), recipe())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 99),
        ("dataset", "Other/100"),
        ("order", NONE),
        ("seed", 18),
        ("global_batch", 24),
        ("tail", "error"),
    ],
)
def test_a_difference_is_named_with_the_ways_out(name: str, value: object) -> None:
    state = {**to_state(Position(4, 0), recipe()), name: value}
    with pytest.raises(StateMismatch) as caught:
        check(state, recipe())
    now = getattr(recipe(), name)
    assert f"  {name}: was {value!r}, now {now!r}\n" in str(caught.value)
    assert str(caught.value).count(": was ") == 1
    assert "put the old value back" in str(caught.value).lower()
    assert "--fresh" in str(caught.value)


def test_all_differences_are_named_at_once() -> None:
    state = {**to_state(Position(), recipe()), "seed": 1, "tail": "error", "order": NONE}
    with pytest.raises(StateMismatch) as caught:
        check(state, recipe())
    assert str(caught.value).count(": was ") == 3


def test_a_size_per_rank_keeps_the_global_batch_of_the_first_start() -> None:
    state = to_state(Position(0, 24), recipe(global_batch=24, batch_size=6))
    assert from_state(state, recipe(global_batch=12, batch_size=6)) == (
        Position(0, 24),
        recipe(global_batch=24, batch_size=6),
    )
    with pytest.raises(StateMismatch, match="batch_size: was 6, now 12"):
        check(state, recipe(global_batch=24, batch_size=12))
    check(state, recipe(global_batch=24))
    with pytest.raises(StateMismatch, match="global_batch: was 24, now 12"):
        check(state, recipe(global_batch=12))


@pytest.mark.parametrize(
    "damage", [{"v": 2}, {"v": None}, {"samples": 7}, {"samples": -12}, {"samples": 1200}, {"epoch": None}]
)
def test_a_state_that_makes_no_sense_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(StateMismatch, match=r"--fresh|version"):
        check({**to_state(Position(), recipe()), **damage}, recipe())


def test_fingerprints() -> None:
    class Plain: ...

    class Text:
        fingerprint = "v7"

    class Method:
        def fingerprint(self) -> str:
            return "rows:3"

    names = [fingerprint(kind(), 5).rpartition(".")[2] for kind in (Plain, Text, Method)]
    assert names == ["Plain/5", "Text/5/v7", "Method/5/rows:3"]
