from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_kit
import numpy as np
import psutil
import pytest
import torch
from conftest import NO_COMPILER, eventually
from data_kit import (
    GLOBAL_BATCH,
    SEED,
    STEPS,
    Augmented,
    Broken,
    N,
    Row,
    WorkerPid,
    failing_collate,
    failure,
    make,
    rows,
    train,
)
from torch.utils.data import Subset, get_worker_info

import ftrun
from ftrun.data.cautions import many_objects, tensor_bytes, too_little_shared_memory
from ftrun.data.feistel import Permutation
from ftrun.data.position import Position
from ftrun.data.workers import close_inherited
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@pytest.fixture(scope="module")
def uninterrupted() -> list[Row]:
    return train(1, 0, 4 * STEPS)[0]


@pytest.mark.slow
def test_spawned_workers(uninterrupted: list[Row]) -> None:
    loader = make(num_workers=1, multiprocessing_context="spawn", persistent_workers=False)
    assert rows(next(iter(loader))) == uninterrupted[:GLOBAL_BATCH]


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
    # Through the garbage collector they would, whenever that comes.
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
        _, alive = psutil.wait_procs(workers, timeout=60)
    finally:
        gc.enable()
    assert not alive


def test_an_error_in_collate_names_its_samples() -> None:
    kind, text = failure(iter(make(collate_fn=failing_collate, shuffle=False)))
    assert kind is ValueError
    assert "sample indices [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] of epoch 0" in text


def samples_of(loop: Iterable[torch.Tensor]) -> list[Row]:
    return [row for batch in loop for row in rows(batch)]


class Marked(Augmented):
    """Says which process loads; can be told to do something bad on one sample, once or always."""

    def __init__(self, n: int, marks: Path, at: int = -1, how: str = "") -> None:
        super().__init__(n)
        self.marks, self.at, self.how = marks, at, how

    def __getitem__(self, index: int) -> torch.Tensor:
        (self.marks / f"{os.getpid()}").touch()
        if index == self.at and not (self.how.startswith("once") and (self.marks / "done").exists()):
            (self.marks / "done").touch()
            if self.how.endswith("exit"):
                os._exit(3)
            os.kill(os.getpid(), signal.SIGSTOP if self.how.endswith("stop") else signal.SIGKILL)
        return super().__getitem__(index)

    def pids(self) -> set[int]:
        return {int(path.name) for path in self.marks.iterdir() if path.name.isdigit()}


@pytest.mark.parametrize("how", ["once kill", "once exit"])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_are_replaced_once_from_the_known_position(
    tmp_path: Path, how: str, persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    n = 5 * GLOBAL_BATCH
    whole = [row for batch in make(dataset=Augmented(n)) for row in rows(batch)]
    at = int(whole[30][0])
    dataset = Marked(n, tmp_path, at, how)
    loader = make(dataset=dataset, num_workers=2, persistent_workers=persistent)
    assert samples_of(loader) == whole
    before = dataset.pids()
    assert len(before) in (3, 4)  # one may have been replaced before its first sample
    said = "was killed by SIGKILL" if how == "once kill" else "ended with exit code 3"
    assert f"{said}, with at most" in caplog.text or f"{said};" in caplog.text
    assert "/dev/shm has" in caplog.text
    assert "replaced, once, and go on at the same position" in caplog.text
    assert loader.position == Position(1, 0)
    following = samples_of(loader)
    assert len(following) == n
    assert len(dataset.pids() - before) == (0 if persistent else 2)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_sample_that_always_kills_is_a_failure_that_says_all(tmp_path: Path, how: str) -> None:
    at = int(Permutation(N, SEED, 0).take(17, 18)[0])
    dataset = Marked(N, tmp_path, at, how)
    loader = make(dataset=dataset, num_workers=1)
    kind, text = failure(iter(loader))
    assert kind is RuntimeError
    assert "DataLoader worker (pid" in text
    assert "for the second time in this loop worker 0 (pid" in text
    assert ("was killed by SIGKILL" if how == "kill" else "ended with exit code 3") in text
    assert f"rank 0 of 1 was waiting for the batch at position {loader.position.samples} of epoch 0" in text
    assert loader.position <= Position(0, 12)
    eventually(lambda: all(gone(pid) for pid in dataset.pids()), 60, "the workers are gone")


def test_a_worker_that_dies_between_batches_is_no_error_of_the_training_loop(tmp_path: Path) -> None:
    dataset = Marked(100 * GLOBAL_BATCH, tmp_path)
    loader = make(dataset=dataset, num_workers=1)
    loop = iter(loader)
    next(loop)
    (worker,) = dataset.pids()
    os.kill(worker, signal.SIGKILL)
    # Torch's own way is an error in any line of the loop from here on.
    eventually(lambda: gone(worker), 60, "the worker is gone")
    assert rows(next(loop)) == rows(list(islice(iter(make(dataset=Augmented(dataset.n))), 2))[1])
    assert len(dataset.pids()) == 2


def test_a_worker_that_dies_between_two_loops_is_replaced(
    tmp_path: Path, uninterrupted: list[Row], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Marked(N, tmp_path)
    loader = make(dataset=dataset, num_workers=2)
    assert samples_of(loader) == uninterrupted[:48]
    before = dataset.pids()
    os.kill(max(before), signal.SIGKILL)
    eventually(lambda: any(gone(pid) for pid in dataset.pids()), 60, "the worker is gone")
    assert samples_of(loader) == uninterrupted[48:96]
    assert len(dataset.pids() - before) == 2


def test_a_stopped_worker_is_no_hang_where_there_is_a_timeout(tmp_path: Path) -> None:
    # In its first batch: torch waits without a limit for a worker that stops between a batch's message and its memory.
    dataset = Marked(N, tmp_path, int(Permutation(N, SEED, 0).take(0, 1)[0]), "stop")
    loader = make(dataset=dataset, num_workers=1, timeout=1)
    loop = iter(loader)  # torch's clock runs while the loop waits: by then the worker is there
    eventually(lambda: [pid for pid in dataset.pids() if stopped(pid)], 60, "the worker has stopped")
    kind, text = failure(loop)
    assert kind is RuntimeError
    assert "timed out after 1" in text
    (worker,) = dataset.pids()
    assert f"worker 0 (pid {worker}) is stopped (by SIGSTOP or a debugger)" in text
    eventually(lambda: gone(worker), 60, "the worker is gone")


class WithUrls(Broken):
    urls = tuple(f"s3://bucket/{number}.jpg" for number in range(N))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_file(workers: int) -> None:
    dataset = Subset(Subset(WithUrls(ValueError("bad pixels"), 40), range(20, 53)), range(0, 33, 2))
    loader = make(dataset=dataset, global_batch=4, shuffle=False, num_workers=workers)
    kind, text = failure(iter(loader))
    assert kind is ValueError
    assert "sample index 10 of epoch 0 (s3://bucket/40.jpg)" in text


def test_descriptors_of_devices_are_closed(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidiactl", "other"):
        (tmp_path / name).touch()
    with (
        (tmp_path / "nvidia0").open() as one,
        (tmp_path / "nvidiactl").open() as two,
        (tmp_path / "other").open() as it,
    ):
        child = os.fork()
        if child == 0:
            close_inherited(str(tmp_path / "nvidia"))
            open_here = [Path(f"/proc/self/fd/{each.fileno()}").exists() for each in (one, two, it)]
            os._exit(0 if open_here == [False, False, True] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [each.read() for each in (one, two, it)] == [""] * 3


class Paths(Augmented):
    def __init__(self, paths: Any) -> None:
        super().__init__()
        self.paths = paths


MANY = [str(number) for number in range(100_001)]


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (Paths(MANY), "Paths.paths is a list of 100,001 Python objects"),
        (Paths(dict.fromkeys(MANY)), "Paths.paths is a dict of 100,001"),
        (Paths(np.array(MANY, dtype=object)), "Paths.paths is a ndarray of 100,001"),
        (Subset(Paths(MANY), range(53)), "Paths.paths is a list"),
        (Subset(Paths([]), list(range(100_001))), "Subset.indices is a list"),
        (MANY, "the dataset is a list"),
        (Paths(np.array(MANY)), None),
        (Paths(MANY[:-1]), None),
        (Subset(Paths([]), range(100_001)), None),
    ],
)
def test_many_python_objects_and_forks_are_a_warning(dataset: Any, what: str | None) -> None:
    assert many_objects(dataset) is None if what is None else what in str(many_objects(dataset))


def test_a_warning_comes_where_workers_are_forked_and_from_rank_0_only() -> None:
    dataset = Paths(MANY)
    with pytest.warns(UserWarning, match="a list of 100,001 Python objects") as seen:
        make(2, 0, dataset=dataset, num_workers=1)
    assert seen[0].filename == data_kit.__file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(2, 1, dataset=dataset, num_workers=1)
        make(dataset=dataset)
        make(dataset=dataset, num_workers=1, multiprocessing_context="spawn")


def test_shared_memory_is_compared_with_what_a_batch_really_takes() -> None:
    batch = {"x": torch.zeros(1000), "more": [torch.zeros(10, dtype=torch.uint8), ("text", 3)]}
    assert tensor_bytes(batch) == 4010
    assert too_little_shared_memory(batch, 10, 40_100) is None
    assert too_little_shared_memory(batch, 10, None) is None
    caution = too_little_shared_memory(batch, 10, 40_099)
    assert caution is not None
    assert "10 batches of 4 KiB may be ready at a time, 39 KiB in all, and /dev/shm had 39 KiB free" in caution


def test_the_warning_comes_with_the_first_batch_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftrun.data.engine.shared_memory_free", lambda: 100)
    with pytest.warns(UserWarning, match="6 batches of 384 B may be ready at a time") as seen:
        list(make(num_workers=2, prefetch_factor=3))
    assert [warning.filename for warning in seen] == [__file__]


def test_an_error_for_lack_of_shared_memory_says_what_helps() -> None:
    # As torch says it in a worker.
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    kind, text = failure(iter(make(dataset=Broken(error, 20), num_workers=1, shuffle=False)))
    assert kind is RuntimeError
    assert "/dev/shm has" in text
    assert "Use fewer num_workers or a smaller prefetch_factor" in text


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
    eventually(lambda: gone(worker), 60, "the worker is gone")
    assert {int(batch[0]) for batch in islice(loop, 20)} != {worker}
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


def stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent by a Linux call")
@pytest.mark.parametrize(
    ("thread", "context"),
    [
        ("main", "default"),
        pytest.param("other", "default", marks=pytest.mark.slow),
        pytest.param("main", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_a_killed_trainer(tmp_path: Path, thread: str, context: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), thread, context],
        env={**os.environ, "PYTHONPATH": f"{Path(ftrun.__file__).parents[1]}{os.pathsep}{NO_COMPILER}"},
    )
    workers: set[int] = set()
    try:
        marks = [tmp_path / f"{index}.pid" for index in (0, 1, 2)]
        eventually(lambda: all(mark.exists() for mark in marks), 90, "both workers are busy")
        workers = {int(mark.read_text()) for mark in marks}
        assert len(workers) == 2
        assert trainer.pid not in workers
        assert not any(gone(pid) for pid in workers)
        trainer.kill()
        trainer.wait()
        eventually(lambda: all(gone(pid) for pid in workers), 60, "the workers are gone")
    finally:
        trainer.kill()
        trainer.wait()
        for pid in workers:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
