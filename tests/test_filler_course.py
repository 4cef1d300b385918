"""What a node reads next, and when it reads a file again: pure, against the loaders' own tickets."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ftrun.data.filler import orders, page, plans, urls
from ftrun.data.filler import room as filler_room
from ftrun.data.filler.course import Course
from ftrun.data.filler.lane import Bounds, Lane
from ftrun.data.filler.outage import Outage
from ftrun.data.filler.places import FillDir, Pointer, Pool
from ftrun.data.filler.plans import FillPlan, Resume
from ftrun.data.filler.room import Room
from ftrun.data.order import Share, order_of, tickets
from ftrun.data.position import Position, Recipe, advance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RECIPE = Recipe(n=103, dataset="d", order="feistel6-v1", seed=5, global_batch=12, batch_size=None, tail="drop")


def course(recipe: Recipe = RECIPE, world: int = 1, ranks: Sequence[int] = (0,)) -> Course:
    return Course(recipe.global_batch, world, tuple(ranks), lambda epoch: orders.computed(recipe, epoch))


def walked(course: Course, start: Position, count: int, stretches: int) -> list[int]:
    found: list[int] = []
    for _ in range(stretches):
        stretch = course.stretch(start, count)
        assert stretch is not None
        found += stretch.indices.tolist()
        start = stretch.after
    return found


@pytest.mark.parametrize(("world", "ranks"), [(1, [0]), (4, [0, 1]), (4, [2, 3]), (3, [1]), (6, [0, 5])])
@pytest.mark.parametrize("order", ["feistel6-v1", "none", "block-v1:8x2"])
def test_a_node_reads_what_its_ranks_tickets_say(world: int, ranks: list[int], order: str) -> None:
    recipe = replace(RECIPE, order=order)
    start = Position(2, 24)
    theirs = [list(tickets(recipe, Share(rank, world), start)) for rank in ranks]
    steps = [sorted(index for each in step for index in each.indices) for step in zip(*theirs, strict=True)]
    mine = course(recipe, world, ranks)
    at = start
    for step in steps:
        stretch = mine.stretch(at, recipe.global_batch)
        assert stretch is not None
        assert sorted(stretch.indices.tolist()) == step
        at = stretch.after
    assert at == Position(3, 0)


def test_a_stretch_ends_with_its_epoch_and_the_next_begins() -> None:
    mine = course()
    stretch = mine.stretch(Position(0, 84), 50)
    assert stretch is not None
    assert (stretch.after, len(stretch.indices)) == (Position(1, 0), 12)
    assert walked(mine, Position(0, 84), 50, 2)[12:] == order_of(RECIPE, 1).take(0, 50).tolist()
    assert mine.distance(Position(1, 0), Position(0, 84)) == 12
    assert mine.distance(Position(3, 4), Position(0, 84)) == 12 + 2 * 96 + 4
    assert mine.distance(Position(0, 84), Position(1, 0)) == -12


@pytest.mark.parametrize(("world", "ranks"), [(1, [0]), (4, [1]), (4, [0, 3])])
def test_next_uses_are_those_of_the_walk(world: int, ranks: list[int]) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    mine = course(world=world, ranks=ranks)
    start = Position(draw.randrange(5), 12 * draw.randrange(8))
    first: dict[int, float] = {}
    at = start
    while mine.distance(at, start) < 96 - start.samples + 96:
        stretch = mine.stretch(at, 7)
        assert stretch is not None
        for place, index in zip(stretch.places.tolist(), stretch.indices.tolist(), strict=True):
            first.setdefault(index, mine.distance(Position(stretch.epoch, place), start))
        at = stretch.after
    uses = mine.next_use(np.arange(RECIPE.n or 0), start)
    for index, use in enumerate(uses.tolist()):
        if index in first:
            assert use == first[index]
        else:
            assert use > max(first.values())


def test_orders_that_are_written_down_are_read_back(tmp_path: Path) -> None:
    recipe = replace(RECIPE, order="torch-v1")
    assert orders.must_be_written(recipe)
    assert not orders.must_be_written(RECIPE)
    assert orders.read(tmp_path / "a.0.order", recipe) is None
    listed = order_of(recipe, 0).take(0, 103)
    orders.write(tmp_path / "a.0.order", listed, None)
    known = orders.read(tmp_path / "a.0.order", recipe)
    assert known is not None
    assert known.usable == 96
    assert known.order.at(np.arange(5)).tolist() == listed[:5].tolist()
    assert known.order.places(listed[[7, 90]]).tolist() == [7, 90]


def test_batches_of_many_sizes_are_shared_as_a_batch_sampler_lists_them(tmp_path: Path) -> None:
    recipe = replace(RECIPE, n=None, order="batches-v1")
    orders.write(tmp_path / "a.0.order", np.array([9, 8, 7, 6, 5, 4]), np.array([3, 4, 6]))
    known = orders.read(tmp_path / "a.0.order", recipe)
    second = Course(3, 2, (1,), lambda epoch: known if epoch == 0 else None)
    stretch = second.stretch(Position(0, 0), 100)
    assert stretch is not None
    assert stretch.indices.tolist() == [8, 4]
    assert second.stretch(stretch.after, 100) is None


# A lane


class Files:
    """Of a cache only what a lane and a room look at."""

    root = "/cache"

    def __init__(self, limit: int | None = None, fits: int = 0) -> None:
        self.limit = limit
        self.fits = fits
        self.asked: list[int] = []

    def make_room(self, needed: int, _next_use: Any) -> int:
        self.asked.append(needed)
        return self.fits


def lane(bounds: Bounds | None = None, world: int = 1, ranks: Sequence[int] = (0,)) -> Lane:
    names = [f"u{number}" for number in range(103)]
    return Lane("data", course(world=world, ranks=ranks), names, Files(), bounds or Bounds(), Position())


def taken(lane: Lane) -> list[str]:
    found = []
    while (due := lane.take(0.0)) is not None:
        found.append(due.url)
    return found


def test_a_lane_goes_no_further_than_it_may() -> None:
    made = lane(Bounds(samples=40, bytes=1 << 30))
    made.note(100)
    first = taken(made)
    expected = order_of(RECIPE, 0).take(0, 96).tolist()
    assert first == [f"u{index}" for index in expected[:40]]
    made.move(Position(0, 12), None)
    assert first + taken(made) == [f"u{index}" for index in expected[:52]]
    made.note(900)  # 500 bytes in the mean
    by_bytes = lane(Bounds(samples=40, bytes=10_000))
    by_bytes.note(500)
    assert len(taken(by_bytes)) == 20


def test_a_lane_fetches_few_files_before_it_knows_their_size_and_none_beyond_the_run() -> None:
    assert len(taken(lane())) == 64
    ending = lane()
    ending.note(10)
    ending.move(Position(0, 12), steps_left=2)
    assert len(taken(ending)) == 24


def test_a_lane_crosses_epochs_and_follows_a_training_that_goes_back() -> None:
    made = lane(Bounds(samples=120))
    made.note(1)
    assert len(taken(made)) == 96  # a whole epoch
    made.move(Position(0, 60), None)
    assert taken(made) == [f"u{index}" for index in order_of(RECIPE, 1).take(0, 60).tolist()]
    made.move(Position(0, 24), None)
    assert taken(made)[:3] == [f"u{index}" for index in order_of(RECIPE, 0).take(24, 27).tolist()]


def test_a_known_end_stays_where_it_is_until_somebody_says_another_one() -> None:
    made = lane()
    made.note(10)
    made.move(Position(0, 72), steps_left=4)
    assert len(taken(made)) == 48
    made.move(Position(0, 60), None)
    assert (made.steps_left, len(taken(made))) == (5, 60)
    made.move(Position(1, 0), None)
    assert (made.steps_left, taken(made)) == (2, [])
    made.move(Position(1, 0), 3)
    assert len(taken(made)) == 12
    made.move(Position(3, 0), None)
    assert (made.steps_left, taken(made)) == (0, [])


def test_files_that_are_known_to_be_there_are_hardly_looked_for() -> None:
    made = lane(Bounds(samples=1000))
    made.note(1)

    def look(evictions: int) -> int:
        found = []
        while (due := made.take(0.0)) is not None:
            found.append(due)
            made.seen.evictions_are(evictions, 0.0)
            made.seen.is_there(due.sample)
        made.move(Position(made.position.epoch + 1, 0), None)
        return len(found)

    # An epoch leaves a few files of the dataset out, others each time.
    assert look(0) == 96
    assert look(0) < 24
    assert look(1) < 24  # found out when it is over
    assert look(1) > 72
    assert look(1) < 36


def test_where_a_known_file_is_missing_all_are_looked_for_again() -> None:
    made = lane(Bounds(samples=1000))
    made.note(1)
    dues = list(iter(lambda: made.take(0.0), None))
    for due in dues:
        made.seen.is_there(due.sample)
    made.is_missing(dues[5])
    assert [due.place for due in iter(lambda: made.take(0.0), None)] == [due.place for due in dues]
    made.is_missing(dues[5])
    assert made.take(0.0) is None


def test_a_loader_that_has_enough_ahead_says_until_where() -> None:
    made = lane(Bounds(samples=40))
    made.note(1)
    assert not made.rests_at(made.position)
    assert len(taken(made)) == 40
    rest = [samples for samples in range(96) if made.rests_at(Position(0, samples))]
    assert rest == list(range(5))
    made.move(Position(0, 5), None)
    assert not made.rests_at(Position(0, 5))
    assert len(taken(made)) == 5
    assert [made.rests_at(Position(0, 4)), made.rests_at(Position(0, 5))] == [False, True]
    made.move(Position(0, 93), None)
    assert taken(made)
    assert [made.rests_at(Position(0, 95)), made.rests_at(Position(1, 0))] == [True, False]


def test_what_training_has_passed_is_left_to_it() -> None:
    made = lane(Bounds(samples=40))
    made.note(1)
    due = made.take(0.0)
    assert due is not None
    made.later(due, at=5.0)
    made.move(Position(0, 36), None)
    assert taken(made)[0] == f"u{order_of(RECIPE, 0).take(36, 37)[0]}"
    assert f"u{due.sample}" not in taken(made)
    assert made.take(9.0) is None


def test_what_failed_is_tried_again_a_few_times() -> None:
    made = lane(Bounds(samples=40))
    made.note(1)
    everything = taken(made)
    due = made.take(0.0)
    assert due is None
    stretch = made.course.stretch(Position(0, 20), 1)
    assert stretch is not None
    from ftrun.data.filler.lane import Due

    again: Due | None = Due(made, int(stretch.indices[0]), 0, 20)
    for tries in range(1, 4):
        assert again is not None
        made.later(again, at=float(tries))
        assert made.take(tries - 0.5) is None
        again = made.take(float(tries))
        assert again is not None
        assert again.failures == tries
    made.later(again, at=9.0)
    assert made.take(10.0) is None
    assert again.url in everything


# Room


def test_room_is_asked_for_in_chunks_and_not_at_all_while_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(filler_room, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    files = Files(limit=16_000, fits=1_500)
    room = Room(files, lambda urls: np.full(len(urls), np.inf), lambda: 1.0)
    assert room.take(500, 1.0)
    assert len(files.asked) == 1
    files.fits = 0
    assert not room.take(500, 1.0)
    assert room.full
    assert not room.take(500, 1.0)
    assert len(files.asked) == 2  # it was asked a moment ago
    now[0] += 1.0
    assert not room.take(500, 1.0)
    assert len(files.asked) == 3


def test_nothing_is_evicted_that_is_read_sooner_than_what_comes() -> None:
    import time

    from ftrun.data.cache.records import CachedObject

    kept: list[float] = []

    class Asking(Files):
        def make_room(self, needed: int, next_use: Any) -> int:
            now = time.time()
            objects = [CachedObject("k", url, 1, now - age, "") for url, age in held]
            kept.extend(next_use(objects))
            return needed

    held = [("soon", 0.0), ("late", 0.0), ("foreign, just used", 1.0), ("foreign, long ago", 3600.0)]
    uses = {"soon": 3.0, "late": 900.0}
    room = Room(Asking(), lambda urls: np.array([uses.get(url, np.inf) for url in urls]), lambda: 10.0)
    assert room.take(100, 50.0)
    assert kept[0] == float("-inf")
    assert kept[1] == 900.0
    assert kept[2] == float("-inf")
    assert kept[3] == pytest.approx(36_000, rel=0.01)


def test_a_remote_that_is_down_is_asked_one_file_at_a_time_after_growing_pauses() -> None:
    outage = Outage()
    now = 0.0
    for _ in range(4):
        assert outage.may_ask(now)
        outage.failed("no route", now)
    assert outage.is_down
    pauses = []
    for _ in range(8):
        assert not outage.may_ask(now)
        until = outage.failed("no route", now) if pauses else now + 0.5
        pauses.append(until - now)
        now = until
        assert outage.may_ask(now)
        assert not outage.may_ask(now)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0
    outage.well()
    assert outage.may_ask(now)
    assert outage.may_ask(now)


# What lies on disk


def test_a_page_says_what_was_written(tmp_path: Path) -> None:
    assert page.read(tmp_path / "p") is None
    made = page.Page(tmp_path / "p", Position(3, 10**11))
    told = page.read(tmp_path / "p")
    assert told is not None
    assert told[:2] == (Position(3, 10**11), None)
    made.write(Position(4, 0), 17)
    told = page.read(tmp_path / "p")
    assert told is not None
    assert told[:2] == (Position(4, 0), 17)
    (tmp_path / "p").write_bytes(b"x" * 64)
    assert page.read(tmp_path / "p") is None
    (tmp_path / "p").write_bytes(b"short")
    assert page.read(tmp_path / "p") is None


NAMES = ["s3://b/ä b.jpg", "", "/mnt/\udcff odd", "x" * 3000, "s3://b/ä b.jpg"]


def test_urls_come_back_from_disk_and_are_found(tmp_path: Path) -> None:
    digest, data = urls.pack(NAMES)
    assert urls.pack(list(NAMES))[0] == digest
    assert urls.pack([*NAMES, "y"])[0] != digest
    urls.store(tmp_path / digest, data)
    mapped = urls.MappedUrls(tmp_path / digest)
    assert [mapped[number] for number in range(len(mapped))] == NAMES
    found = urls.UrlIndex(mapped).find([*NAMES, "elsewhere"]).tolist()
    assert [NAMES[index] for index in found[:-1]] == NAMES
    assert found[-1] == -1
    (tmp_path / digest).write_bytes(data[:-1])
    with pytest.raises(ValueError, match="torn"):
        urls.MappedUrls(tmp_path / digest)


PLAN = FillPlan(
    loader="data",
    attempt=3,
    recipe=RECIPE,
    world_size=4,
    ranks=(0, 1),
    position=Position(0, 24),
    urls="abc",
    files={"root": "/c"},
)
STATE = {"epoch": 1, "samples": 36, **{name: vars(RECIPE)[name] for name in vars(RECIPE)}}

# name: (resume, what changes)
RESUMES: dict[str, tuple[Resume | None, dict[str, Any]]] = {
    "nothing said": (None, {}),
    "of this attempt": (Resume(3, 1, (0,), {"data": STATE}), {}),
    "the next attempt": (
        Resume(4, 2, (0,), {"data": STATE}),
        {"attempt": 4, "world_size": 2, "ranks": (0,), "position": Position(1, 36)},
    ),
    "another global batch": (
        Resume(4, 4, (0, 1), {"data": {**STATE, "global_batch": 18}}),
        {"attempt": 4, "position": Position(1, 36), "recipe": replace(RECIPE, global_batch=18)},
    ),
    "a fresh start": (Resume(4, 4, (0, 1), {}), {"attempt": 4, "position": Position()}),
    "other data": (Resume(4, 4, (0, 1), {"data": {**STATE, "n": 9}}), {}),
    "no such loader": (Resume(4, 4, (0, 1), {"other": STATE}), {}),
    "nonsense": (Resume(4, 4, (0, 1), {"data": {**STATE, "samples": "x"}}), {}),
}


@pytest.mark.parametrize("name", RESUMES)
def test_where_the_next_attempt_begins(name: str) -> None:
    resume, changes = RESUMES[name]
    assert plans.resumed(PLAN, resume) == replace(PLAN, **changes)


def test_plans_survive_json_and_what_is_none_is_no_plan(tmp_path: Path) -> None:
    import json

    assert FillPlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    for damage in ("", "{", "[]", '{"v": 99}', '{"v": 1}', json.dumps({**PLAN.to_json(), "ranks": 3})):
        (tmp_path / "plan").write_text(damage)
        assert FillPlan.read(tmp_path / "plan") is None
    assert FillPlan.read(tmp_path / "none") is None


def test_sweeping_keeps_what_is_named_and_forgets_runs_that_were_given_up(tmp_path: Path) -> None:
    import json
    import os

    pool = Pool.of(tmp_path)
    live, dead = pool.run(tmp_path / "a", 0), pool.run(tmp_path / "b", 0)
    for each, digest in ((live, "named"), (dead, "gone")):
        each.make()
        each.plan("data").write_text(json.dumps(replace(PLAN, urls=digest).to_json()))
        pool.urls(digest).write_bytes(b"x")
        os.utime(pool.urls(digest), (0, 0))
    os.utime(dead.path, (0, 0))
    pool.sweep(live.path)
    assert live.plans.is_dir()
    assert not dead.path.exists()
    assert [path.name for path in (pool.path / "urls").iterdir()] == ["named"]
    assert pool.path.stat().st_mode & 0o077 == 0


def test_a_pointer_leads_to_a_directory_only_while_it_is_there(tmp_path: Path) -> None:
    pointer = Pointer.of(tmp_path, 0)
    assert pointer.read() is None
    directory = FillDir(tmp_path / "cache" / "fill" / "runs" / "x")
    directory.make()
    pointer.point(directory)
    assert pointer.read() == directory
    directory.remove()
    assert pointer.read() is None
    pointer.point(None, {"hits": 3})
    assert (pointer.read(), pointer.last()) == (None, {"hits": 3})


def test_positions_advance_as_loaders_do() -> None:
    mine, at = course(), Position()
    for _ in range(20):
        stretch = mine.stretch(at, RECIPE.global_batch)
        assert stretch is not None
        at = advance(at, RECIPE.global_batch, RECIPE.usable)
        assert stretch.after == at
