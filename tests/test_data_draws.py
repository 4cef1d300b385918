"""What a sample draws is the same whether its generators are seeded for it or only watched."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from data_kit import SEED, drawing_collate, failure, make, random_states
from torch.utils.data import Dataset, Subset, default_collate

from ftrun.data import reading
from ftrun.data.frozen import frozen
from ftrun.data.generators import NumpyGenerator, PythonGenerator, TorchGenerator, generators
from ftrun.data.own_state import has_own_state
from ftrun.data.randomness import preserved, sample_seed, seed_everything
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, BATCH = 400, 10


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By which samples are quick or slow: it moves when a sample says so, and not when the machine has no time."""
    now = [0.0]
    monkeypatch.setattr(reading, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


class Function(Dataset[Any]):
    """A sample is a function of its index, and of what that function draws."""

    def __init__(self, function: Callable[[int], Any], n: int = N) -> None:
        self.function, self.n = function, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


class Together(Function):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Otherwise(Function):
    """Means something else by ``__getitems__``."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [-self[index] for index in indices]


def rarely(draw: Callable[[], float]) -> Callable[[int], float]:
    """Draws in one sample of fifty, most likely in none of those that are tried first."""
    return lambda index: draw() if index % 50 == 7 else float(index)


def a_whole_block() -> float:
    """As many words as the generators make at a time: how many are used up is the same before and after."""
    return float(
        np.random.randint(0, 2**32, 624, dtype=np.uint32).sum() + sum(random.getrandbits(32) for _ in range(624))
    )


def forked(seed: int | None) -> float:
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # without a visit to each accelerator
        return float(torch.rand(()))


def _numpy_state() -> Any:
    return np.random.get_state()


def by_a_seed(seed: int) -> float:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    return random.random() + np.random.rand() + float(torch.rand(()))


def particular(at: int) -> Callable[[int], float]:
    """Fails in one sample with any other seed than its own."""

    def function(index: int) -> float:
        if index == at and random.random() != random.Random(sample_seed(SEED, 0, at)).random():
            raise ValueError("another seed")
        return float(index)

    return function


FUNCTIONS: dict[str, Callable[[int], Any]] = {
    "nothing": float,
    "random": lambda index: random.random(),
    "gauss": lambda index: [random.gauss(0, 1) for _ in range(index % 3)][-1:] or [0.0],
    "numpy": lambda index: np.random.rand(),
    "torch": lambda index: torch.rand(2),
    "all": lambda index: random.random() + np.random.rand() + float(torch.rand(())),
    "random, rarely": rarely(random.random),
    "numpy, rarely": rarely(np.random.rand),
    "normal, rarely": rarely(np.random.randn),
    "torch, rarely": rarely(lambda: float(torch.rand(()))),
    "one always and one rarely": lambda index: random.random() + rarely(np.random.rand)(index),
    "whole blocks, rarely": rarely(a_whole_block),
    "a seed of its own": by_a_seed,
    "the same seed each time": lambda index: random.random() + by_a_seed(3),
    "the same seed, and nothing drawn": lambda index: random.seed(0) or float(index),
    "torch's seed": lambda index: torch.initial_seed() % 1000,
    "NumPy's seed": lambda index: int(_numpy_state()[1][0]),
    "Python's state": lambda index: random.getstate()[1][0],  # the same after any seed
    "how many words NumPy has used": lambda index: _numpy_state()[2],
    "how many words torch has used": lambda index: torch.get_rng_state()[8:24].tolist(),
    "what is in reserve": lambda index: random.getstate()[2],
    "a draw that is taken back": lambda index: forked(None),
    "a fork with a seed of its own": forked,
    "particular early": particular(12),
    "particular late": particular(303),
    "another kind of sample": lambda index: (index, {"x": np.float32(random.random()), "y": ["z", None][: index % 2]}),
}
DATASETS: dict[str, Dataset[Any]] = {name: Function(function) for name, function in FUNCTIONS.items()}
DATASETS["together"] = Together(float)
DATASETS["together, drawing rarely"] = Together(FUNCTIONS["torch, rarely"])
DATASETS["something else together"] = Otherwise(float)


def by_the_book(dataset: Any, collate: Callable[[list[Any]], Any], epoch: int = 0) -> Iterator[Any]:
    """Every batch of an epoch, with all generators seeded before each sample and before each batch."""
    for first in range(0, N, BATCH):
        samples = []
        for index in range(first, first + BATCH):
            seed_everything(sample_seed(SEED, epoch, index))
            samples.append(dataset[index])
        seed_everything(sample_seed(SEED, epoch, first, "collate"))
        yield collate(samples)


def loaded(dataset: Any, workers: int, **arguments: Any) -> Iterator[Any]:
    return iter(make(dataset=dataset, global_batch=BATCH, shuffle=False, num_workers=workers, **arguments))


@pytest.mark.parametrize("name", DATASETS)
def test_samples_are_what_they_are_by_the_book(name: str) -> None:
    with preserved():
        seed_everything(1)
        random.gauss(0, 1), np.random.randn(), torch.randn(())  # there is a number in reserve
        before = random_states()
        seen = [frozen(list(batch)) for batch in loaded(DATASETS[name], 0, collate_fn=list)]
        assert random_states() == before
        assert seen == [frozen(batch) for batch in by_the_book(DATASETS[name], list)]


@pytest.mark.parametrize("name", ["nothing", "torch", "normal, rarely", "torch's seed", "together, drawing rarely"])
def test_so_they_are_in_workers(name: str) -> None:
    seen = [frozen(batch) for batch in loaded(DATASETS[name], 2, collate_fn=drawing_collate_of_anything)]
    with preserved():
        assert seen == [frozen(batch) for batch in by_the_book(DATASETS[name], drawing_collate_of_anything)]


def drawing_collate_of_anything(samples: list[Any]) -> Any:
    return default_collate(samples), drawing_collate([])


def test_a_trainer_that_draws_meanwhile_changes_nothing_and_misses_nothing() -> None:
    def trained(batches: Iterator[Any]) -> tuple[list[Any], list[float]]:
        seed_everything(5)
        pairs = [(frozen(batch), random.gauss(0, 1) + np.random.randn() + float(torch.randn(()))) for batch in batches]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    with preserved():
        alone = trained(iter([torch.tensor(0)] * (N // BATCH)))[1]
        for name in ("nothing", "one always and one rarely", "normal, rarely"):
            seen, drawn = trained(loaded(DATASETS[name], 0))
            assert drawn == alone
            assert seen == [frozen(batch) for batch in by_the_book(DATASETS[name], default_collate)]


def fails_by_chance(index: int) -> int:
    if index > 250 and random.random() < 0.1:
        raise ValueError("unlucky")
    return index


def test_a_sample_that_fails_by_chance_fails_where_it_does_by_the_book() -> None:
    def seen(batches: Iterator[Any]) -> tuple[int, tuple[type[Exception], str]]:
        count = 0

        def counted() -> Iterator[Any]:
            nonlocal count
            for batch in batches:
                count += 1
                yield batch

        end = failure(counted())
        return count, end

    with preserved():
        count, _ = seen(by_the_book(Function(fails_by_chance), list))
    ours, (kind, text) = seen(loaded(Function(fails_by_chance), 0))
    assert (ours, kind) == (count, ValueError)
    assert "sample index 2" in text


def fails(index: int) -> float:
    if index == 303:
        raise ValueError("bad pixels")
    return float(index)


@pytest.mark.parametrize("kind", [Function, Together])
def test_a_sample_that_fails_is_named(kind: type[Function]) -> None:
    assert "sample index 303 of epoch 0" in failure(loaded(kind(fails), 0))[1]


class Counting(Function):
    """Counts how often each sample is read, and notes the seed that torch's generator has then.

    Samples take so many seconds by a clock, where there is one.
    """

    def __init__(self, draws: int = -1, seconds: float = 0.0, clock: list[float] | None = None) -> None:
        super().__init__(float)
        self.draws, self.seconds, self.clock = draws, seconds, clock
        self.reads: Counter[int] = Counter()
        self.seeds: dict[int, int] = {}

    def __getitem__(self, index: int) -> float:
        self.reads[index] += 1
        self.seeds[index] = torch.initial_seed()
        if self.clock is not None:
            self.clock[0] += self.seconds
        if index == self.draws:
            random.random()
        return float(index)


def test_what_is_known_to_draw_nothing_is_not_seeded() -> None:
    dataset = Counting()
    assert len(list(loaded(dataset, 0))) == N // BATCH
    assert len(dataset.reads) == N
    twice = [index for index, count in dataset.reads.items() if count > 1]
    assert len(twice) == 16
    end = (max(twice) // BATCH + 1) * BATCH
    assert all(dataset.seeds[index] == sample_seed(SEED, 0, index) for index in range(end))
    assert {dataset.seeds[index] for index in range(end, N)} == {torch.initial_seed()}


def test_once_it_draws_it_is_seeded_ever_after() -> None:
    dataset = Counting(draws=205)
    loader = make(dataset=dataset, global_batch=BATCH, shuffle=False)
    list(loader)
    again = [index for index, count in dataset.reads.items() if count > 1]
    assert len(again) == 16 + BATCH
    assert dataset.seeds[204] == sample_seed(SEED, 0, 204)
    dataset.reads.clear()
    list(loader)
    assert dataset.reads == Counter(range(N))
    assert all(dataset.seeds[index] == sample_seed(SEED, 1, index) for index in range(N))


def test_samples_that_take_long_are_read_once(clock: list[float]) -> None:
    dataset = Counting(seconds=0.003, clock=clock)
    for _ in zip(range(8), loaded(dataset, 0), strict=False):
        pass
    assert set(dataset.reads.values()) == {1}
    assert all(dataset.seeds[index] == sample_seed(SEED, 0, index) for index in dataset.reads)


def test_samples_that_are_slow_in_the_first_epoch_alone_are_tried_in_the_second(clock: list[float]) -> None:
    dataset = Counting(seconds=0.003, clock=clock)
    dataset.n = 60
    loader = make(dataset=dataset, global_batch=BATCH, shuffle=False)
    list(loader)
    assert set(dataset.reads.values()) == {1}
    dataset.seconds = 0.0
    list(loader)
    assert sum(count == 3 for count in dataset.reads.values()) == 16
    assert dataset.seeds[59] == torch.initial_seed()


class Holding(Counting):
    """Also holds something."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class Late(Counting):
    """Makes a generator with its first sample."""

    rng: random.Random | None = None

    def __getitem__(self, index: int) -> float:
        self.rng = self.rng or random.Random(torch.initial_seed())
        return super().__getitem__(index)


def enclosing(held: Any) -> Callable[[], Any]:
    return lambda: held


OWN = {
    "a generator": np.random.default_rng(3),
    "one deep inside": [{"steps": (Holding([functools.partial(round, 1.5, random.Random(3))]),)}],
    "one of torch's in a closure": enclosing(torch.Generator()),
    "one of a method": random.Random(3).random,
    "an iterator": itertools.count(),
}


@pytest.mark.parametrize("name", [*OWN, "one made late"])
def test_what_draws_from_a_generator_of_its_own_is_read_once(name: str) -> None:
    dataset = Holding(OWN[name]) if name in OWN else Late()
    for each in (dataset, Subset(dataset, range(N))):
        dataset.reads.clear()
        assert len(list(loaded(each, 0))) == N // BATCH
        assert dataset.reads == Counter(range(N))


def test_what_is_no_state_of_ones_own() -> None:
    circle: list[Any] = [random.random, np.random.rand, torch.default_generator, random, np, enclosing, io.BytesIO()]
    circle.append(circle)
    assert not has_own_state(Holding([circle, random.SystemRandom(), np.zeros(3), object(), range(5), Function(float)]))


class Interrupted(Counting):
    def __getitem__(self, index: int) -> float:
        if index == 17 and not self.reads[index]:
            self.reads[index] += 1
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_ctrl_c_neither_loses_a_batch_nor_ends_the_search() -> None:
    dataset = Interrupted()
    loader = make(dataset=dataset, global_batch=BATCH, shuffle=False)
    loop = iter(loader)
    first = next(loop)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    with pytest.raises(UsageError, match="this loop over the loader has ended"):
        next(loop)
    assert torch.cat([first, *loader]).tolist() == list(range(N))
    assert dataset.seeds[N - 1] == torch.initial_seed()  # it draws nothing, and isn't seeded any more


# ---------------------------------------------------------------- the generators


DRAWS: list[tuple[str, Callable[[], Any]]] = [
    ("random", random.random),
    ("gauss", lambda: random.gauss(0, 1)),
    ("bits", lambda: [random.getrandbits(32) for _ in range(624)]),
    ("rand", np.random.rand),
    ("randn", np.random.randn),
    ("randint", lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32)),
    ("torch", lambda: torch.rand(())),
    ("torch normal", lambda: torch.randn(())),
    ("torch words", lambda: torch.empty(624, dtype=torch.int64).random_(0, 2**32)),
]


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("reserve", [0, 1])
def test_a_draw_moves_one_generator_and_can_be_undone(public: bool, reserve: int) -> None:
    python, numpy = PythonGenerator(), NumpyGenerator()
    every: list[Any] = [python, numpy, TorchGenerator()]
    [each.state() for each in every]
    if public:
        python._words = numpy._words = None
    with preserved():
        seed_everything(7)
        for _ in range(reserve):
            random.gauss(0, 1), np.random.randn(), torch.randn(())
        for place, (name, draw) in enumerate(DRAWS):
            before, whole = [each.state() for each in every], random_states()
            assert [each.state() for each in every] == before
            first = draw()
            moved = [each.state() != state for each, state in zip(every, before, strict=True)]
            assert moved == [place // 3 == number for number in range(3)], name
            for each, state in zip(every, before, strict=True):
                each.put_back(state)
            assert random_states() == whole
            assert np.array_equal(draw(), first)


def test_the_default_device_changes_nothing() -> None:
    dataset = DATASETS["how many words torch has used"]
    with preserved():
        seed_everything(1)
        torch.randn(())
        before = random_states()
        with torch.device("meta"):
            seen = [frozen(batch) for batch in loaded(dataset, 0, collate_fn=list)]
        assert random_states() == before
        assert seen == [frozen(batch) for batch in by_the_book(dataset, list)]


def test_states_lie_where_they_are_read() -> None:
    python, numpy, _ = generators()
    numpy.state()
    assert python._words is not None  # type: ignore[attr-defined]
    assert numpy._words is not None  # type: ignore[attr-defined]


def test_a_replaced_twister_is_an_error_that_says_so() -> None:
    of_numpy: Any = np.random
    mine, before = of_numpy.get_bit_generator(), of_numpy.get_state()
    of_numpy.set_bit_generator(np.random.PCG64(1))
    try:
        text = failure(loaded(Function(float), 0))[1]
    finally:
        of_numpy.set_bit_generator(mine)
        of_numpy.set_state(before)
    assert "is a PCG64 now" in text
    assert list(loaded(Function(float), 0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (torch.tensor(1), torch.tensor(1, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (np.array([0.0]), np.array([-0.0])),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_what_is_not_the_same(one: Any, other: Any) -> None:
    assert frozen(one) != frozen(other)
    assert frozen([one]) == frozen([one])


def test_a_frozen_sample_stays_what_it_is() -> None:
    value = {"x": torch.full((3,), float("nan")).to(torch.bfloat16), "y": np.zeros(2), "z": float("nan")}
    before = frozen(value)
    assert frozen(value) == before
    value["x"][1] = 0.0  # type: ignore[index]
    assert frozen(value) != before


@pytest.mark.parametrize("value", [object(), {1}, np.array([object()]), torch.zeros(2).to_sparse()])
def test_what_can_t_be_compared(value: Any) -> None:
    with pytest.raises(TypeError, match="can't be compared"):
        frozen(value)
