from __future__ import annotations

import math
import random
import re
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from iterable_kit import Choosy, Row, Run, Seeking, Sharded, StateOfIterator, Stream, Whole, WithState
from torch.utils.data import get_worker_info

from ftrun.data.iterable.datasets import is_iterable
from ftrun.data.loader import DataLoader
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS: dict[str, Callable[[], Any]] = {
    "skipping": lambda: Sharded(Stream),
    "seeking": lambda: Sharded(Seeking),
    "state": lambda: Sharded(WithState),
    "state of the iterator": lambda: Sharded(StateOfIterator),
    "filtering": lambda: Sharded(Choosy),
    "skipping, known": lambda: Sharded(Stream, known=True),
    "seeking, known": lambda: Sharded(Seeking, known=True),
    "state, known": lambda: Sharded(WithState, known=True),
}
STEPS = 40


def killed(kind: str, shards: int, workers: list[int], dice: random.Random, **options: Any) -> list[list[Row]]:
    """A run that is killed at random and goes on in another world, until it has made its steps."""
    seen: list[list[Row]] = []
    states = None
    while len(seen) < STEPS:
        run = Run(KINDS[kind](), dice.choice([1, 2, 3, 4]), dice.choice(workers), virtual_shards=shards, **options)
        run.resume(states, share=dice.random() < 0.8)
        seen += run.train(min(dice.randrange(1, 20), STEPS - len(seen)))
        states = run.states()
        run.close()
    return seen


def rolled() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize("shards", [16, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_exactly_in_any_world(kind: str, shards: int) -> None:
    whole = Run(KINDS[kind](), 1, 0, virtual_shards=shards).train(STEPS)
    assert killed(kind, shards, [0], rolled()) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_exactly_with_any_workers(kind: str) -> None:
    whole = Run(KINDS[kind](), 1, 0, virtual_shards=16).train(STEPS)
    assert killed(kind, 16, [1, 2, 2], rolled()) == whole


def test_epochs_that_are_cut_out_of_endless_shards() -> None:
    whole = Run(Sharded(), 1, 0, virtual_shards=16).train(STEPS)
    cut = {"epoch_samples": 24 * 7 + 5}
    run = Run(Sharded(), 1, 0, virtual_shards=16, **cut)
    assert run.train(STEPS) == whole
    assert run.states()[0]["epoch"] == STEPS // 7
    assert len(run.loaders[0]) == 7
    assert killed("skipping", 16, [0], rolled(), **cut) == whole


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shards", [1, 5, 16, 40])
def test_an_epoch_has_each_sample_once(shards: int, *, shuffle: bool) -> None:
    dice = rolled()
    lengths = [dice.choice([0, 1, 9, 30]) for _ in range(shards)]
    lengths[0] = 31
    total = sum(lengths)
    run = Run(Sharded(Stream, lengths, known=True), 2, 0, virtual_shards=shards, shuffle=shuffle)
    assert len(run.loaders[0]) == total // 24
    for epoch in range(2):
        rows = [row for batch in run.train(total // 24) for row in batch]
        assert len({row[0:3:2] for row in rows}) == len(rows) == total - total % 24
        assert {row[1] for row in rows} == {epoch}
        assert all(number < lengths[shard] for shard, _, number, *_ in rows)


def order_of(batches: list[list[Row]]) -> list[tuple[int, int]]:
    return [(row[0], row[2]) for batch in batches for row in batch]


def test_shuffling_is_another_order_of_shards_in_each_epoch() -> None:
    def epochs(**options: Any) -> list[list[tuple[int, int]]]:
        run = Run(Sharded(Stream, [12] * 16, known=True), 1, 0, virtual_shards=16, **options)
        return [order_of(run.train(8)) for _ in range(2)]

    assert epochs()[0] != epochs()[1]
    assert epochs() == epochs()
    assert epochs(seed=18)[0] != epochs()[0]
    plain = epochs(shuffle=False)
    assert plain[0] == plain[1]


def test_draws_belong_to_the_sample() -> None:
    rows = [row for batch in Run(Sharded(), 1, 0, virtual_shards=16).train(STEPS) for row in batch]
    assert len({row[3:] for row in rows}) == len({row[:3] for row in rows}) == len(rows)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_shard_is_opened_twice(world: int) -> None:
    dataset = Sharded(Stream, [30] * 16, known=True)
    run = Run(dataset, world, 0, virtual_shards=16)
    probed = len(dataset.opened)
    run.train(20)
    opened = dataset.opened[probed:]
    assert sorted(each.shard for each in opened) == list(range(16))
    assert sum(each.read for each in opened) == 480


class PidStream(Stream):
    def __iter__(self) -> Iterator[Row]:
        import os

        info = get_worker_info()
        yield from ((self.shard, os.getpid(), number, info) for number in range(self.length))


@pytest.mark.slow
def test_one_worker_reads_a_shard_and_thinks_that_it_is_alone() -> None:
    rows = [row for batch in Run(Sharded(PidStream, [50] * 16), 2, 2, virtual_shards=16).train(20) for row in batch]
    readers = {(row[0], row[1]) for row in rows}
    assert len(readers) == 16
    assert len({pid for _, pid in readers}) == 4
    assert {row[3] for row in rows} == {None}


def resumed_reading(kind: type[Stream], *, known: bool, share: bool = True) -> int:
    """Samples read for one batch after 60 of them, beyond those of the batch."""
    before = Run(Sharded(kind, [960] * 16, known=known), 2, 0, virtual_shards=16)
    before.train(60)
    dataset = Sharded(kind, [960] * 16, known=known)
    run = Run(dataset, 4, 0, virtual_shards=16).resume(before.states(), share=share)
    run.train(4)
    return sum(each.read for each in dataset.opened) - 4 * 24


def test_a_resume_reads_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftrun.data.iterable.fetcher._SHARE", math.inf)  # a state with each batch
    assert resumed_reading(Seeking, known=True) == 0
    assert resumed_reading(Seeking, known=False) == 0
    assert resumed_reading(WithState, known=True) == 0
    assert resumed_reading(WithState, known=False) == 0
    assert resumed_reading(Stream, known=True) == 60 * 24
    assert resumed_reading(WithState, known=True, share=False) > 100


def test_the_cost_of_skipping_is_said_before_it_begins(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0.0, 0.12)  # by which the 12 samples of a batch take 0.01 s each, whatever else the machine does
    monkeypatch.setattr("ftrun.data.iterable.fetcher.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    before = Run(Sharded(Stream, [960] * 16, known=True), 2, 0, virtual_shards=16)
    before.train(60)
    dataset = Sharded(Stream, [960] * 16, known=True)
    run = Run(dataset, 2, 0, virtual_shards=16).resume(before.states())
    assert not caplog.records
    reading = sum(each.read for each in dataset.opened)
    run.train(1)
    assert reading == 0
    messages = [each.getMessage() for each in caplog.records]
    assert len(messages) == 1, messages
    assert "rank 0 and, likewise, each other rank reads and drops 720 samples first, about 7 s" in messages[0]


def test_shards_that_ranks_must_share_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Run(Sharded(), 3, 0, virtual_shards=16).train(1)
    assert "16 shards can't be dealt out evenly to 3 ranks x 1 workers" in caplog.text
    found = re.search(r"What helps: (\d+) shards \(virtual_shards=\)$", caplog.text.strip())
    assert found
    caplog.clear()
    Run(Sharded(), 3, 0, virtual_shards=int(found[1])).train(1)
    assert not caplog.records


@pytest.mark.parametrize("shards", [4, 10, 12])
def test_two_ranks_need_not_share_shards(shards: int, caplog: pytest.LogCaptureFixture) -> None:
    Run(Sharded(Stream, [60] * shards, known=True), 2, 0, virtual_shards=shards).train(1)
    assert "dealt out" not in caplog.text


def whole(world: int, **options: Any) -> Run:
    return Run(Whole, world, options.pop("workers", 0), shuffle=False, **options)


def test_a_stream_without_shards_goes_on_in_the_same_world() -> None:
    all_batches = whole(2).train(STEPS)
    before = whole(2)
    seen = before.train(17)
    assert seen + whole(2).resume(before.states(), share=False).train(STEPS - 17) == all_batches
    with pytest.raises(StateMismatch, match="each of 2 ranks had read it by itself, and 3 ranks can't take that over"):
        whole(3).resume(before.states())


def test_a_stream_without_shards_has_one_worker() -> None:
    all_batches = whole(1).train(3)
    assert whole(1, workers=1).train(3) == all_batches
    with pytest.raises(UsageError, match=r"each worker would read all of it. Use num_workers=1"):
        whole(1, workers=2)


def broken(dataset: Any, **options: Any) -> None:
    Run(dataset, 1, 0, **options).train(10)


class Itself(Sharded):
    def shard(self, index: int, count: int) -> Any:
        return self


class Failing(Stream):
    def __iter__(self) -> Iterator[Row]:
        yield from super().__iter__()
        raise OSError("the mount went away")


def test_what_can_not_work_is_said() -> None:
    with pytest.raises(UsageError, match="can be read only once"):
        broken(iter(range(100)))
    with pytest.raises(UsageError, match=r"shard\(\) returned itself"):
        broken(Itself())
    with pytest.raises(UsageError, match="virtual_shards is a whole number from 1"):
        broken(Sharded(), virtual_shards=0)
    unsure = Sharded()
    unsure.shard_lengths = lambda count: [1, 2, 3]
    with pytest.raises(UsageError, match=r"4 shards are of the lengths \[1, 2, 3\]"):
        broken(unsure, virtual_shards=4)
    with pytest.raises(UsageError, match="leave epoch_samples out"):
        broken(Sharded(known=True), virtual_shards=4, epoch_samples=100)
    with pytest.raises(UsageError, match="has no samples"):
        broken(Sharded(Stream, [0] * 16), virtual_shards=16)
    with pytest.raises(UsageError, match="can't be cut into shards"):
        broken(Whole(0), virtual_shards=16)
    with pytest.raises(UsageError, match="Whole has none: leave it out and shuffle in the dataset"):
        broken(Whole(0), shuffle=True)
    with pytest.raises(UsageError, match="a set has an order of its own in each process"):
        broken({"a", "b"})


def test_a_shard_that_is_shorter_than_it_says() -> None:
    dataset = Sharded(Stream, [40] * 16, known=True)
    dataset.length = lambda shard: 40 if shard != 3 else 11  # type: ignore[method-assign]
    dataset.shard_lengths = lambda count: [40] * count
    with pytest.raises(UsageError, match="shard 3 of 16 ended after 11 samples") as caught:
        Run(dataset, 1, 0, virtual_shards=16).train(26)
    assert any("ftrun was reading lane" in note for note in caught.value.__notes__)


def test_an_error_in_a_shard_says_where() -> None:
    with pytest.raises(OSError, match="mount") as caught:
        broken(Sharded(Failing, [5] * 16), virtual_shards=16)
    assert any("after 5 samples of shard" in note for note in caught.value.__notes__)


def test_another_number_of_shards_is_refused_on_resume() -> None:
    before = Run(Sharded(), 1, 0, virtual_shards=16)
    before.train(3)
    with pytest.raises(StateMismatch, match="16 shards"):
        Run(Sharded(), 1, 0, virtual_shards=8).resume(before.states())


@pytest.mark.parametrize(
    "marks",
    [{"0@0.6": {"epoch": 0, "sample": -1, "turn": 0, "number": 6}}, {"x": {}}, {"0@0.6": None}, {"0": {"epoch": "0"}}],
)
def test_stored_marks_that_make_no_sense(marks: Any) -> None:
    before = Run(Sharded(), 1, 0, virtual_shards=16)
    before.train(3)
    state = before.states()[0]
    state["shards"]["marks"] = marks
    with pytest.raises(StateMismatch, match="makes no sense"):
        Run(Sharded(), 1, 0, virtual_shards=16).resume([state])


def test_what_is_iterable() -> None:
    assert is_iterable(Sharded())
    assert is_iterable(Whole(0))
    assert not is_iterable([1, 2, 3])


def test_a_loop_that_is_left_early_goes_on_from_what_was_committed() -> None:
    loader: DataLoader[Any] = DataLoader(Sharded(), global_batch=24, virtual_shards=16, collate_fn=list, seed=17)
    straight = Run(Sharded(), 1, 0, virtual_shards=16, shuffle=False).train(4)
    for batch in loader:
        if batch == straight[2]:
            break
    again = iter(loader)
    assert [next(again), next(again)] == straight[2:4]
