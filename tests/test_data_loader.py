from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

import ftrun
from ftrun.data.loader import DataLoader
from ftrun.data.order import Permutation
from ftrun.data.position import Position
from ftrun.data.randomness import preserved, sample_seed, seed_everything
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, GLOBAL_BATCH, SEED = 53, 12, 17
STEPS = 4  # in an epoch: 53 // 12
Row = tuple[float, ...]


class Augmented(Dataset[torch.Tensor]):
    """Each sample is its index and one draw from each of the three generators."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [random.random(), np.random.rand(), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([index, *draws], dtype=torch.float64)


class Batched(Augmented):
    """Also answers for many samples at once, as datasets with a fast path do."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Broken(Augmented):
    def __init__(self, error: Exception, at: int) -> None:
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            raise self.error
        return super().__getitem__(index)


class WorkerPid(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


def make(world: int = 1, rank: int = 0, **arguments: Any) -> DataLoader[torch.Tensor]:
    arguments = {"global_batch": GLOBAL_BATCH, "shuffle": True, "seed": SEED, **arguments}
    dataset = arguments.pop("dataset") if "dataset" in arguments else Augmented()
    return DataLoader(dataset, rank=rank, world_size=world, **arguments)


def endless(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def rows(batch: torch.Tensor) -> list[Row]:
    return [tuple(row) for row in batch.tolist()]


def train(
    world: int, workers: int, steps: int, state: dict[str, Any] | None = None, **arguments: Any
) -> tuple[list[Row], dict[str, Any]]:
    """What a run of some steps consumes, in the order of the global batches, and the state that it leaves."""
    loaders = [make(world, rank, num_workers=workers, **arguments) for rank in range(world)]
    for loader in loaders if state else ():
        loader.load_state_dict(state or {})
    streams = [endless(loader) for loader in loaders]
    seen: list[Row] = []
    for _ in range(steps):
        shares = [rows(next(stream)) for stream in streams]
        seen += [row for together in zip(*shares, strict=True) for row in together]
    for loader in loaders:
        loader.commit()
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1
    return seen, json.loads(states[0])


@pytest.fixture(scope="module")
def uninterrupted() -> list[Row]:
    return train(1, 0, 4 * STEPS)[0]


def indices(seen: list[Row]) -> list[int]:
    return [int(row[0]) for row in seen]


def test_the_uninterrupted_run_is_the_permutation(uninterrupted: list[Row]) -> None:
    usable = STEPS * GLOBAL_BATCH
    for epoch in range(4):
        part = indices(uninterrupted)[epoch * usable : (epoch + 1) * usable]
        assert part == Permutation(N, SEED, epoch).take(0, usable).tolist()


def test_draws_differ_between_samples_epochs_and_generators(uninterrupted: list[Row]) -> None:
    draws = [draw for row in uninterrupted for draw in row[1:]]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resumes_anywhere_under_any_world_and_workers(world: int, workers: int, uninterrupted: list[Row]) -> None:
    dice = random.Random(10 * world + workers)
    seen, state = train(world, workers, dice.randrange(1, 2 * STEPS))
    while len(seen) < len(uninterrupted):
        left = (len(uninterrupted) - len(seen)) // GLOBAL_BATCH
        more, state = train(dice.choice([1, 2, 3, 4]), 0, min(left, dice.randrange(1, 6)), state)
        seen += more
    assert seen == uninterrupted
    assert state["epoch"] == 4
    assert state["samples"] == 0


@pytest.mark.parametrize("first", [STEPS - 1, STEPS, STEPS + 1])
def test_resumes_around_the_edge_of_an_epoch_with_workers(first: int, uninterrupted: list[Row]) -> None:
    seen, state = train(2, 0, first)
    more, state = train(1, 2, 2, state, prefetch_factor=3)
    rest, _ = train(3, 0, 2, state)
    assert seen + more + rest == uninterrupted[: (first + 4) * GLOBAL_BATCH]


def test_every_resume_point_of_two_epochs(uninterrupted: list[Row]) -> None:
    for first in range(1, 2 * STEPS + 1):
        seen, state = train(1, 0, first)
        assert seen + train(4, 0, 3, state)[0] == uninterrupted[: (first + 3) * GLOBAL_BATCH]


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_see_the_epoch(workers: int, uninterrupted: list[Row]) -> None:
    loader = make(num_workers=workers)
    assert loader.persistent_workers == bool(workers)
    seen = [row for _ in range(3) for batch in loader for row in rows(batch)]
    assert seen == uninterrupted[: 3 * STEPS * GLOBAL_BATCH]
    assert loader.position == Position(3, 0)


def test_spawned_workers(uninterrupted: list[Row]) -> None:
    loader = make(num_workers=1, multiprocessing_context="spawn", persistent_workers=False)
    assert rows(next(iter(loader))) == uninterrupted[:GLOBAL_BATCH]


def test_a_dataset_that_answers_for_many_samples_at_once(uninterrupted: list[Row]) -> None:
    assert train(2, 0, STEPS, dataset=Batched())[0] == uninterrupted[: STEPS * GLOBAL_BATCH]
    plain = train(2, 0, STEPS, dataset=Batched(), sample_seeds=False)[0]
    assert indices(plain) == indices(uninterrupted[: STEPS * GLOBAL_BATCH])
    assert plain != uninterrupted[: STEPS * GLOBAL_BATCH]


def test_without_shuffle_the_order_is_the_dataset_s() -> None:
    assert indices(train(3, 0, STEPS, shuffle=False)[0]) == list(range(STEPS * GLOBAL_BATCH))


def test_another_seed_is_another_order_and_other_draws(uninterrupted: list[Row]) -> None:
    other = train(1, 0, STEPS, seed=18)[0]
    assert indices(other) != indices(uninterrupted[: len(other)])
    same_order = train(1, 0, STEPS, seed=18, shuffle=False)[0]
    assert set(same_order).isdisjoint(train(1, 0, STEPS, shuffle=False)[0])


def drawing_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    noise = [random.random(), np.random.rand(), float(torch.rand(()))]
    return torch.stack([*samples, torch.tensor([0.0, *noise], dtype=torch.float64)])


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_in_collate_depend_on_the_batch_alone(workers: int) -> None:
    whole = [rows(batch) for batch in make(collate_fn=drawing_collate)]
    loader = make(collate_fn=drawing_collate, num_workers=workers)
    loader.load_state_dict({**loader.state_dict(), "samples": GLOBAL_BATCH})
    assert [rows(batch) for batch in loader] == whole[1:]
    assert len({batch[-1] for batch in whole}) == STEPS


def random_states() -> list[Any]:
    numpy: Any = np.random.get_state()
    return [
        random.getstate(),
        str(numpy[0]),
        np.asarray(numpy[1]).tolist(),
        numpy[2:],
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_training_process_s_random_streams_are_left_alone(workers: int) -> None:
    before = random_states()
    loader = make(num_workers=workers, collate_fn=drawing_collate)
    for _ in range(2):
        assert len(list(loader)) == STEPS
    assert random_states() == before


def disturbing() -> list[torch.Tensor]:
    seed_everything(1)
    return []


def test_streams_come_back_after_a_failure() -> None:
    before = random_states()
    with pytest.raises(ValueError, match="ragged"), preserved():
        failing_collate(disturbing())
    assert random_states() == before
    with preserved():
        seed_everything(1)
        assert random_states() != before


def test_no_two_generators_share_a_stream() -> None:
    with preserved():
        seed_everything(sample_seed(0, 0, 0))
        numpy_words = np.random.randint(0, 2**32, 50, dtype=np.uint32).tolist()
        torch_words = (torch.empty(50, dtype=torch.int64).random_(0, 2**32)).tolist()
    assert set(numpy_words).isdisjoint(torch_words)


def test_a_batch_counts_when_the_next_is_asked_for_or_by_commit() -> None:
    loader = make()
    loop = iter(loader)
    next(loop)
    assert loader.position == Position(0, 0)
    loader.commit()
    loader.commit()
    assert loader.position == Position(0, 12)
    next(loop)
    assert loader.position == Position(0, 12)
    next(loop)
    assert loader.position == Position(0, 24)


def test_the_last_batch_of_an_epoch_commits_to_the_next_epoch() -> None:
    loader = make()
    for _ in loader:
        assert loader.epoch == 0
        loader.commit()
    assert loader.position == Position(1, 0)
    assert loader.epoch == 1
    assert len(loader) == STEPS


def test_a_state_after_the_last_batch_resumes_in_the_next_epoch(uninterrupted: list[Row]) -> None:
    loader = make()
    list(loader)
    fresh = make()
    fresh.load_state_dict(loader.state_dict())
    assert [row for batch in fresh for row in rows(batch)] == uninterrupted[48:96]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("commit", [False, True])
def test_leaving_a_loop_early(workers: int, commit: bool, uninterrupted: list[Row]) -> None:
    loader = make(num_workers=workers)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    if commit:
        loader.commit()
    start = (2 if commit else 1) * GLOBAL_BATCH
    assert [row for batch in loader for row in rows(batch)] == uninterrupted[start:48]


def test_looking_at_a_first_batch_moves_nothing(uninterrupted: list[Row]) -> None:
    loader = make()
    assert rows(next(iter(loader))) == rows(next(iter(loader))) == uninterrupted[:12]
    assert loader.position == Position()


def test_a_new_loop_ends_the_one_before() -> None:
    loader = make()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="this loop over the loader has ended"):
        next(first)


def test_loading_after_the_loop_began_is_refused() -> None:
    loader = make()
    state = loader.state_dict()
    iter(loader)
    with pytest.raises(UsageError, match="load the state before the loop"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dataset": Augmented(54)}, "n: was 53, now 54"),
        ({"dataset": Batched()}, "dataset: was 'Augmented/53', now 'Batched/53'"),
        ({"shuffle": False}, "order: was 'feistel6-v1', now 'none'"),
        ({"seed": 18}, "seed: was 17, now 18"),
        ({"global_batch": 24}, "global_batch: was 12, now 24"),
        ({"global_batch": 53, "tail": "error"}, "tail: was 'drop', now 'error'"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StateMismatch, match=text) as caught:
        make(**change).load_state_dict(make().state_dict())
    assert "--fresh" in str(caught.value)


def test_a_size_per_rank_keeps_the_first_global_batch(uninterrupted: list[Row]) -> None:
    seen, state = train(2, 0, 3, global_batch=None, batch_size=6)
    assert state["global_batch"] == 12
    # Eight ranks of six would want 48 samples of 53 in a step: the stored twelve can't be split over eight.
    more, _ = train(4, 0, 3, state, global_batch=None, batch_size=6)
    assert seen + more == uninterrupted[: 6 * GLOBAL_BATCH]
    with pytest.raises(UsageError, match=r"12 can't be split evenly over 8 ranks: .* 1, 2, 3, 4, 6, 12;"):
        make(8, global_batch=None, batch_size=6).load_state_dict(state)
    # Twelve ranks of six would want more than there is, and need not: the stored global batch counts.
    make(12, global_batch=None, batch_size=6).load_state_dict(state)
    with pytest.raises(UsageError, match="less than one global batch of 72"):
        iter(make(12, global_batch=None, batch_size=6))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset": Stream()}, "map-style .* __len__ and __getitem__"),
        ({"dataset": iter("ab")}, "map-style .* __len__ and __getitem__"),
        ({"dataset": Augmented(11)}, "11 samples, less than one global batch of 12.* at most 11"),
        ({"dataset": Augmented(0)}, "0 samples.* where the dataset gets its data"),
        ({"world": 5}, "12 can't be split evenly over 5 ranks: .* 1, 2, 3, 4, 6, 12;"),
        ({"world": 2, "rank": 2}, "rank 2 is not in a world of 2"),
        ({"global_batch": None}, "give one of global_batch"),
        ({"batch_size": 3}, "give one of global_batch"),
        ({"global_batch": 0}, "at least one sample, not 0"),
        ({"global_batch": None, "batch_size": -1}, "at least one sample, not -1"),
        ({"tail": "pad"}, "tail is 'drop' or 'error'"),
        ({"tail": "error"}, "last 5 of 53 samples"),
        ({"sampler": [1]}, "'sampler': .* use shuffle and seed"),
        ({"batch_sampler": [[1]]}, "'batch_sampler': .* use global_batch"),
        ({"drop_last": True}, "'drop_last': use tail"),
        ({"generator": torch.Generator()}, "'generator': use seed"),
        ({"prefetch": 3}, "'prefetch': .* prefetch_factor"),
        ({"in_order": False}, "in_order=False .* leave it out"),
    ],
)
def test_what_can_t_work_is_refused_with_a_way_out(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(**arguments)


def test_tail_error_accepts_data_that_fits() -> None:
    assert len(make(dataset=Augmented(48), tail="error")) == 4


def test_users_see_their_own_dataset_and_collate() -> None:
    dataset = Subset(Augmented(), range(30))
    loader = make(dataset=dataset, collate_fn=drawing_collate)
    assert loader.dataset is dataset
    assert loader.collate_fn is drawing_collate


def note_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.n = 1000 + worker_id  # type: ignore[attr-defined]


class Noted(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.n)


def test_the_user_s_worker_init_fn_works_on_the_user_s_dataset() -> None:
    loader = make(dataset=Noted(), num_workers=2, worker_init_fn=note_worker)
    assert {value for batch in loader for value in batch.tolist()} == {1000, 1001}


def failure(loop: Iterator[torch.Tensor]) -> tuple[type[Exception], str]:
    """How a loop ends: kind and text. The error itself would keep the loop, and its workers, from going away."""
    try:
        for _ in loop:
            pass
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("the loop ended well")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("bad pixels"), ValueError), (StopIteration("dry"), RuntimeError)]
)
def test_an_error_names_its_sample(workers: int, error: Exception, kind: type[Exception]) -> None:
    at = int(Permutation(N, SEED, 0).take(17, 18)[0])
    loader = make(dataset=Broken(error, at), num_workers=workers)
    loop = iter(loader)
    next(loop)
    kind_seen, text = failure(loop)
    assert kind_seen is kind
    assert f"sample index {at} of epoch 0" in text
    assert "position 12 of epoch 0" in text
    kind_seen, text = failure(loop)
    assert kind_seen is UsageError
    assert "goes on at the committed position" in text
    assert loader.position == Position(0, 12)


def test_workers_of_a_failed_loop_end_at_once() -> None:
    # Through the garbage collector they would, after 5 s of waiting.
    others = set(psutil.Process().children())
    loader = make(dataset=Broken(ValueError("bad pixels"), 20), shuffle=False, num_workers=1)
    loop = iter(loader)
    next(loop)
    workers = set(psutil.Process().children()) - others
    assert len(workers) == 1
    assert failure(loop)[0] is ValueError
    gc.disable()
    try:
        del loop
        _, alive = psutil.wait_procs(workers, timeout=2)
    finally:
        gc.enable()
    assert not alive


def failing_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    raise ValueError("ragged")


def test_an_error_in_collate_names_its_samples() -> None:
    kind, text = failure(iter(make(collate_fn=failing_collate, shuffle=False)))
    assert kind is ValueError
    assert "sample indices [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] of epoch 0" in text


def test_a_lost_worker_is_an_error_and_the_next_loop_has_new_ones() -> None:
    loader = make(dataset=WorkerPid(100_000), num_workers=1)
    loop = iter(loader)
    worker = int(next(loop)[0])
    os.kill(worker, signal.SIGKILL)
    kind, text = failure(loop)
    assert kind is RuntimeError
    assert "DataLoader worker (pid" in text
    assert str(worker) in text
    assert "rank 0 of 1 was waiting for the batch at position" in text
    position = loader.position
    batch = next(iter(loader))
    assert int(batch[0]) not in (worker, os.getpid())
    assert loader.position == position


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """A trainer that stops cleanly on signals, as a Session does; the signals that it has heard."""
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda got, _: heard.append(got)) for number in numbers]
    yield heard
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_workers_leave_interrupts_to_the_trainer_and_end_on_terminate(handled: list[int]) -> None:
    loader = make(dataset=WorkerPid(100_000), num_workers=1)
    loop = iter(loader)
    worker = int(next(loop)[0])
    os.kill(worker, signal.SIGINT)
    assert {int(batch[0]) for batch in islice(loop, 20)} == {worker}
    os.kill(worker, signal.SIGTERM)
    failure(loop)
    poll("the worker is gone", lambda: gone(worker), 5)
    assert handled == []


TRAINER = """
import os, pathlib, sys, threading, time
from ftrun.data.loader import DataLoader

class Busy:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        marks = pathlib.Path(sys.argv[1])
        (marks / f"{index}.tmp").write_text(str(os.getpid()))
        (marks / f"{index}.tmp").rename(marks / f"{index}.pid")
        if index % 2:
            time.sleep(600)         # worker 1 is inside a long read
        return bytes(4 << 20)       # worker 0 has results that don't fit the pipe and that nobody takes

def start():
    global loop
    context = None if sys.argv[3] == "default" else sys.argv[3]
    loop = iter(DataLoader(Busy(), global_batch=1, num_workers=2, multiprocessing_context=context))

if __name__ == "__main__":
    thread = threading.Thread(target=start)
    thread.start() if sys.argv[2] == "other" else start()
    time.sleep(600)
"""


def poll(what: str, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent by a Linux call")
@pytest.mark.parametrize(("thread", "context"), [("main", "default"), ("other", "default"), ("main", "forkserver")])
def test_no_worker_outlives_a_killed_trainer(tmp_path: Path, thread: str, context: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), thread, context],
        env={**os.environ, "PYTHONPATH": str(Path(ftrun.__file__).parents[1])},
    )
    workers: set[int] = set()
    try:
        marks = [tmp_path / f"{index}.pid" for index in (0, 1, 2)]
        poll("both workers are busy", lambda: all(mark.exists() for mark in marks), 40)
        workers = {int(mark.read_text()) for mark in marks}
        assert len(workers) == 2
        assert trainer.pid not in workers
        assert not any(gone(pid) for pid in workers)
        trainer.kill()
        trainer.wait()
        poll("the workers are gone", lambda: all(gone(pid) for pid in workers), 5)
    finally:
        trainer.kill()
        trainer.wait()
        for pid in workers:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
