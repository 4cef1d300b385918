"""What a Session does without ftrun's launcher: under ``python train.py`` and under plain ``torchrun``.

Rank 0 stands in for the agent: it takes a run directory and an epoch, finds the commit to resume from, and tells
the others. The run directory is ``runs/<script>/<start time>``, so every start is a new run, as under
``ftrun train.py``; the restarts that torchrun makes belong to one run. ``FTRUN_RUN_DIR`` names a directory instead,
and a run in it continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import secrets
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ftrun import events, pulse, rundir
from ftrun.checkpoint import epochs, layout, resuming
from ftrun.checkpoint.keeper import takeover
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.watching import WatchedKeeper
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import ExitCode, WorkerContract
from ftrun.errors import FtrunError, UsageError
from ftrun.rundir import RUNS, RunDir
from ftrun.session import leaving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from filelock import BaseFileLock
    from torch.distributed import Store

    from ftrun.session.place import Place

VARIABLE = "FTRUN_RUN_DIR"

_KEY = "contract"
STORAGE_SECONDS = 1500.0
"""For how long a storage may be away before a save is given up; less than what the watch allows for saving."""
_FINISH_SECONDS = 30.0
_OTHERS = dt.timedelta(minutes=5)
_IN_ORDER = (None, 0, int(ExitCode.TRY_AGAIN))


@contextlib.contextmanager
def leading(place: Place, store: Store | None, environment: Mapping[str, str]) -> Iterator[WorkerContract]:
    """Stand in for a launcher: decide what it would have decided, and on rank 0 hold the run directory meanwhile.

    Raises:
        UsageError: the run directory or its checkpoints can't be used.
    """
    if place.rank != 0:
        with _kept(place, store, _obey(store)) as contract:
            yield contract
        return
    contract, lock = _publish(place, store, environment)
    begin = f"resumes from {contract.resume}" if contract.resume else "starts fresh"
    _say(f"run in {contract.run_dir}, {begin}")
    ended: BaseException | None = None
    try:
        with _kept(place, store, contract) as mine:
            yield mine
    except BaseException as error:
        ended = error
        raise
    finally:
        log = events.EventLog(RunDir(contract.run_path).events(), attempt=contract.attempt, rank=0)
        outcome = _outcome(ended)
        log.write(outcome)
        if outcome.outcome != "finished":
            _say(f"{outcome.outcome}; {VARIABLE}={contract.run_dir} and the same command continue")
        lock.release()


def _say(text: str) -> None:
    print(f"ftrun  {text}", file=sys.stderr, flush=True)


def _obey(store: Store | None) -> WorkerContract:
    if store is None:
        raise AssertionError("a rank above 0 has a store")
    text = bytes(store.get(_KEY)).decode()
    if text.startswith("!"):
        raise UsageError(text[1:])
    contract = WorkerContract.from_environment({WorkerContract.VARIABLE: text})
    if contract is None:
        raise AssertionError("rank 0 published a contract")
    return contract


@contextlib.contextmanager
def _kept(place: Place, store: Store | None, contract: WorkerContract) -> Iterator[WorkerContract]:
    """The contract as it is for one rank, with a directory of its own, and a keeper on each node."""
    directory = RunDir(contract.run_path).worker(contract.attempt, place.node, place.rank)
    directory.mkdir(parents=True, exist_ok=True)
    pulse.create(directory / "pulse")
    tier = Tier.of(contract.run_path, place.node)
    mine = dataclasses.replace(contract, node=place.node, worker_dir=str(directory), tier=str(tier.path))
    if place.local_rank != 0:
        try:
            yield mine
        finally:
            leaving.leave(place, store)
        return
    keeper = _keeper(tier, mine)
    try:
        yield mine
        _let_others_leave(place, store)
    except SystemExit as end:
        if end.code in _IN_ORDER:
            _let_others_leave(place, store)
        raise
    finally:
        if not keeper.finish(_FINISH_SECONDS):
            _say(f"a snapshot is not committed yet: it stays in {tier.path}, where the next start takes it up")


def _let_others_leave(place: Place, store: Store | None) -> None:
    if not leaving.let_others_leave(place, store, _OTHERS):
        _say(f"not all ranks of this node have left the Session after {_OTHERS}: this one goes without them")


def _keeper(tier: Tier, contract: WorkerContract) -> WatchedKeeper:
    tier.require()
    config = KeeperConfig(
        run_dir=contract.run_dir,
        run_id=contract.run_id,
        root=contract.root,
        storage_options=dict(contract.storage_options),
        local=contract.local,
        node=contract.node,
        keep_last=contract.keep_last,
        keep_every=None,
        drain_limit=None,
        parent=os.getpid(),
        timeout=STORAGE_SECONDS,
    )
    keeper = WatchedKeeper(tier, config)
    epoch = contract.epoch or 0
    keeper.begin(
        epochs.EpochRecord(
            epoch, contract.run_id, contract.since, contract.resume, socket.gethostname(), os.getpid(), ""
        )
    )
    return keeper


def _outcome(error: BaseException | None) -> events.RunEnded:
    if error is None:
        return events.RunEnded("finished", int(ExitCode.OK))
    if isinstance(error, SystemExit) and error.code == ExitCode.TRY_AGAIN:
        return events.RunEnded("stopped", int(ExitCode.TRY_AGAIN))
    return events.RunEnded("failed", int(ExitCode.FAILED))


def _publish(place: Place, store: Store | None, environment: Mapping[str, str]) -> tuple[WorkerContract, BaseFileLock]:
    try:
        made, lock = _lead(place, environment)
    except FtrunError as error:
        if store is not None:
            store.set(_KEY, f"!{error}")
        raise
    if store is not None:
        store.set(_KEY, made.to_environment()[WorkerContract.VARIABLE])
    return made, lock


def _lead(place: Place, environment: Mapping[str, str]) -> tuple[WorkerContract, BaseFileLock]:
    run_dir = _run_dir(environment)
    lock = rundir.hold(run_dir.path)
    try:
        return _take_over(run_dir, place), lock
    except BaseException:
        lock.release()
        raise


def _take_over(run_dir: RunDir, place: Place) -> WorkerContract:
    known = run_dir.exists()
    run_id = run_dir.identity()["run_id"] if known else _run_id(run_dir)
    if not known:
        run_dir.create({"schema_version": 1, "run_id": run_id, "ftrun": metadata.version("ftrun")})
    root = layout.Root.open(run_dir.checkpoints)
    point = resuming.choose(root, run_id, _tier(run_dir, place)).point
    name = str(point.name) if point is not None else None
    record = epochs.claim(root, run_id, fresh=False, parent=name)
    attempt = run_dir.next_attempt()
    made = WorkerContract(
        run_dir=str(run_dir.path),
        run_id=run_id,
        root=root.url,
        attempt=attempt,
        epoch=record.epoch,
        since=record.since,
        resume=name,
        resume_sealed=point is not None and point.sealed,
        start=secrets.token_hex(8),
        node=0,
        worker_dir="",
        alone=True,
    )
    _record(run_dir, made, place, continued=known, step=point.name.step if point is not None else 0)
    return made


def _tier(run_dir: RunDir, place: Place) -> Tier | None:
    """The memory tier, where all ranks are on this node; what a predecessor has left in it is ours from here on."""
    if place.local_world_size != place.world_size:
        return None
    tier = Tier.of(run_dir.path, place.node)
    if tier.path.is_dir():
        takeover.disown(tier)
    return tier


def _run_dir(environment: Mapping[str, str]) -> RunDir:
    given = environment.get(VARIABLE)
    if given:
        return RunDir(Path(given))
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
    return RunDir(Path.cwd() / RUNS / script / _start_time(environment))


def _start_time(environment: Mapping[str, str]) -> str:
    """When the run started. Under torchrun that is when its agent did, which its restarts have in common."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in environment
    process = psutil.Process(os.getppid() if under_torchrun else os.getpid())
    moment = dt.datetime.fromtimestamp(process.create_time()).astimezone()
    return f"{moment.strftime('%Y%m%d-%H%M%S')}-{process.pid}"


def _run_id(run_dir: RunDir) -> str:
    runs = Path.cwd() / RUNS
    return str(run_dir.path.relative_to(runs)) if run_dir.path.is_relative_to(runs) else run_dir.path.name


def _record(run_dir: RunDir, made: WorkerContract, place: Place, *, continued: bool, step: int) -> None:
    events.EventLog(run_dir.events()).write(
        events.RunStarted(
            run_id=made.run_id,
            command=list(sys.argv),
            pid=os.getpid(),
            host=socket.gethostname(),
            nproc=place.local_world_size,
            continued=continued,
            versions={name: metadata.version(name) for name in ("ftrun", "torch")},
        )
    )
    events.EventLog(run_dir.events(), attempt=made.attempt).write(
        events.AttemptStarted(
            epoch=made.epoch or 0,
            world_size=place.world_size,
            resume=made.resume,
            resume_step=step,
            pids={"0": os.getpid()},
        )
    )
