"""What is made of the diary of many nodes: which worlds there were, and which of them trained at the same time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from namespaces.diary import Diary, at_once, overlap

if TYPE_CHECKING:
    from pathlib import Path


class Writer:
    """Workers as the tests' and benchmarks' scripts are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, world: str, size: int, rank: int, start: float, *steps: float) -> None:
        same = {"node": f"node{rank + 1}", "rank": rank, "size": size, "world": world}
        lines = [{"at": start, "what": "start", **same}]
        lines += [{"at": at, "what": "step", "step": number, **same} for number, at in enumerate(steps, 1)]
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "diary.jsonl")


def test_a_world_is_whole_when_all_its_workers_have_started(writer: Writer) -> None:
    diary = Diary(writer.path)
    assert diary.worlds() == []
    writer.write("a:1", 2, 0, 1.0, 3.0)
    assert diary.whole() is None
    writer.write("a:1", 2, 1, 2.0)
    world = diary.whole()
    assert world is not None
    assert (world.began, world.started, world.numbers, world.first_step) == (1.0, 2.0, [1, 2], None)
    writer.write("b:1", 1, 0, 4.0, 5.0)
    assert diary.whole(after=1.5, nodes=[2]) is None
    new = diary.whole(after=1.5, nodes=[1])
    assert new is not None
    assert new.first_step == 5.0


def test_a_line_that_is_half_written_waits(writer: Writer) -> None:
    writer.write("a:1", 1, 0, 1.0)
    text = writer.path.read_text()
    writer.path.write_text(text[:-10])
    diary = Diary(writer.path)
    assert diary.worlds() == []
    writer.path.write_text(text)
    assert len(diary.worlds()) == 1


@pytest.mark.parametrize(
    ("old", "new", "most", "seconds"),
    [
        ((1.0, 2.0), (2.5, 3.0), 1, 0.0),
        ((1.0, 2.0), (2.0, 3.0), 1, 0.0),
        ((1.0, 2.5), (2.0, 3.0), 2, 0.5),
        ((1.0, 9.0), (2.0, 3.0), 2, 1.0),
        ((1.0, 2.5), (), 1, 0.0),
    ],
)
def test_worlds_that_train_at_the_same_time(
    writer: Writer, old: tuple[float, ...], new: tuple[float, ...], most: int, seconds: float
) -> None:
    writer.write("a:1", 1, 0, 0.0, *old)
    writer.write("b:1", 1, 1, 0.5, *new)
    worlds = Diary(writer.path).worlds()
    assert at_once(worlds) == most
    assert max(0.0, overlap(worlds)) == seconds


def test_what_was_before_a_moment_does_not_count(writer: Writer) -> None:
    writer.write("a:1", 1, 0, 0.0, 1.0, 2.5)
    writer.write("b:1", 1, 1, 0.5, 2.0, 4.0)
    worlds = Diary(writer.path).worlds()
    assert at_once(worlds, since=2.6) == 1
    assert overlap(worlds, since=1.5, until=2.25) == 0.0
