"""What the tests of the Session share: a directory of their own, and Sessions in it."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import ftrun
from ftrun import events, pulse
from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import WorkerContract
from ftrun.rundir import RunDir
from ftrun.session import callbacks, random_state
from ftrun.session.callbacks import Registry

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator

    from ftrun import Session

    E = TypeVar("E", bound=events.Event)

TOTAL = 22
EPOCH = 5  # steps: 32 samples in batches of 6


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory, an environment, callbacks, signal handlers and random streams of the test's own."""
    for name in list(os.environ):
        if name.startswith(("FTRUN_", "TORCHELASTIC_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FTRUN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    registry = Registry()
    monkeypatch.setattr(callbacks, "REGISTRY", registry)
    monkeypatch.setattr("ftrun.session.boundaries.REGISTRY", registry)
    monkeypatch.setattr("ftrun.session.contents.REGISTRY", registry)
    monkeypatch.setattr("ftrun.session.restoration.REGISTRY", registry)
    monkeypatch.setattr("ftrun.session.checkpoints.REGISTRY", registry)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    streams = random_state.capture()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are tiny here, and threads would only wait for each other
    yield
    torch.set_num_threads(threads)
    for each in tmp_path.iterdir():
        Tier.of(each, 0).remove()  # what a run that failed has left for its next start
    random_state.restore(streams)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def of(kind: type[E], run: str = "run") -> list[E]:
    return [each.event for each in events.read(RunDir(path_of(run)).events()) if isinstance(each.event, kind)]


def path_of(run: str) -> Path:
    return Path.cwd() / run


def committed(run: str = "run") -> list[int]:
    """Steps of the commits of a run, newest first."""
    return [each.name.step for each in reader.attempts(Root.open(RunDir(path_of(run)).checkpoints)) if each.manifest]


def open_session(run: str = "run", every: int | None = 5) -> contextlib.AbstractContextManager[Session]:
    os.environ["FTRUN_RUN_DIR"] = str(path_of(run))  # the fixture puts it back
    return ftrun.Session.open(every=every)


class Broken(Exception):
    """What the loops under test raise."""


def fall() -> None:
    raise Broken


def idle(ft: Session, total: int, at: dict[int, Callable[[], Any]] | None = None) -> None:
    for step in ft.steps(total=total):
        if at and step in at:
            at[step]()


@dataclass
class Launch:
    """What the launcher does around one attempt, as far as a worker can see."""

    run: RunDir
    monkeypatch: pytest.MonkeyPatch
    keepers: list[Keeper] = field(default_factory=list)

    def __call__(self, **changes: Any) -> WorkerContract:
        self.close()  # what the attempt before had sealed is committed
        if not self.run.exists():
            self.run.create({"run_id": "run"})
        root = Root.open(self.run.checkpoints)
        before = epochs.current(root)
        commit = reader.latest(root, "run", since=before.since).commit if before else None
        name = str(commit.name) if commit else None
        record = epochs.claim(root, "run", fresh=False, parent=name)
        attempt = self.run.next_attempt()
        directory = self.run.worker(attempt, 0, 0)
        directory.mkdir(parents=True)
        pulse.create(directory / "pulse")
        contract = WorkerContract(
            run_dir=str(self.run.path),
            run_id="run",
            root=str(root.path),
            attempt=attempt,
            epoch=record.epoch,
            since=record.since,
            resume=name,
            node=0,
            worker_dir=str(directory),
            tier=str(Tier.of(self.run.path, 0).path),
            **changes,
        )
        self._keep(contract, record)
        for variable, value in contract.to_environment().items():
            self.monkeypatch.setenv(variable, value)
        return contract

    def _keep(self, contract: WorkerContract, record: epochs.EpochRecord) -> None:
        config = KeeperConfig(
            run_dir=contract.run_dir,
            run_id="run",
            root=contract.root,
            storage_options={},
            local="",
            node=0,
            keep_last=contract.keep_last,
            keep_every=None,
            drain_limit=None,
            parent=os.getpid(),
        )
        self.keepers.append(Keeper(Tier(Path(contract.tier)), config))
        self.keepers[-1].begin_epoch(record)
        self.keepers[-1].ensure()

    def close(self) -> None:
        while self.keepers:
            assert self.keepers.pop().finish(60)

    def beat(self, contract: WorkerContract) -> pulse.Beat:
        beat = pulse.read(self.run.worker(contract.attempt, 0, 0) / "pulse")
        assert beat is not None
        return beat


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    made = Launch(RunDir(tmp_path / "run"), monkeypatch)
    yield made
    made.close()


def trained(ft: Session, total: int = 5, **objects: Any) -> None:
    ft.track(**objects)
    idle(ft, total)


class Augmented(Dataset[torch.Tensor]):
    """A sample, its index first, with noise from the three generators."""

    def __init__(self, n: int = 32) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.gauss(0, 1), np.random.standard_normal(), torch.randn(()).item()]
        return torch.tensor([float(index), (index % 7) / 7, (index % 3) / 3, *noise])


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return repr(one) == repr(other)
