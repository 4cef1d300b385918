"""What a node reads of shards whose lengths nobody knows, against what the loader reads; and the filler that does."""

from __future__ import annotations

import io
import random
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import eventually
from filler_kit import WAIT, Remote, berth, filler, loader, registered, remote  # noqa: F401 - a fixture
from test_filler_shards import Shards

from ftrun.data.filler import page
from ftrun.data.filler.chains import UNKNOWN, ChainCourse, shard_course
from ftrun.data.filler.lane import Bounds, Lane
from ftrun.data.filler.plans import FillPlan
from ftrun.data.filler.read_files import mean_length, read_files
from ftrun.data.filler.shards import ShardFiles
from ftrun.data.iterable.lanes import Plan, lanes
from ftrun.data.iterable.layout import parts
from ftrun.data.order import Share
from ftrun.data.position import Position
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

CASES = {"one rank": (1, (0,)), "one of two": (2, (1,)), "two of four": (4, (2, 3))}


def first_reads(lengths: list[int], batch: int, world: int, ranks: tuple[int, ...], batches: int) -> dict[Any, int]:
    """For each lane and turn of these ranks the batch that takes the first sample of it."""
    ways = lanes(Plan(batch, 3, False, 0), len(lengths), None)
    found: dict[Any, int] = {}
    turns = dict.fromkeys(range(ways.layout.lanes), (0, 0))  # turn, samples before its end
    for number in range(batches):
        for part in (part for rank in ranks for part in parts(ways.layout, batch, number, Share(rank, world))):
            for sample in range(part.first, part.first + part.size):
                turn, end = turns[part.lane]
                while sample >= end:
                    end += lengths[ways.stop(part.lane, turn).shard]
                    turns[part.lane] = turn + 1, end
                    turn += 1
                found.setdefault((part.lane, turn - 1), number)
    return found


@pytest.mark.parametrize("name", CASES)
def test_shards_of_about_one_length_are_due_before_they_are_read(name: str) -> None:
    world, ranks = CASES[name]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    batch, count = 12, 48
    lengths = [draw.randrange(95, 106) for _ in range(count)]
    made = loader(Shards([f"u{each}" for each in range(count)], None, None), global_batch=batch, shuffle=False)
    course = ChainCourse(made.recipe, ShardFiles((1,) * count, None), world, ranks, 100.0)
    ways = lanes(Plan(batch, 3, False, 0), count, None)
    reads = first_reads(lengths, batch, world, ranks, 300)
    at, ahead = Position(), []
    opening = course.under_way(at)
    assert opening is not None
    ahead += [(0, file) for file in opening.indices.tolist()]
    while at.samples < 300 * batch:
        stretch = course.stretch(at, draw.randrange(1, 400))
        assert stretch is not None
        assert all(at.samples <= place < stretch.after.samples for place in stretch.places.tolist())
        ahead += zip(stretch.places.tolist(), stretch.indices.tolist(), strict=True)
        at = stretch.after
    dues: dict[int, list[int]] = {}
    for place, file in ahead:
        dues.setdefault(file, []).append(place)
    seen: dict[int, int] = {}
    for (lane, turn), number in sorted(reads.items(), key=lambda item: item[1]):
        shard = ways.stop(lane, turn).shard
        again = seen[shard] = seen.get(shard, -1) + 1
        early = number * batch - dues[shard][again]
        assert 0 <= early <= 100 * ways.layout.lanes  # a shard sooner at most
        middle = course.under_way(Position(0, number * batch))
        assert middle is not None
        assert shard in middle.indices.tolist()
        assert course.next_use(np.array([shard]), Position(0, number * batch))[0] == 0.0
    others = sorted(set(range(count)) - set(dues))
    assert np.isinf(course.next_use(np.array(others, dtype=np.int64), Position())).all()


def test_an_epoch_that_is_said_goes_on_where_the_last_one_ended() -> None:
    made = loader(Shards(["u"] * 8, None, None), global_batch=4, shuffle=False, epoch_samples=42)
    course = shard_course(made.recipe, ShardFiles((2, 1, 0, 1, 1, 1, 1, 1), None), 1, (0,))
    assert isinstance(course, ChainCourse)
    course = course.with_mean(10.0)
    assert [course.is_news(mean) for mean in (0.0, 10.5, 12.0)] == [False, False, True]
    assert course.length(3) == 40
    files: list[int] = []
    at = Position()
    while at.epoch < 8:
        stretch = course.stretch(at, 100)
        assert stretch is not None
        assert all(0 <= place < 40 for place in stretch.places.tolist())
        files += stretch.indices.tolist()
        at = stretch.after
        assert at.samples == 0
    assert set(files) == set(range(8))
    assert course.distance(Position(3, 8), Position(1, 4)) == 84


def test_what_is_learned_of_lengths_changes_what_is_ahead() -> None:
    made = loader(Shards(["u"] * 48, None, None), global_batch=16, shuffle=False)
    course = ChainCourse(made.recipe, ShardFiles((1,) * 48, None), 1, (0,))
    assert course.samples_for(48) == 48 * UNKNOWN
    lane = Lane("data", course, [f"u{each}" for each in range(48)], object(), Bounds(), Position())
    lane.note(1)
    lane.move(Position(0, 0), 20)
    several = len({due.sample for due in iter(lambda: lane.take(0.0), None)})
    assert several < 48
    lane.take_course(course.with_mean(10.0))
    assert len({due.sample for due in iter(lambda: lane.take(0.0), None)}) > several


def test_the_average_comes_from_what_was_read() -> None:
    made = loader(Shards([f"u{each}" for each in range(48)], [7] * 48, None), global_batch=4, shuffle=False)
    assert mean_length(made.source) == 0.0
    assert mean_length(object()) == 0.0


def test_a_plan_and_a_page_say_so(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    made = loader(Shards(remote.fill(32), None, remote.files()), global_batch=8, shuffle=False)
    run = tmp_path / "run"
    told = registered(berth(run), made)
    plan = FillPlan.read(told.directory.plan("data"))
    assert plan is not None
    assert plan.shards == ShardFiles((1,) * 32, None)
    told.expect(80)
    wanted = {f"f{shard:04d}.bin": 1 for shard in range(32)}
    with filler(told.directory, remote):
        made.follow(told)
        steps = iter(made)
        values = [value for _ in range(60) for value in next(steps).tolist()]
        eventually(lambda: len(remote.reads()) >= 32, WAIT, "all shards")
    assert remote.reads() == wanted
    assert len(values) == 480  # of shards of ten

    def mean() -> float:
        told.at(made.position)  # it isn't asked each time
        read = page.read(told.directory.page("data", 1))
        return read.mean if read is not None else 0.0

    eventually(lambda: mean() == 10.0, WAIT, "the length of the shards")


def tars(remote: Remote) -> list[str]:  # noqa: F811
    urls = []
    for shard in range(8):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as archive:
            for number in range(20):
                member = tarfile.TarInfo(f"{shard:03}{number:03}.txt")
                member.size = 4
                archive.addfile(member, io.BytesIO(f"{100 * shard + number:04}".encode()))
        urls.append(remote.put(f"{shard}.tar", made.getvalue()))
    return urls


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning")
def test_a_webdataset_pipeline_comes_through_the_cache(remote: Remote) -> None:  # noqa: F811
    webdataset = pytest.importorskip("webdataset")
    urls = tars(remote)

    def pipeline(names: list[str], files: Any = None) -> Any:
        made = webdataset.WebDataset(names, shardshuffle=False)
        if files is not None:
            made.files = files
        return made.decode().to_tuple("txt", "__url__", "__key__", missing_is_error=False)

    def read(dataset: Any) -> list[Any]:
        steps = iter(loader(dataset, global_batch=4, shuffle=False, collate_fn=list))
        return [sample for _ in range(40) for sample in next(steps)]

    plain = read(pipeline([url.removeprefix("kit://") for url in urls]))
    through = read(pipeline(urls, remote.files()))
    assert [(text, url.removeprefix("kit://"), key) for text, url, key in through] == plain
    assert remote.reads() == {f"{shard}.tar": 1 for shard in range(8)}
    found = read_files(loader(pipeline(urls, remote.files()), global_batch=4, shuffle=False))
    assert found is not None
    assert (found.urls, found.shards) == (urls, ShardFiles((1,) * 8, None))
    assert read_files(loader(pipeline(urls), global_batch=4, shuffle=False)) is None
    with pytest.raises(UsageError, match="runs no commands"):
        loader(pipeline(["pipe:cat a.tar"], remote.files()), global_batch=4, shuffle=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning")
@pytest.mark.parametrize("limit", ["1GB", "1B"])
def test_a_pipeline_that_draws_its_shards_ahead_keeps_their_files(remote: Remote, limit: str) -> None:  # noqa: F811
    """A shuffle takes all shards that it is given before it passes the first one on."""
    webdataset = pytest.importorskip("webdataset")
    urls = tars(remote)

    def read(names: list[str], files: Any = None) -> list[Any]:
        made = webdataset.WebDataset(names, shardshuffle=100)
        if files is not None:
            made.files = files
        steps = iter(loader(made.to_tuple("txt"), global_batch=4, shuffle=False, collate_fn=list))
        return [sample for _ in range(40) for sample in next(steps)]

    plain = read([url.removeprefix("kit://") for url in urls])
    assert read(urls, remote.files(limit=limit)) == plain
