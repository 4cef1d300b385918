"""Plans of several ranks: every byte stored once, shared only where ranks hold the same, and never silently wrong."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from plan_kit import POSITION, Ranks, agree, restored, together
from session_kit import alike

from ftrun.checkpoint.plan import digests
from ftrun.checkpoint.plan.encoding import Encoding
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.records import TensorEntry
from ftrun.checkpoint.state import encode

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 20_000  # elements: 80 kB, more than what is stored whole


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(shape or (LARGE,)), generator=torch.Generator().manual_seed(seed)).to(dtype)


def ranks_of(saved: Any, name: str) -> list[str]:
    """Who shares a tensor, as each rank says it."""
    return [each.plan.entries[f"tracked/{name}"].ranks for each in saved if f"tracked/{name}" in each.plan.entries]


def test_what_all_hold_alike_is_stored_once() -> None:
    ranks = Ranks(3)
    states = [{"model": {"w": tensor(1), "b": tensor(2, 300, 100)}, "small": tensor(3, 7)} for _ in range(3)]
    saved = ranks.save(states)
    assert ranks_of(saved, "model/w") == ["0-2"] * 3
    assert ranks_of(saved, "small") == ["0", "1", "2"]
    assert agree([each.words for each in saved])
    assert [set(each.plan.verify) for each in saved] == [{"tracked/model/w", "tracked/model/b"}] * 3
    assert all(alike(value["tracked"], state) for value, state in zip(restored(saved), states, strict=True))
    bytes_held = sum(each.nbytes for each in states[0]["model"].values())
    for each in saved:
        assert abs(sum(copy.tensor.nbytes for copy in each.plan.copies) - bytes_held / 3) < 4096 + 28


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "state",
    [
        {str(number): torch.zeros(2**22, dtype=torch.int8) for number in range(4)},
        {str(number): torch.zeros(100 * 2**10, dtype=torch.int8) for number in range(150)},
        {str(number): torch.zeros(64 * 2**10 + 4 * number, dtype=torch.int8) for number in range(150)},
    ],
    ids=["large", "small", "uneven"],
)
def test_each_rank_stages_its_part_of_the_bytes(state: dict[str, torch.Tensor], world_size: int) -> None:
    saved = Ranks(world_size).save([state] * world_size)
    total = sum(each.nbytes for each in state.values())
    staged = [sum(copy.tensor.nbytes for copy in each.plan.copies) for each in saved]
    assert sum(staged) == total
    assert max(staged) <= total / world_size * 1.01


ODD: dict[str, Callable[[int], dict[str, Any]]] = {
    "values": lambda rank: {"a": tensor(1), "b": tensor(rank)},
    "one element": lambda rank: {"a": tensor(1).index_fill(0, torch.tensor([LARGE - 1]), float(rank))},
    "an extra tensor": lambda rank: {"a": tensor(1), **({"b": tensor(1)} if rank == 1 else {})},
    "nothing": lambda rank: {"a": tensor(1)} if rank else {},
    "types": lambda rank: {"a": tensor(1, dtype=torch.float64 if rank == 1 else torch.float32)},
    "shapes": lambda rank: {"a": tensor(1).reshape((100, 200) if rank == 1 else (200, 100))},
    "strides": lambda rank: {"a": tensor(1, 200, 100) if rank else tensor(1, 200, 100).t().contiguous().t()},
    "scattered everywhere": lambda rank: {"a": tensor(1, 200, 100).t(), "b": tensor(2)},
    "order": lambda rank: {"a": tensor(1), "b": tensor(2)} if rank else {"b": tensor(2), "a": tensor(1)},
    "names": lambda rank: {"a": {1: tensor(1), "1": tensor(2)} if rank else {"1": tensor(2), 1: tensor(1)}},
    "brackets": lambda rank: {
        "w": tensor(1, 50_001),
        "w[0:4096]": tensor(2),
        "w[0:25088]": tensor(rank),
        "x/y": tensor(3),
        "x": {"y": tensor(4), "y~1": tensor(5)},
    },
    "ties": lambda rank: dict.fromkeys(("a", "b"), tensor(1)) if rank else {"a": tensor(1), "b": tensor(1)},
    "views": lambda rank: {"flat": (flat := tensor(1)), "row": flat.view(200, 100)[3], "end": flat[-9000:]},
    "tiny": lambda rank: {
        "statistics": torch.full((64,), float(rank)),
        "count": torch.tensor(rank),
        "e": torch.ones(0),
    },
    "floats": lambda rank: {
        "a": tensor(1, dtype=torch.float8_e4m3fn),
        "z": torch.full((9000,), 1j),
        "t": tensor(1) > 0,
    },
}


@pytest.mark.parametrize("kind", ODD)
def test_ranks_that_differ_in(kind: str) -> None:
    states = [ODD[kind](rank) for rank in range(3)]
    saved = Ranks(3).save(states)
    assert agree([each.words for each in saved])
    for value, state in zip(restored(saved), states, strict=True):
        assert alike(value["tracked"], state)


def test_only_those_that_hold_the_same_share() -> None:
    saved = Ranks(3).save([ODD["an extra tensor"](rank) for rank in range(3)])
    assert ranks_of(saved, "a") == ["0-2"] * 3
    assert ranks_of(saved, "b") == ["1"]
    saved = Ranks(3).save([{"a": tensor(1 if rank != 1 else 2)} for rank in range(3)])
    assert ranks_of(saved, "a") == ["0,2", "1", "0,2"]
    saved = Ranks(2).save([ODD["strides"](rank) for rank in range(2)])
    assert ranks_of(saved, "a") == ["0", "1"]


def test_what_is_not_tracked_is_each_ranks_own() -> None:
    store = dist.HashStore()
    planners = [Planner(rank, 2, store) for rank in range(2)]
    encoded = encode({"extra": {"a": tensor(1)}, "random": tensor(2), "tracked": {"a": tensor(3)}})
    plans = together(2, lambda rank: planners[rank].plan(encoded, {}, 1))
    assert [{name: each.ranks for name, each in plan.entries.items()} for plan in plans] == [
        {"extra/a": str(rank), "random": str(rank), "tracked/a": "0-1"} for rank in range(2)
    ]


def test_a_rank_alone_stores_all() -> None:
    for planner in (Planner(0, 1, dist.HashStore()), Planner(2, 4, None)):
        plan = planner.plan(encode({"tracked": {"a": tensor(1)}}), {}, 1)
        assert [copy.tensor.nbytes for copy in plan.copies] == [4 * LARGE]
        assert plan.word({}, POSITION).groups == {}


def test_a_state_without_tensors_makes_no_file() -> None:
    plan = Planner(0, 1, None).plan(encode({"tracked": {"step": 3, "empty": torch.ones(0, 3)}}), {}, 1)
    assert (plan.copies, plan.header, plan.size) == ((), b"", 0)
    assert plan.entries == {"tracked/empty": TensorEntry("float32", (0, 3), "0")}


def test_ranks_that_part_are_noticed_and_store_their_own_from_then_on() -> None:
    ranks = Ranks(3)
    states = [{"same": tensor(1), "average": tensor(2)} for _ in range(3)]
    assert agree([each.words for each in ranks.save(states)])
    states[1]["average"] += 1
    saved = ranks.save(states)
    assert ranks_of(saved, "average") == ["0-2"] * 3
    assert not agree([each.words for each in saved])
    entries = [each.plan.with_digests(each.digests) for each in saved]
    differing = {name for name in entries[0] if len({each[name] for each in entries}) > 1}
    assert differing == {"tracked/average"}
    for planner in ranks.planners:
        planner.distrust(differing)
    for _ in range(2):
        saved = ranks.save(states)
        assert ranks_of(saved, "average") == ["0", "1", "2"]
        assert ranks_of(saved, "same") == ["0-2"] * 3
        assert agree([each.words for each in saved])
        assert all(alike(value["tracked"], state) for value, state in zip(restored(saved), states, strict=True))


def test_a_rank_that_distrusts_alone_is_noticed() -> None:
    ranks = Ranks(2)
    states = [{"a": tensor(1), "b": tensor(2)}] * 2
    ranks.save(states)
    ranks.planners[0].distrust(["tracked/a"])
    assert not agree([each.words for each in ranks.save(states)])


def test_a_structure_that_changes_everywhere_is_shared_at_once() -> None:
    ranks = Ranks(3)
    ranks.save([{"a": tensor(1)}] * 3)
    states = [{"a": tensor(1), "average": tensor(2)}] * 3
    saved = ranks.save(states)
    assert ranks_of(saved, "average") == ["0-2"] * 3
    assert agree([each.words for each in saved])


@pytest.mark.parametrize("changed", [0, 2])
def test_a_new_tensor_of_one_rank_is_its_own(changed: int) -> None:
    ranks = Ranks(3, deadline=60)
    states: list[dict[str, Any]] = [{"a": tensor(1)} for _ in range(3)]
    ranks.save(states)
    states[changed]["new"] = tensor(2)
    for _ in range(3):
        started = time.monotonic()
        saved = ranks.save(states)
        assert time.monotonic() - started < 30, "nobody waited for a deadline"
        assert ranks_of(saved, "a") == ["0-2"] * 3
        assert ranks_of(saved, "new") == [str(changed)]
        assert agree([each.words for each in saved])
        assert all(alike(value["tracked"], state) for value, state in zip(restored(saved), states, strict=True))


@pytest.mark.parametrize("late", [[1], [0, 2]], ids=["late", "first"])
def test_a_shared_tensor_that_one_rank_changes_costs_one_commit_and_no_more(late: list[int]) -> None:
    ranks = Ranks(3, deadline=60)
    states: list[dict[str, Any]] = [{"a": tensor(1), "b": tensor(2)} for _ in range(3)]
    ranks.save(states)
    states[1]["a"] = tensor(1, 10, 2000)
    started = time.monotonic()
    saved = ranks.save(states, late=late)
    # Where 1 is late, 0 and 2 count on what it doesn't hold any more; where it is first, they hear of that.
    assert agree([each.words for each in saved]) == (1 not in late)
    saved = ranks.save(states)
    assert time.monotonic() - started < 30, "nobody waited for a deadline"
    assert ranks_of(saved, "a") == ["0,2", "1", "0,2"]
    assert agree([each.words for each in saved])
    assert all(alike(value["tracked"], state) for value, state in zip(restored(saved), states, strict=True))


def test_a_shared_tensor_that_one_rank_drops_costs_one_commit_at_most() -> None:
    ranks = Ranks(3, deadline=60)
    states: list[dict[str, Any]] = [{"a": tensor(1), "b": tensor(2)} for _ in range(3)]
    ranks.save(states)
    del states[0]["a"]
    ranks.save(states)  # none where the others were there first
    saved = ranks.save(states)
    assert ranks_of(saved, "a") == ["1-2", "1-2"]
    assert agree([each.words for each in saved])
    assert all(alike(value["tracked"], state) for value, state in zip(restored(saved), states, strict=True))


def test_ranks_that_do_not_find_together_store_their_own(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    states = [{"a": tensor(1)} for _ in range(2)]
    planner = Planner(0, 2, store, deadline=0.2)
    plan = planner.plan(encode({"tracked": states[0]}), {}, 1)
    assert plan.entries["tracked/a"].ranks == "0"
    late = Planner(1, 2, store, deadline=20)
    assert late.plan(encode({"tracked": states[1]}), {}, 1).entries["tracked/a"].ranks == "1"
    planner = Planner(0, 2, store, deadline=20)
    plans = together(2, lambda rank: (planner, late)[rank].plan(encode({"tracked": states[rank]}), {}, 2))
    assert [plan.entries["tracked/a"].ranks for plan in plans] == ["0-1"] * 2


def test_renewing_compares_again() -> None:
    ranks = Ranks(2)
    states = [{"a": tensor(1)}, {"a": tensor(1)}]
    ranks.save(states)
    states[1]["a"] += 1
    assert not agree([each.words for each in ranks.save(states)])
    for planner in ranks.planners:
        planner.renew()
    saved = ranks.save(states)
    assert ranks_of(saved, "a") == ["0", "1"]
    assert agree([each.words for each in saved])


def test_a_plan_that_is_used_again_takes_the_tensors_of_now() -> None:
    ranks = Ranks(2)
    first = ranks.save([{"a": tensor(1), "small": tensor(1, 3)}] * 2)
    second = ranks.save([{"a": tensor(5), "small": tensor(6, 3)}] * 2)
    assert all(a.plan.entries is b.plan.entries for a, b in zip(first, second, strict=True)), "nothing was planned anew"
    assert alike(restored(second)[0]["tracked"], {"a": tensor(5), "small": tensor(6, 3)})


def test_a_plan_keeps_nothing_alive() -> None:
    import weakref

    planner = Planner(0, 1, None)
    state = tensor(1)
    storage = weakref.ref(state.untyped_storage())
    assert storage() is not None
    planner.plan(encode({"tracked": {"a": state, "b": state.view(200, 100).t()}}), {}, 1)
    del state
    assert storage() is None


@pytest.mark.parametrize(
    "other",
    [
        {"a": tensor(1), "b": tensor(2, 5)},
        {"a": tensor(1)},
        {"b": tensor(2), "a": tensor(1)},
        {"a": tensor(1).view(100, 200), "b": tensor(2)},
        {"a": tensor(1).view(100, 200).t(), "b": tensor(2)},
        {"a": torch.stack([tensor(1)] * 2, dim=1)[:, 1], "b": tensor(2)},
        {"a": tensor(1).view(torch.int32), "b": tensor(2)},
        {"a": (both := tensor(1)), "b": both},
    ],
)
def test_every_change_of_structure_is_planned_anew(other: dict[str, torch.Tensor]) -> None:
    ranks = Ranks(2)
    for state in ({"a": tensor(1), "b": tensor(2)}, other, {"a": tensor(1), "b": tensor(2)}):
        saved = ranks.save([state] * 2)
        assert alike(restored(saved)[1]["tracked"], state)
        assert agree([each.words for each in saved])


def test_strides_that_change_are_planned_anew() -> None:
    ranks = Ranks(2)
    for state in ({"a": tensor(1, 200, 100)}, {"a": tensor(2, 100, 200).t()}, {"a": tensor(3, 200, 100)}):
        assert alike(restored(ranks.save([state] * 2))[1]["tracked"], state)


# ---------------------------------------------------------------- digests


SAMPLES = [
    tensor(1),
    tensor(1, 40, 50).t(),
    tensor(2, 3, 3, dtype=torch.float8_e5m2),
    tensor(3, 5, dtype=torch.bfloat16),
    torch.tensor(2.5),
    torch.ones(0, 2),
    torch.ones(9)[:0:2],
    torch.ones(9)[:1:2],
    torch.arange(100) > 50,
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1 + 2j] * 100, dtype=torch.complex128),
    torch.ones(1).expand(3000),
]


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_digests_depend_on_values_alone(value: torch.Tensor) -> None:
    same = value.clone(memory_format=torch.contiguous_format)
    assert digests.content(value) == digests.content(same)
    assert digests.sampled([value, tensor(9)])[0] == digests.sampled([same])[0]


def test_digests_differ_with_the_content() -> None:
    value = torch.zeros(1_000_003)
    for place in (0, 500_000, 1_000_002):
        changed = value.clone()
        changed[place] = 1
        assert digests.content(changed) != digests.content(value)
    ends = [value.clone().index_fill(0, torch.tensor([place]), 1.0) for place in (0, -1)]
    assert len(set(digests.sampled([value, *ends]))) == 3, "the first and the last element are among the samples"
    assert digests.sampled([value])[0] != digests.sampled([torch.full_like(value, 1e-9)])[0]


class Broken(dict[str, Any]):
    """What is looked at when somebody interrupts."""

    def values(self) -> Any:
        raise KeyboardInterrupt


def test_a_look_that_is_broken_off_is_done_again() -> None:
    planner, encoding = Planner(0, 1, None), Encoding()
    planner.plan(encoding.encode({"x": torch.ones(2)}), {}, 1)
    value = {"x": torch.ones(3), "y": torch.ones(4)}
    with pytest.raises(KeyboardInterrupt):
        planner.plan(encoding.encode(value), Broken(), 2)
    plan = planner.plan(encoding.encode(value), {}, 3)
    assert {name: entry.shape for name, entry in plan.entries.items()} == {"x": (3,), "y": (4,)}
