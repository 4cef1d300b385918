"""The first start: parked workers begin to import torch before the agent itself does.

What the workers will be started with is known for certain only after torch has read the options, seconds later. Most
command lines are plain, though, and are guessed right by a look at their words; a guess that turns out wrong costs
nothing but the effort, because a parked process whose environment isn't exactly the one wanted is not used. What isn't
plain is not guessed.

Standard library only, and YAML where there is a job file: this comes before everything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.launch.standbys.parking import Command
from ftrun.launch.standbys.standby import Standbys
from ftrun.rundir import RUNS, RunDir, run_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_WORKERS = 64
_PATIENCE = 30.0
"""Seconds for a worker that is still importing torch: a cold start would have to import all of it."""

_FLAGS = frozenset(
    {
        *("--standalone", "--no-python", "--module", "--run-path", "--use-env", "--virtual-local-rank"),
        *("--fresh", "--dry-run", "--json", "--allow-new-total", "--help"),
    }
)
# With these the workers are others than can be guessed, or there are none.
_NOT_PLAIN = (
    *("--no-python", "--virtual-local-rank", "--numa-binding", "--dry-run", "--help", "--start-method"),
    "--signals-to-handle",
)
_NOT_PLAIN_VARIABLES = (
    *("PET_NO_PYTHON", "PET_VIRTUAL_LOCAL_RANK", "PET_NUMA_BINDING", "PET_SIGNALS_TO_HANDLE", "PYTHON_EXEC"),
)


@dataclass
class _Line:
    """The words of a command line that matter here."""

    options: dict[str, str] = field(default_factory=dict)
    sets: list[str] = field(default_factory=list)
    script: str | None = None


@dataclass(frozen=True)
class Guess:
    """What the workers will be.

    Attributes:
        commands: one for each local rank.
        record: what an earlier attempt had imported, if there is such a file.
        exclude: packages that must not be imported.
    """

    commands: tuple[Command, ...]
    record: Path | None
    exclude: tuple[str, ...]


def begin(argv: Sequence[str], environment: Mapping[str, str]) -> Standbys:
    """Start parked workers if the command line is plain. The caller closes what comes back, whatever happens.

    Args:
        argv: the command line after ``ftrun``.
        environment: this process's environment.
    """
    standbys = Standbys(patience=_PATIENCE)
    try:
        made = guess(argv, environment, os.getcwd())
    except (OSError, ValueError, LookupError):  # an unreadable job file, a cwd that is gone: it is said later, properly
        return standbys
    if made is not None:
        _hear_interrupts()
        standbys.configure(enabled=True, exclude=made.exclude)
        if made.record is not None:
            standbys.learn(made.record)
        for local_rank, command in enumerate(made.commands):
            standbys.start(local_rank, command)
    return standbys


def _hear_interrupts() -> None:
    """Don't ignore SIGINT and SIGQUIT because a shell has its background jobs do so: processes would inherit that.

    Torch's agent handles both however it was started, so that the workers that it starts don't ignore them.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def guess(argv: Sequence[str], environment: Mapping[str, str], cwd: str) -> Guess | None:
    """What a command line will start; None if that isn't plain."""
    line = _read(argv[1:] if list(argv[:1]) == ["run"] else argv)
    if any(name in line.options for name in _NOT_PLAIN) or any(environment.get(n) for n in _NOT_PLAIN_VARIABLES):
        return None
    job = _Job.read(line, cwd)
    if job is None or not job.standbys:
        return None
    workers = _option(line, job, environment, "nproc_per_node", "1")
    if not (workers.isascii() and workers.isdigit() and 1 <= int(workers) <= _MOST_WORKERS):
        return None
    script = _script(line, job, environment)
    if script is None or (script[0] != "-m" and not Path(cwd, script[-1]).is_file()):
        return None
    alone = _option(line, job, environment, "nnodes", "1") in ("1", "1:1")
    variables = _variables(environment, job, int(workers), alone=alone)
    argv = (sys.executable, "-u", "-m", "ftrun.session.bootstrap", *script)
    commands = tuple(Command(argv, each, None, None, cwd) for each in variables)
    return Guess(commands, _record(line, job, script[-1], cwd), job.exclude)


def _read(argv: Sequence[str]) -> _Line:
    """Tell options from the script, as torch's parser will."""
    line = _Line()
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word == "-":
            line.script = word
            break
        if word == "--":
            line.script = next(words, None)
            break
        name, value = _split(word, words)
        if name == "--set":
            line.sets.append(value)
        line.options[name] = value
    return line


def _split(word: str, words: Iterator[str]) -> tuple[str, str]:
    """An option in its long spelling with dashes, and its value; flags have none."""
    short = {"-c": "--config", "-m": "--module", "-h": "--help", "-t": "--tee", "-r": "--redirects"}
    if not word.startswith("--"):
        name = short.get(word[:2], word)
        return name, "" if name in _FLAGS else word[2:].removeprefix("=") or next(words, "")
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    if name.startswith("--nproc"):
        name = "--nproc-per-node"
    flag = next((each for each in sorted(_FLAGS) if each.startswith(name)), None)
    if flag is not None:
        return flag, value
    return name, value if equals else next(words, "")


@dataclass(frozen=True)
class _Job:
    """What a job file says of the workers."""

    launch: Mapping[str, str]
    env: Mapping[str, str]
    target: tuple[str, ...] | None
    name: str | None
    standbys: bool
    exclude: tuple[str, ...]

    @classmethod
    def read(cls, line: _Line, cwd: str) -> _Job | None:
        """Read the job file, all values as text; None if ``--set`` changes what matters here."""
        document: Any = {}
        if "--config" in line.options:
            import yaml  # cheap beside what follows, and needed only here

            with Path(cwd, line.options["--config"]).open("rb") as file, contextlib.suppress(yaml.YAMLError):
                document = yaml.load(file, yaml.BaseLoader)  # noqa: S506 - it makes text, lists and mappings
            if not isinstance(document, dict):
                return None
        standby = _section(document, "standby")
        enabled = standby.get("enabled", "true")
        for each in line.sets:
            key, _, value = each.partition("=")
            if key.strip() == "standby.enabled":
                enabled = value.strip()
            elif key.split(".")[0].strip() in ("launch", "env", "standby", "script", "module", "name"):
                return None
        script, module = document.get("script"), document.get("module")
        target = (str(script),) if script else ("-m", str(module)) if module else None
        exclude = standby.get("exclude", ())
        return cls(
            launch=_section(document, "launch"),
            env=_section(document, "env"),
            target=target,
            name=document.get("name"),
            standbys=enabled == "true",
            exclude=tuple(exclude) if isinstance(exclude, list) else (),
        )


def _section(document: Any, name: str) -> dict[str, Any]:
    section = document.get(name) if isinstance(document, dict) else None
    return section if isinstance(section, dict) else {}


def _option(line: _Line, job: _Job, environment: Mapping[str, str], name: str, default: str) -> str:
    dashed = f"--{name.replace('_', '-')}"
    variable = f"PET_{name.upper()}"
    return str(line.options.get(dashed) or environment.get(variable) or job.launch.get(name) or default)


def _script(line: _Line, job: _Job, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The bootstrap's first arguments."""
    if line.script is None:
        return None if job.launch.keys() & {"no_python", "numa_binding", "virtual_local_rank"} else job.target
    for option, way in (("module", "-m"), ("run_path", "--run-path")):
        dashed = f"--{option.replace('_', '-')}"
        if dashed in line.options or environment.get(f"PET_{option.upper()}") == "1" or job.launch.get(option):
            return way, line.script
    return (line.script,)


def _variables(environment: Mapping[str, str], job: _Job, workers: int, *, alone: bool) -> Iterator[dict[str, str]]:
    """The environment of each worker, as far as torch's part in it can be known."""
    common = dict(environment)
    if workers > 1:
        common.setdefault("OMP_NUM_THREADS", "1")
    for local_rank in range(workers):
        variables = common | {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(workers)}
        if alone:
            variables |= {"RANK": str(local_rank), "ROLE_RANK": str(local_rank), "GROUP_RANK": "0"}
            variables |= {"WORLD_SIZE": str(workers), "ROLE_WORLD_SIZE": str(workers), "GROUP_WORLD_SIZE": "1"}
        yield variables | {name: str(value) for name, value in job.env.items()}


def _record(line: _Line, job: _Job, script: str, cwd: str) -> Path | None:
    """What the run that this one continues had imported; else what the latest run of the same script had."""
    name = line.options.get("--name") or job.name
    if "--run-dir" in line.options:
        places = [Path(cwd, line.options["--run-dir"])]
    elif name:
        places = [Path(cwd, RUNS, name)]
    else:
        places = sorted(Path(cwd, RUNS, run_name(script)).glob("*"))[-1:]
    records = [RunDir(each).attempts / "latest" / "n0000" / "r00000" / "imports.json" for each in places]
    return next((each for each in records if each.is_file()), None)
