"""What a command line means, before anything happens: ``ftrun run`` is ``plan`` and then ``execute(plan)``.

``--dry-run`` prints the same object.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint import common, layout, reader
from ftrun.checkpoint.storage.base import UnreachableError
from ftrun.config import origins
from ftrun.config.load import JobFile, load_job, to_json
from ftrun.config.units import parse_size
from ftrun.contract import WorkerContract
from ftrun.errors import CheckpointError, ConfigError, NoValidCheckpoint, UsageError
from ftrun.goodput import history
from ftrun.launch import nodes_apart, nodes_choice
from ftrun.launch.policy import Limits
from ftrun.launch.slow_root import told_if_slow
from ftrun.rundir import RUNS, RunDir, is_free, run_name, timestamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.checkpoint.storage.retry import Patience
    from ftrun.config.job import LaunchValue
    from ftrun.config.origins import Resolved
    from ftrun.launch.options import CommandLine, LaunchParser


_OF_ONE_PROCESS = frozenset({"memory"})


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that is decided before the first process starts.

    Attributes:
        run_dir: where the run lives.
        run_id: its identity.
        root: checkpoint root.
        job: the job as understood.
        launch: torchrun's options, every one, with the origin of its value.
        script: script, module or command.
        script_args: what follows it.
        named: the same command finds this run again: it has a name or a directory.
        fresh: start over.
        continues: the run directory is there already.
        finished: its run has reached its total.
        resume: name of the commit that would be resumed from now, or None.
        limits: restart policy.
        contract: what the workers are told, but for what each attempt adds.
        node_name: what this node is called; empty before its launcher holds the run directory.
    """

    run_dir: RunDir
    run_id: str
    root: str
    job: JobFile
    launch: dict[str, Resolved]
    script: str
    script_args: list[str]
    named: bool
    fresh: bool
    continues: bool
    finished: bool
    resume: str | None
    limits: Limits
    contract: WorkerContract
    node_name: str = ""

    @property
    def namespace(self) -> argparse.Namespace:
        """The options as torch's own functions take them."""
        values = {name: resolved.value for name, resolved in self.launch.items()}
        return argparse.Namespace(**values, training_script=self.script, training_script_args=list(self.script_args))

    @property
    def grace(self) -> float:
        """Seconds that workers get to leave in order."""
        return self.job.config.signals.grace.total_seconds()

    def open_root(self, patience: Patience | None = None) -> layout.Root:
        """The checkpoint root.

        Args:
            patience: how long each request of a remote one is tried; about two minutes if left out.

        Raises:
            UsageError: its driver is missing, or it can't be used.
        """
        return layout.Root.open(self.root, self.job.config.checkpoint.options, patience)

    @property
    def shared_by_nodes(self) -> bool:
        """Whether several launchers, on several nodes, work on this run."""
        return nodes_choice.may_be_several(self.launch)

    @property
    def shares_run_dir(self) -> bool:
        """Whether all launchers of the run work in one run directory; otherwise each node has its own."""
        return self.job.config.run_dir.shared or not self.shared_by_nodes

    @property
    def takes_a_free_name(self) -> bool:
        """Whether it goes by the second of its start: one that began in the same second may have been faster."""
        return not self.named and not self.shared_by_nodes

    @property
    def ours(self) -> bool:
        """Whether nodes meet through ftrun's own rendezvous."""
        return nodes_choice.is_ours(self.launch)

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON document, for ``--dry-run --json``."""
        return {
            "schema_version": 1,
            "run_dir": str(self.run_dir.path),
            "run_id": self.run_id,
            "shared_run_dir": self.shares_run_dir,
            "checkpoint_root": self.root,
            "storage_options": dict(self.job.config.checkpoint.options),
            "script": self.script,
            "script_args": self.script_args,
            "state": "finished" if self.finished else "continues" if self.continues else "fresh",
            "resume": self.resume,
            "launch": {k: {"value": r.value, "origin": r.origin} for k, r in self.launch.items()},
            "job": to_json(self.job),
        }


def make(line: CommandLine, parser: LaunchParser, environment: Mapping[str, str], *, cwd: Path) -> LaunchPlan:
    """Understand a command line. Reads files, writes nothing.

    Raises:
        UsageError: anything that can't be started; the message says what to change.
    """
    job = load_job(line.job_file, line.sets, lambda options: check_launch(parser, options))
    launch = _launch_options(line, parser, job, environment)
    script, args, module = _script(line, job)
    if module:
        launch["module"] = origins.Resolved(True, job.origin(("module",)))
    nodes_choice.require_usable(launch)
    _check_script(script, launch, cwd)
    run_dir, run_id = _run_dir(line, job, launch, script, cwd)
    given_root = job.config.checkpoint.root
    root = _root(given_root, job.config.checkpoint.options) if given_root else str(run_dir.checkpoints)
    opened = layout.Root.open(root, job.config.checkpoint.options)
    apart = nodes_choice.may_be_several(launch) and not job.config.run_dir.shared
    if apart:
        nodes_apart.require_possible(launch, run_dir, opened if given_root else None, fresh=line.fresh)
    # A directory that ftrun didn't make is refused with --fresh too: it must not be moved aside.
    continues = run_dir.exists() and not line.fresh
    named = line.name is not None or job.config.name is not None
    if continues:
        run_id = _identity(run_dir, run_id, named=named)
    past = history.load(run_dir) if continues else None
    resume = None if line.fresh else _resume(opened, run_id, past)
    # A directory that was one of several nodes' own doesn't know the end of the run, of one node now or not.
    own = apart or (continues and not run_dir.identity().get("shared_run_dir", True))
    finished = not line.fresh and (_is_finished(opened, run_id) if own else past is not None and past.finished)
    return LaunchPlan(
        run_dir=run_dir,
        run_id=run_id,
        root=root,
        job=job,
        launch=launch,
        script=script,
        script_args=args,
        named=named or line.run_dir is not None or _named_by_id(launch),
        fresh=line.fresh,
        continues=continues,
        finished=finished,
        resume=resume,
        limits=_limits(line, job, launch),
        contract=_contract(line, job, run_dir, run_id, root),
    )


def check_launch(parser: LaunchParser, options: Mapping[str, LaunchValue]) -> dict[str, str]:
    """What torch's parser has against the options of a job file, by name."""
    problems = {}
    for name, value in options.items():
        if name not in parser.names:
            begins = [each for each in parser.names if each.startswith(name)]
            close = begins[:1] or difflib.get_close_matches(name, parser.names, n=1)
            problems[name] = "no such option of torchrun" + (f"; did you mean '{close[0]}'?" if close else "")
            continue
        try:
            parser.convert(name, list(value) if isinstance(value, tuple) else value)
        except ValueError as error:
            problems[name] = str(error)
    return problems


def _launch_options(
    line: CommandLine, parser: LaunchParser, job: JobFile, environment: Mapping[str, str]
) -> dict[str, Resolved]:
    defaults = parser.defaults()
    variables = {
        name: origins.Resolved(defaults[name], f"environment PET_{name.upper()}")
        for name in parser.from_environment(environment)
    }
    merged = origins.merge(line.launch, variables, job.launch_options(), defaults)
    return {
        name: origins.Resolved(_converted(parser, name, resolved.value), resolved.origin)
        for name, resolved in merged.items()
    }


def _converted(parser: LaunchParser, name: str, value: Any) -> Any:
    return parser.convert(name, list(value) if isinstance(value, tuple) else value)


def _script(line: CommandLine, job: JobFile) -> tuple[str, list[str], bool]:
    """The script, its arguments, and whether the job file names it as a module. The command line wins, whole."""
    if line.script is not None:
        return line.script, line.script_args, False
    target = job.config.script or job.config.module
    if target is None:
        where = f"{job.path} names no script or module, and neither does" if job.path else "no training script on"
        raise ConfigError(
            [f"ftrun: {where} the command line.", "Type for example: ftrun --nproc 2 train.py, or ftrun -c job.yaml"]
        )
    return target, list(job.config.args), job.config.module is not None


def _check_script(script: str, launch: Mapping[str, Resolved], cwd: Path) -> None:
    if launch["module"].value:
        if launch["no_python"].value:
            raise ConfigError(["ftrun: --no-python and --module exclude each other; leave one of them out."])
        return
    if launch["no_python"].value:
        if shutil.which(script) is None:
            raise UsageError(f"no command {script!r} on the PATH. Check the spelling, or give its full path.")
        return
    path = cwd / script
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(f"{script} looks like a job file: ftrun -c {script}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(
            f"{script} is a directory without a __main__.py, not a script. Name a file in it, or run it as a module "
            "with -m."
        )
    if not path.exists():
        raise UsageError(f"there is no script {script} in {cwd}. {_near(script, path)}")


def _near(script: str, path: Path) -> str:
    try:
        names = [item.name for item in path.parent.iterdir() if item.suffix == ".py"]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {Path(script).with_name(close[0])}?" if close else "Check the path."


def _run_dir(
    line: CommandLine, job: JobFile, launch: Mapping[str, Resolved], script: str, cwd: Path
) -> tuple[RunDir, str]:
    """Where the run lives, and its identity. A name or a directory makes a run that continues."""
    name = line.name if line.name is not None else job.config.name
    if line.name is not None:
        _check_name(line.name)
    if line.run_dir is not None:
        path = cwd / line.run_dir
        # Directories of nodes that share none may have any names: what they have in common is the id.
        by_id = _named_by_id(launch) and not job.config.run_dir.shared and launch["rdzv_id"].origin != "default"
        return RunDir(path), name or (nodes_choice.common_name(launch) if by_id else path.absolute().name)
    if name is not None:
        return RunDir(cwd / RUNS / name), name
    base = run_name(script)
    if _named_by_id(launch):
        run_id = f"{base}/{nodes_choice.common_name(launch)}"
        return RunDir(cwd / RUNS / run_id), run_id
    moment = timestamp()
    candidate, count = f"{base}/{moment}", 1
    while not is_free(cwd / RUNS / candidate):
        count += 1
        candidate = f"{base}/{moment}-{count}"
    return RunDir(cwd / RUNS / candidate), candidate


def _named_by_id(launch: Mapping[str, Resolved]) -> bool:
    """Whether the same command finds the run again by what several nodes have in common."""
    return nodes_choice.is_ours(launch) and nodes_choice.may_be_several(launch)


def _check_name(name: str) -> None:
    try:
        load_job(None, [f"name={json.dumps(name)}"])
    except ConfigError as error:
        raise ConfigError([finding.split(": ", 1)[-1] for finding in error.findings]) from None


def _identity(run_dir: RunDir, run_id: str, *, named: bool) -> str:
    """Who lives in the run directory. Without a name of its own, the command means whoever it is."""
    recorded = run_dir.identity().get("run_id", run_id)
    if named and recorded != run_id:
        raise UsageError(
            f"{run_dir.path} holds the run {recorded!r}, and this is {run_id!r}. Use --name {recorded}, another "
            "--run-dir, or --fresh to start over there."
        )
    return str(recorded)


def _resume(root: layout.Root, run_id: str, past: history.History | None) -> str | None:
    if not root.remote and root.path.exists() and not root.path.is_dir():
        raise UsageError(
            f"the checkpoint root {root.path} is a file, not a directory. Choose another with checkpoint.root."
        )
    try:
        with told_if_slow(_tell, root):
            commit = reader.resume_point(root, run_id).commit
    except UnreachableError:
        raise  # that passes: it is no mistake of the user's
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    if commit is None and past is not None and past.commits:
        raise NoValidCheckpoint(lost_commits(run_id, past.commits[-1].step, root.url))
    return str(commit.name) if commit is not None else None


def _is_finished(root: layout.Root, run_id: str) -> bool:
    """Whether the run is over, as its root says: a node's own events may not know what the others did after it."""
    with told_if_slow(_tell, root):
        return common.is_finished(root, run_id)


def _tell(text: str) -> None:
    print(f"ftrun: {text}", file=sys.stderr, flush=True)


def lost_commits(run_id: str, step: int, root: str) -> str:
    """What to say when a run remembers commits and its root has none."""
    return (
        f"{run_id} committed step {step:,}, but there is no checkpoint in {root}. Is it mounted, was it moved? "
        "Put the checkpoints back, or start over with --fresh."
    )


def _root(given: str, options: Mapping[str, Any]) -> str:
    """The checkpoint root in full."""
    if given.partition("://")[0] in _OF_ONE_PROCESS:
        raise UsageError(
            f"checkpoint.root {given!r} lies in the memory of one process, and others must reach it. Give a path or "
            "the URL of a store."
        )
    return layout.Root.open(given, options).url


def _local(given: str | None, run_dir: RunDir) -> str:
    """This run's own part of the local tier's directory; empty where there is none."""
    if given is None:
        return ""
    if "://" in given:
        raise UsageError(f"checkpoint.local {given!r} is a URL. Give a directory on a disk of this machine.")
    if Path(given).exists() and not Path(given).is_dir():
        raise UsageError(f"checkpoint.local {given!r} is a file, not a directory. Choose another.")
    digest = hashlib.blake2b(str(run_dir.path.absolute()).encode(), digest_size=6).hexdigest()
    return str(Path(given).absolute() / f"ftrun-{digest}")


def _cache(given: str | None) -> str:
    """The directory of the node's data cache; empty for the default one."""
    if given is None:
        return ""
    if "://" in given:
        raise UsageError(f"data.cache {given!r} is a URL. Give a directory on a disk of this machine.")
    if Path(given).exists() and not Path(given).is_dir():
        raise UsageError(f"data.cache {given!r} is a file, not a directory. Choose another.")
    return str(Path(given).absolute())


def _reserve(given: str) -> str:
    """A share of the disk as it is, a size in bytes."""
    return given if given.endswith("%") else str(parse_size(given))


def _limits(line: CommandLine, job: JobFile, launch: Mapping[str, Resolved]) -> Limits:
    restart = job.config.restart
    asked = launch["max_restarts"]
    exactly = asked.origin != "default"
    refill = restart.refill_after
    return Limits(
        no_progress=restart.no_progress,
        max_restarts=int(str(asked.value)) if exactly else restart.max_restarts,
        exactly=exactly,
        window=restart.window,
        budgets=restart.budgets.model_dump(),
        backoff_first=restart.backoff.first.total_seconds(),
        backoff_max=restart.backoff.max.total_seconds(),
        jitter=restart.backoff.jitter,
        refill_after=None if refill is None else refill.total_seconds(),
    )


def _contract(line: CommandLine, job: JobFile, run_dir: RunDir, run_id: str, root: str) -> WorkerContract:
    config = job.config
    return WorkerContract(
        run_dir=str(run_dir.path),
        run_id=run_id,
        root=root,
        attempt=0,
        epoch=None,
        resume=None,
        node=0,
        worker_dir="",
        every=config.checkpoint.every if job.origin(("checkpoint", "every")) != "default" else None,
        keep_last=config.checkpoint.keep.last,
        local=_local(config.checkpoint.local, run_dir),
        overlap=config.checkpoint.overlap,
        when_busy=config.checkpoint.when_busy,
        storage_options=tuple(config.checkpoint.options.items()),
        allow_new_total=line.allow_new_total,
        faults=tuple(fault.to_fault() for fault in config.faults),
        callbacks=tuple(config.callbacks),
        agent=os.getpid(),
        cache=_cache(config.data.cache),
        cache_limit=config.data.limit,
        cache_reserve=_reserve(config.data.reserve_free),
    )
