"""What a node reads of a dataset in shards, against what the loader's own tickets ask for; and the filler that does."""

from __future__ import annotations

import random
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import eventually
from filler_kit import WAIT, Remote, berth, filler, loader, registered, remote  # noqa: F401 - a fixture

from ftrun.data.filler.lane import Bounds, Lane
from ftrun.data.filler.plans import FillPlan
from ftrun.data.filler.read_files import read_files
from ftrun.data.filler.shards import ShardCourse, ShardFiles
from ftrun.data.iterable import tar_index
from ftrun.data.iterable.lanes import lanes
from ftrun.data.iterable.tar import TarShards
from ftrun.data.order import Share
from ftrun.data.position import Position
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftrun.data.cache.files import CachedFiles
    from ftrun.data.loader import DataLoader


class Shards:
    """Each shard is a file whose samples are its number, again and again."""

    def __init__(self, urls: list[str], lengths: list[int] | None, files: CachedFiles | None) -> None:
        self.urls_of, self.lengths, self.files = urls, lengths, files
        self.num_shards = len(urls)

    def shard(self, index: int, count: int) -> Shard:
        assert count == len(self.urls_of)
        return Shard(self, index)

    def shard_lengths(self, _count: int) -> list[int] | None:
        return self.lengths

    def shard_urls(self, _count: int) -> list[list[str]]:
        return [[url] for url in self.urls_of]


class Shard:
    def __init__(self, of: Shards, index: int) -> None:
        self.of, self.index, self.start = of, index, 0

    def seek(self, number: int) -> None:
        self.start = number

    def __iter__(self) -> Iterator[int]:
        assert self.of.files is not None
        with self.of.files.open(self.of.urls_of[self.index]) as path:
            value = int(path.read_bytes()[:8])
            lengths = self.of.lengths
            yield from [value] * ((lengths[self.index] if lengths else 10) - self.start)


def readings(made: DataLoader[Any], ranks: list[int], world: int, start: Position) -> dict[tuple[int, int], list[int]]:
    """From the tickets of each rank: the batches in which each shard is read, by lane and shard."""
    shards, recipe = made.source.shards, made.recipe  # type: ignore[attr-defined]
    found: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        for ticket in made.source.tickets(recipe, Share(rank, world), start):
            ways = lanes(ticket.plan, shards.count, shards.lengths)
            for part in ticket.parts:
                for sample in range(part.first, part.first + part.size):
                    place = ways.find(part.lane, sample)
                    assert place is not None
                    shard = ways.stop(part.lane, place[0]).shard
                    found.setdefault((part.lane, shard), []).append(ticket.batch)
    return {place: sorted(batches) for place, batches in found.items()}


def shared_lanes(made: DataLoader[Any], ranks: list[int], world: int) -> bool:
    """Whether some lane is read here and by a rank of another node, too."""
    source, recipe = made.source, made.recipe
    taken: list[set[int]] = [
        {
            part.lane
            for rank in some
            for ticket in source.tickets(recipe, Share(rank, world), Position())
            for part in ticket.parts
        }
        for some in (ranks, [rank for rank in range(world) if rank not in ranks])
    ]
    return bool(taken[0] & taken[1])


CASES = {
    "one rank": (1, [0], True),
    "one of two": (2, [1], True),
    "two of four": (4, [2, 3], False),
    "all of three": (3, [0, 1, 2], True),
    "one of six": (6, [4], True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_due_with_the_first_batch_that_takes_of_it_and_in_use_until_the_last(name: str) -> None:
    world, ranks, shuffle = CASES[name]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    count, batch = draw.choice([7, 24, 40]), 12
    lengths = [draw.randrange(40) for _ in range(count)]
    made = loader(Shards([f"u{each}" for each in range(count)], lengths, None), global_batch=batch, shuffle=shuffle)
    course = ShardCourse(made.recipe, ShardFiles((1,) * count, tuple(lengths)), world, tuple(ranks))
    epoch = draw.randrange(3)
    start = Position(epoch)
    expected = sorted(
        (batches[0] * batch, shard) for (_, shard), batches in readings(made, ranks, world, start).items()
    )
    found: list[tuple[int, int]] = []
    at = start
    while at.epoch == epoch:
        stretch = course.stretch(at, draw.randrange(1, 60))
        assert stretch is not None
        found += zip(stretch.places.tolist(), stretch.indices.tolist(), strict=True)
        at = stretch.after
    if not shared_lanes(made, ranks, world):
        assert sorted(found) == expected
    else:  # by ranks of several nodes: each fetches what any of them reads
        for place, shard in expected:
            assert any(other == shard and due <= place for due, other in found)
        return
    # From the middle: what is open there comes first, and what is open is needed now.
    middle = Position(epoch, batch * draw.randrange(sum(lengths) // batch))
    before = readings(made, ranks, world, start)
    open_there = sorted(
        shard for (_, shard), batches in before.items() if batches[0] * batch < middle.samples <= batches[-1] * batch
    )
    under_way = course.under_way(middle)
    assert sorted(under_way.indices.tolist()) == open_there
    uses = course.next_use(np.arange(count), middle)
    for shard in range(count):
        batches = [each for (_, other), all_ in before.items() if other == shard for each in all_]
        ahead = [each * batch - middle.samples for each in batches if each * batch >= middle.samples]
        if shard in open_there:
            assert uses[shard] == 0
        elif ahead:
            assert uses[shard] == min(ahead)
        else:
            assert uses[shard] >= sum(lengths) // batch * batch - middle.samples


def test_shards_of_several_files_and_what_a_lane_does_with_them() -> None:
    files = ShardFiles((2, 0, 3), (24, 0, 36))
    recipe = loader(list(range(60)), global_batch=12, order="none", shuffle=None).recipe
    course = ShardCourse(replace(recipe, order="shards-v1"), files, 1, (0,))
    made = Lane("data", course, [f"u{each}" for each in range(5)], object(), Bounds(), Position())
    made.note(1)
    found = []
    while (due := made.take(0.0)) is not None:
        found.append(due.url)
    assert set(found) == {f"u{each}" for each in range(5)}  # of a shard that two lanes share, twice
    assert found[:2] == ["u0", "u1"]
    assert course.next_use(np.arange(5), Position(0, 0)).min() == 0
    assert course.length(7) == 60
    beyond = course.stretch(Position(0, 60), 12)
    assert beyond is not None
    assert beyond.epoch == 1
    # Whoever begins in the middle, or goes back there, needs what is being read there.
    for middle in (Lane("data", course, made.urls, object(), Bounds(), Position(0, 12)), made):
        middle.note(1)
        middle.move(Position(2, 0), None)
        middle.move(Position(0, 12), None)
        first = [middle.take(0.0) for _ in range(2)]
        assert {due.url for due in first if due is not None} == {"u0", "u1"}


def test_what_is_known_of_a_dataset_in_shards(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    urls = [f"u{each}" for each in range(4)]
    files = remote.files()
    found = read_files(loader(Shards(urls, [3, 4, 5, 6], files), global_batch=2))
    assert found is not None
    assert found.shards == ShardFiles((1, 1, 1, 1), (3, 4, 5, 6))
    assert list(map(str, found.urls)) == urls
    unknown = read_files(loader(Shards(urls, None, files), global_batch=2))
    assert unknown is not None
    assert unknown.shards == ShardFiles((1, 1, 1, 1), None)
    assert read_files(loader(Shards(urls, [3, 4, 5, 6], None), global_batch=2)) is None

    class Wrong(Shards):
        def shard_urls(self, _count: int) -> list[list[str]]:
            return [["a"]]

    with pytest.raises(UsageError, match=r"shard_urls\(4\) returned 1 lists"):
        read_files(loader(Wrong(urls, [3, 4, 5, 6], files), global_batch=2))


def test_tar_files_with_an_index_are_known(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    tars = []
    for number in range(4):
        tars.append(tmp_path / f"{number}.tar")
        with tarfile.open(tars[-1], "w") as archive:
            for sample in range(3 + number):
                archive.addfile(tarfile.TarInfo(f"{sample}.txt"))
        tar_index.write(tars[-1])
    found = read_files(loader(TarShards(tars, cache=remote.files()), global_batch=2))
    assert found is not None
    assert list(found.urls) == [str(each) for each in tars]  # type: ignore[call-overload] # a list
    assert found.shards == ShardFiles((1, 1, 1, 1), (3, 4, 5, 6))
    assert read_files(loader(TarShards(tars), global_batch=2)) is None


def test_shards_are_fetched_once_and_in_order_as_far_as_the_run_goes(
    tmp_path: Path,
    remote: Remote,  # noqa: F811
) -> None:
    dataset = Shards(remote.fill(48), [20] * 48, remote.files())
    made = loader(dataset, global_batch=8, shuffle=True)
    run = tmp_path / "run"
    told = registered(berth(run), made)
    plan = FillPlan.read(told.directory.plan("data"))
    assert plan is not None
    assert plan.shards == ShardFiles((1,) * 48, (20,) * 48)
    told.expect(30)
    told.at(Position(0, 0))
    wanted = {shard for _, shard in readings_until(made, 30)}
    assert 0 < len(wanted) < 48
    with filler(told.directory, remote):
        eventually(lambda: len(remote.reads()) >= len(wanted), WAIT, "thirty steps' shards")
        eventually(lambda: remote.shown(run).get("steps_ahead") == 30.0, WAIT, "the end of its work")
    assert remote.reads() == {f"f{shard:04d}.bin": 1 for shard in wanted}
    steps = iter(made)
    values = {int(value) for _ in range(30) for value in next(steps).tolist()}
    assert values == wanted
    assert max(remote.reads().values()) == 1


def readings_until(made: DataLoader[Any], steps: int) -> set[tuple[int, int]]:
    return {
        place for place, batches in readings(made, [0], 1, Position()).items() if any(each < steps for each in batches)
    }
