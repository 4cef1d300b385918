"""Who stores what: shares, groups and blocks, as pure functions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.checkpoint.plan.ownership import GRANULE, SMALL, Described, Item, Share, agree, divide
from ftrun.checkpoint.plan.pieces import Box
from ftrun.checkpoint.plan.sharding import Split, boxes

KIB, MIB = 2**10, 2**20


def loads(items: list[Item], members: int) -> list[int]:
    return [
        sum((share.stop - share.start) * items[share.item].itemsize for share in shares)
        for shares in divide(items, members)
    ]


items_of_any_kind = st.lists(
    st.builds(
        Item, st.one_of(st.integers(1, 200), st.integers(1, 300_000)), st.sampled_from([1, 2, 4, 8, 16]), st.booleans()
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(items_of_any_kind, st.integers(1, 9))
def test_every_element_is_stored_once(items: list[Item], members: int) -> None:
    shares = divide(items, members)
    assert len(shares) == members
    runs: dict[int, list[Share]] = {number: [] for number in range(len(items))}
    for mine in shares:
        assert mine == sorted(mine, key=lambda share: share.item)
        for share in mine:
            runs[share.item].append(share)
    for number, item in enumerate(items):
        covered = sorted(runs[number], key=lambda share: share.start)
        bounds = [0, *itertools.chain(*((share.start, share.stop) for share in covered)), item.numel]
        assert bounds[::2] == bounds[1::2], "runs follow each other from the first element to the last"
        if item.is_solid:
            assert len(covered) == 1
        for share in covered:
            assert share.start < share.stop
            assert share.start * item.itemsize % GRANULE == 0


@settings(max_examples=200, deadline=None)
@given(items_of_any_kind, st.integers(1, 9))
def test_nobody_stores_much_more_than_others(items: list[Item], members: int) -> None:
    each = loads(items, members)
    solid = max((item.size for item in items if item.is_solid), default=0)
    assert max(each) <= sum(each) / members + solid + GRANULE


@pytest.mark.parametrize("members", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize(
    "items",
    [
        [Item(32 * MIB, 4, True)] * 4,
        [Item(25_600, 4, True)] * 3000,
        [Item(2560, 4, True)] * 3000,
        [Item(2560, 4, False)] * 3000,
        [Item(1000 + 17 * number, 4, number % 3 > 0) for number in range(3000)],
        [Item(64 * MIB, 2, True), *[Item(9 * 512 * 512, 2, False)] * 50, *[Item(512, 2, True)] * 100],
    ],
    ids=["4x128MiB", "3000x100KiB", "3000x10KiB", "3000 not contiguous", "growing", "channels last"],
)
def test_members_store_the_same_within_one_percent(items: list[Item], members: int) -> None:
    each = loads(items, members)
    assert max(each) <= sum(each) / members * 1.01


def test_a_member_has_few_parts_of_tensors() -> None:
    items = [Item(25_600, 4, True)] * 3000
    for shares in divide(items, 8):
        assert sum(share.stop - share.start < 25_600 for share in shares) <= 2
        assert len(shares) <= 3000 / 8 + 2


def test_small_and_scattered_tensors_stay_whole() -> None:
    just, under = Item(SMALL // 4, 4, True), Item(SMALL // 4 - 1, 4, True)
    assert (just.is_solid, under.is_solid, Item(MIB, 4, False).is_solid) == (False, True, True)
    assert divide([], 3) == [[], [], []]
    assert divide([under], 3) == [[Share(0, 0, under.numel)], [], []]


def described(name: str, digest: str = "d", known: str = "", shape: tuple[int, ...] = (3,)) -> Described:
    return Described(name, "float32", shape, True, known, digest)


def test_ranks_that_say_the_same_are_a_group() -> None:
    a, b, c, other = described("a"), described("b"), described("c"), described("b", "e")
    found = agree({(0, 2): [a, b], (1,): [a, other], (3,): [c]})
    assert found == {
        (0, 2): {(0, 1, 2): [0], (0, 2): [1]},
        (1,): {(0, 1, 2): [0]},
        (3,): {},
    }


@pytest.mark.parametrize(
    "other",
    [
        described("a", "e"),
        described("a", shape=(1, 3)),
        described("a", known="0-1"),
        described("A"),
        Described("a", "int32", (3,), True, "", "d"),
        Described("a", "float32", (3,), False, "", "d"),
    ],
)
def test_what_differs_in_anything_is_not_shared(other: Described) -> None:
    assert agree({(0,): [described("a")], (1,): [other]}) == {(0,): {}, (1,): {}}


def indices(found: list[tuple[Box, tuple[int, ...]]], local: int) -> list[int]:
    """Rows of the whole tensor, in the order of the local one."""
    rows = [-1] * local
    for box, (start, *_) in found:
        rows[start : start + box.shape[0]] = range(box.offset[0], box.offset[0] + box.shape[0])
    assert -1 not in rows
    return rows


def part(rows: torch.Tensor, count: int, index: int) -> torch.Tensor:
    parts = torch.chunk(rows, count) if len(rows) else ()
    return parts[index] if index < len(parts) else rows[:0]


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product([1, 2, 3, 5], [1, 2, 3])))
def test_blocks_of_two_plain_splits(outer: int, inner: int) -> None:
    for extent in range(14):
        for i, j in itertools.product(range(outer), range(inner)):
            expected = part(part(torch.arange(extent), outer, i), inner, j).tolist()
            found = boxes((extent, 2), (len(expected), 2), [Split(0, outer, i), None, Split(0, inner, j)])
            assert indices(found, len(expected)) == expected
            assert len(found) == (1 if expected else 0)


@pytest.mark.parametrize(("data", "tensor"), list(itertools.product([2, 3, 5], [1, 2, 3])))
def test_blocks_of_what_fsdp_makes_of_tensor_parallel_parameters(data: int, tensor: int) -> None:
    for extent in range(14):
        for i, j in itertools.product(range(data), range(tensor)):
            expected = part(part(torch.arange(extent), tensor, j), data, i).tolist()
            splits = [Split(0, data, i, strided=tensor), Split(0, tensor, j)]
            found = boxes((extent,), (len(expected),), splits)
            assert indices(found, len(expected)) == expected, (extent, i, j)


def test_a_strided_shard_alone_has_several_blocks() -> None:
    found = boxes((8, 3), (4, 3), [Split(0, 2, 1, strided=2)])
    assert found == [(Box((2, 0), (2, 3)), (0, 0)), (Box((6, 0), (2, 3)), (2, 0))]
    found = boxes((4, 4), (2, 2), [Split(0, 2, 0, strided=2), Split(1, 2, 1)])
    assert found == [(Box((0, 2), (1, 2)), (0, 0)), (Box((2, 2), (1, 2)), (1, 0))]


def test_blocks_agree_with_torchs_own_offsets() -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    from torch.distributed.tensor import Replicate, Shard

    compute = utils._compute_local_shape_and_global_offset
    for shape, mesh in itertools.product([(7, 5), (4, 4), (1, 9), (3, 0)], [(2, 3), (4, 1), (3, 3)]):
        for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
            for place in itertools.product(*map(range, mesh)):
                local, offset = compute(shape, mesh, list(place), placements)
                splits = [
                    Split(each.dim, mesh[number], place[number]) if isinstance(each, Shard) else None
                    for number, each in enumerate(placements)
                ]
                found = boxes(shape, tuple(local), splits)
                expected = [(Box(tuple(offset), tuple(local)), (0, 0))] if 0 not in local else []
                assert found == expected, (shape, mesh, placements, place)


def test_scalars_and_tensors_that_are_not_split_are_one_block() -> None:
    assert boxes((), (), [None]) == [(Box((), ()), ())]
    assert boxes((2, 3), (2, 3), [None, None]) == [(Box((0, 0), (2, 3)), (0, 0))]


def test_a_local_part_that_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="doesn't follow from how it is split"):
        boxes((7,), (3,), [Split(0, 2, 0)])
