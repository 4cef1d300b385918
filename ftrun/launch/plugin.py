"""ftrun inside stock torchrun, by torch's own entry point: ``torchrun --logs-specs ftrun --max-restarts 3 train.py``.

Torch asks a plug-in for log files right before it starts workers, and hands it the variables of each. That is room for

- numbered attempts in a run directory, whose logs no restart deletes, and everything still on the console;
- one decision for all ranks of where to resume: a Session takes it, with the attempt's number and fencing epoch;
  other scripts find the variables ``FTRUN_ATTEMPT`` and, if there is a commit, ``FTRUN_RESUME``, its directory.

The run directory is ``FTRUN_RUN_DIR``, else ``--log-dir``, else ``runs/<script>/<start time>``; one that exists
continues. Deciding about restarts, evidence, hang detection and standbys need ``ftrun`` as the launcher. With several
nodes torch gives plug-ins nothing to agree through: then only logs and ``FTRUN_RUN_DIR`` are provided, and a Session
settles the rest itself, as it does under torchrun alone.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import platform
import secrets
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std, to_map

from ftrun import error_file, events, pulse, rundir
from ftrun.checkpoint import epochs, layout, reader, resuming
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.watching import WatchedKeeper
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import ExitCode, WorkerContract
from ftrun.goodput import history
from ftrun.rundir import RUNS, RunDir, run_name, timestamp

if TYPE_CHECKING:
    from filelock import BaseFileLock

ATTEMPT, RESUME, RUN_DIR = "FTRUN_ATTEMPT", "FTRUN_RESUME", "FTRUN_RUN_DIR"

_KEEP = 3
_FINISH_SECONDS = 30.0

Environments = dict[int, dict[str, str]]


class AttemptLogs(LogsSpecs):
    """Torch's interface for log files, asked before every start of the workers. Main thread of torchrun's agent.

    Args:
        log_dir: run directory, if ``FTRUN_RUN_DIR`` doesn't say.
        redirects: streams that go to files only.
        tee: streams that go to files and the console; ``torchrun``'s default means all that aren't redirected.
        local_ranks_filter: local ranks that reach the console; None means all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        # Torch keeps one store for all attempts, and workers would meet the addresses of dead ones in it. Read by torch
        # when the nodes meet, after this.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        self._lead: _Lead | None = None
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        """The run directory, as far as it is known before the first start."""
        return str(self._root_log_dir or os.environ.get(RUN_DIR) or RUNS.absolute())

    def reify(self, envs: Environments) -> LogsDest:
        """Begin an attempt: complete the workers' variables and name their files.

        Raises:
            UsageError: the run directory or its checkpoints can't be used.
            NoValidCheckpoint: commits exist and none is whole.
        """
        if not envs:
            raise ValueError("torch names no worker")
        self._starts += 1
        if envs[0].get("GROUP_WORLD_SIZE", "1") != "1":
            return self._logs_only(envs)
        self._lead = self._lead or _Lead(_run_dir(self._root_log_dir), len(envs))
        contract = self._lead.begin(envs)
        directories = {}
        for local_rank, environment in envs.items():
            directories[local_rank] = self._lead.directory(contract, int(environment["RANK"]))
            pulse.create(directories[local_rank] / "pulse")
            told = dataclasses.replace(contract, worker_dir=str(directories[local_rank]))
            environment.update(told.to_environment())
            environment.update(_for_other_scripts(contract))
        return self._destination(envs, directories)

    def _logs_only(self, envs: Environments) -> LogsDest:
        """Several nodes: a directory of this node's own for each start, and the variable that a Session reads."""
        where = _run_dir(self._root_log_dir)
        node = where.path / "torchrun" / f"n{int(envs[0]['GROUP_RANK']):04d}-{socket.gethostname()}-{os.getpid()}"
        directories = {}
        for local_rank, environment in envs.items():
            directories[local_rank] = node / f"{self._starts:04d}" / f"r{int(environment['RANK']):05d}"
            directories[local_rank].mkdir(parents=True)
            if RUN_DIR in os.environ or self._root_log_dir:
                environment[RUN_DIR] = str(where.path)
        return self._destination(envs, directories)

    def _destination(self, envs: Environments, directories: dict[int, Path]) -> LogsDest:
        made = LogsDest()
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        for local_rank, directory in directories.items():
            error = str(directory / "error.json")
            made.error_files[local_rank] = envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = error
            made.stdouts[local_rank] = str(directory / "stdout.log")
            made.stderrs[local_rank] = str(directory / "stderr.log")
            shown = tee[local_rank] or ~redirects[local_rank] & Std.ALL
            if self._local_ranks_filter and local_rank not in self._local_ranks_filter:
                continue
            if shown & Std.OUT:
                made.tee_stdouts[local_rank] = made.stdouts[local_rank]
            if shown & Std.ERR:
                made.tee_stderrs[local_rank] = made.stderrs[local_rank]
        top = directories[0].parent
        for name in ("filtered_stdout", "filtered_stderr"):
            if hasattr(made, name):  # torch 2.10 and newer
                setattr(made, name, str(top / f"{name}.log"))
        return made


class _Lead:
    """Holds a run directory for one life of torchrun, and begins its attempts."""

    def __init__(self, run_dir: RunDir, workers: int) -> None:
        self._run_dir = run_dir
        self._lock: BaseFileLock = rundir.hold(run_dir.path)
        continued = run_dir.exists()
        self._run_id = str(run_dir.identity()["run_id"]) if continued else _run_id(run_dir)
        if not continued:
            run_dir.create({"schema_version": 1, "run_id": self._run_id, "ftrun": metadata.version("ftrun")})
        self._root = layout.Root.open(run_dir.checkpoints)
        self._last: WorkerContract | None = None
        self._keeper = _keeper(run_dir, self._run_id, self._root.url)
        events.mend(run_dir.events())
        self._say(self._started(workers, continued=continued))
        atexit.register(self._end)

    def begin(self, envs: Environments) -> WorkerContract:
        """Take the next epoch and attempt, and choose the commit."""
        self._note_corruption()
        self._keeper.claim()
        point = resuming.choose(self._root, self._run_id, self._keeper.tier).point
        name = str(point.name) if point is not None else None
        record = epochs.claim(self._root, self._run_id, fresh=False, parent=name)
        self._keeper.begin(record)
        self._last = WorkerContract(
            run_dir=str(self._run_dir.path),
            run_id=self._run_id,
            root=self._root.url,
            attempt=self._run_dir.next_attempt(),
            epoch=record.epoch,
            since=record.since,
            resume=name,
            node=0,
            worker_dir="",
            alone=True,
            agent=os.getpid(),
            tier=str(self._keeper.tier.path),
            start=secrets.token_hex(8),
            resume_sealed=point is not None and point.sealed,
        )
        step = point.name.step if point is not None else 0
        world_size = int(envs[0].get("WORLD_SIZE", len(envs)))
        self._say(events.AttemptStarted(record.epoch, world_size, name, step, pids={}), self._last.attempt)
        begin = f"resumes from step {step:,} ({name})" if name else "starts fresh"
        print(f"ftrun  attempt {self._last.attempt} in {self._run_dir.path}, {begin}", file=sys.stderr, flush=True)
        return self._last

    def directory(self, contract: WorkerContract, rank: int) -> Path:
        """Make the directory of a rank."""
        directory = self._run_dir.worker(contract.attempt, contract.node, rank)
        directory.mkdir(parents=True)
        return directory

    def _note_corruption(self) -> None:
        """A commit whose bytes turned out damaged while the last attempt read it is never chosen again."""
        if self._last is None:
            return
        for path in self._run_dir.attempt(self._last.attempt).glob("n*/r*/error.json"):
            error = error_file.read(path)
            if error is not None and error.kind == "corrupt_checkpoint" and error.attempt == self._last.resume:
                reader.mark_bad(self._root, error.attempt, error.message)

    def _started(self, workers: int, *, continued: bool) -> events.RunStarted:
        return events.RunStarted(
            run_id=self._run_id,
            command=list(sys.argv),
            pid=os.getpid(),
            host=socket.gethostname(),
            nproc=workers,
            continued=continued,
            versions={n: metadata.version(n) for n in ("ftrun", "torch")} | {"python": platform.python_version()},
        )

    def _say(self, event: events.Event, attempt: int = 0) -> None:
        events.EventLog(self._run_dir.events(), attempt=attempt).write(event)

    def _end(self) -> None:
        """Torchrun leaves: by an error, of which the interpreter keeps the last, or because the workers are done."""
        if not self._keeper.finish(_FINISH_SECONDS):
            where = self._keeper.tier.path
            print(f"ftrun  a snapshot is not committed yet: it stays in {where} for the next start", file=sys.stderr)
        if getattr(sys, "last_value", None) is not None:
            ended = events.RunEnded("failed", int(ExitCode.FAILED))
        else:
            done = history.load(self._run_dir).loop_ended
            ended = events.RunEnded("finished" if done else "left", int(ExitCode.OK))
        self._say(ended)
        self._lock.release()


def _keeper(run_dir: RunDir, run_id: str, root: str) -> WatchedKeeper:
    config = KeeperConfig(
        run_dir=str(run_dir.path),
        run_id=run_id,
        root=root,
        storage_options={},
        local="",
        node=0,
        keep_last=_KEEP,
        keep_every=None,
        drain_limit=None,
        parent=os.getpid(),
    )
    return WatchedKeeper(Tier.of(run_dir.path, 0), config)


def _for_other_scripts(contract: WorkerContract) -> dict[str, str]:
    told = {ATTEMPT: str(contract.attempt), RUN_DIR: contract.run_dir}
    if contract.resume is not None and not contract.resume_sealed:
        told[RESUME] = str(Path(contract.root) / layout.attempt_key(layout.AttemptName.of(contract.resume), "")).rstrip(
            "/"
        )
    return told


def _run_dir(log_dir: str | None) -> RunDir:
    given = os.environ.get(RUN_DIR) or log_dir
    return RunDir(Path(given) if given else Path.cwd() / RUNS / _script_name() / f"{timestamp()}-{os.getpid()}")


def _run_id(run_dir: RunDir) -> str:
    runs = Path.cwd() / RUNS
    return str(run_dir.path.relative_to(runs)) if run_dir.path.is_relative_to(runs) else run_dir.path.name


def _script_name() -> str:
    from torch.distributed.run import get_args_parser

    parsed: Any = get_args_parser().parse_known_args(sys.argv[1:])[0]
    return run_name(str(parsed.training_script))
