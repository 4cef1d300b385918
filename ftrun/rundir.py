"""The run directory: one class owns every path in it, and who may use it.

::

    runs/llama/
      job.yaml  job.resolved.json    as given; as understood
      events/n0000.jsonl             one file per node, append-only
      attempts/0003/n0000/r00005/    stdout.log stderr.log error.json pulse stacks.txt
      attempts/latest                link to the newest attempt
      postmortem/0003/               why an attempt failed: report.md failure.json, and copies of what ranks left
      nodes.json                     what is known of each node across attempts
      control/                       requests, and scripted faults that have fired
      checkpoints/                   the default checkpoint root
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import durable
from ftrun.errors import RunDirError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from filelock import BaseFileLock

RUNS = Path("runs")

_MADE_FIRST = ("attempts", "control", "events")


def run_name(script: str) -> str:
    """The name that runs of a script, or of a module with dots, have in common: a plain directory name."""
    stem = script.rsplit(".", 1)[-1] if "/" not in script and not script.endswith(".py") else Path(script).stem
    return re.sub(r"[^\w.-]+", "_", stem).strip("._") or "run"


def timestamp() -> str:
    """Local time as a name for directories, e.g. ``20260131-235959``."""
    return dt.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")


class RunDir:
    """The paths of one run. Constructing it touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def job_yaml(self) -> Path:
        """The job file, as it was given."""
        return self.path / "job.yaml"

    @property
    def resolved(self) -> Path:
        """The run's identity and settings as understood; its presence makes a directory a run directory."""
        return self.path / "job.resolved.json"

    @property
    def checkpoints(self) -> Path:
        """The default checkpoint root."""
        return self.path / "checkpoints"

    @property
    def control(self) -> Path:
        """Requests to a live run, and markers of scripted faults that have fired."""
        return self.path / "control"

    @property
    def attempts(self) -> Path:
        """One directory per attempt."""
        return self.path / "attempts"

    @property
    def nodes(self) -> Path:
        """What is known of each node across attempts."""
        return self.path / "nodes.json"

    def events(self, node: int = 0) -> Path:
        """The event file of a node."""
        return self.path / "events" / f"n{node:04d}.jsonl"

    def attempt(self, number: int) -> Path:
        """The directory of one attempt."""
        return self.attempts / f"{number:04d}"

    def worker(self, number: int, node: int, rank: int) -> Path:
        """The directory of one rank in one attempt."""
        return self.attempt(number) / f"n{node:04d}" / f"r{rank:05d}"

    def postmortem(self, number: int) -> Path:
        """What is kept of a failed attempt."""
        return self.path / "postmortem" / f"{number:04d}"

    def exists(self) -> bool:
        """Whether a run lives here. A directory with other things in it is refused.

        Raises:
            RunDirError: the path is a file, or a directory that ftrun didn't make.
        """
        try:
            if self.resolved.is_file():
                return True
            if not self.path.exists():
                return False
        except OSError as error:
            raise RunDirError(f"the run directory can't be {self.path}: {error.strerror}.") from error
        if not self.path.is_dir():
            raise RunDirError(f"{self.path} is a file, not a run directory. Choose another --run-dir.")
        foreign = sorted(item.name for item in self.path.iterdir() if not self._half_made(item))
        if foreign and self.resolved.is_file():
            return True  # another node's launcher was making it meanwhile
        if foreign:
            raise RunDirError(
                f"{self.path} is not a run directory of ftrun: it holds {', '.join(foreign[:3])} but no "
                f"{self.resolved.name}. Choose another --run-dir, or an empty one."
            )
        return False

    def _half_made(self, item: Path) -> bool:
        """Whether a launcher that died in :meth:`create` may have left this, and nothing else is in it."""
        if item.name in _MADE_FIRST:
            return item.is_dir() and not any(item.iterdir())
        return item.name.startswith(f".{self.resolved.name}.")

    def identity(self) -> dict[str, Any]:
        """What ``job.resolved.json`` says.

        Raises:
            RunDirError: the file can't be read.
        """
        try:
            document: dict[str, Any] = json.loads(self.resolved.read_text())
        except (OSError, ValueError) as error:
            raise RunDirError(
                f"{self.resolved} can't be read ({error}). Put it back, or start over with --fresh, which keeps "
                "the old directory beside the new one."
            ) from error
        if not isinstance(document, dict):
            raise RunDirError(f"{self.resolved} is no description of a run. Put it back, or start over with --fresh.")
        return document

    def root(self, identity: Mapping[str, Any]) -> str:
        """Path or URL of the checkpoint root that the run's identity names.

        One inside the run directory has gone with it to where that is now; in a copy, the old place is another run's.
        """
        root = str(identity.get("checkpoint_root", self.checkpoints))
        inside = root.removeprefix(f"{identity.get('run_dir')}/")
        return root if inside == root else str(self.path / inside)

    def create(self, identity: dict[str, Any]) -> None:
        """Make the directories and write the identity, last, so that a half-made directory is not a run.

        Raises:
            RunDirError: the place can't be written.
        """
        try:
            for directory in (self.path, self.attempts, self.control, self.events().parent):
                durable.make_dirs(directory)
            durable.write(self.resolved, json.dumps(identity, indent=1).encode() + b"\n")
        except OSError as error:
            raise RunDirError(
                f"the run directory {self.path} can't be written: {error.strerror}. Choose another with --run-dir."
            ) from error

    def next_attempt(self) -> int:
        """Take the next attempt number, exclusively, and create its directory."""
        number = max(self.attempt_numbers(), default=0) + 1
        while True:
            try:
                self.attempt(number).mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                self._point_latest(number)
                return number

    def attempt_numbers(self) -> list[int]:
        """Numbers of all attempts, in order."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(item.name) for item in self.attempts.iterdir() if item.name.isdecimal())

    def _point_latest(self, number: int) -> None:
        temporary = self.attempts / f".latest.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(f"{number:04d}")
        try:
            temporary.replace(self.attempts / "latest")
        except IsADirectoryError:  # a copy of a run directory that was made without links; this one is for people
            temporary.unlink()

    def set_aside(self) -> Path | None:
        """Move an existing directory to a name beside it, and say which; None if there was none."""
        if not self.path.exists():
            return None
        stem = f"{self.path.name}.aside-{timestamp()}"
        aside = self.path.with_name(stem)
        count = 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{stem}-{count}")
        self.path.rename(aside)
        return aside


@contextlib.contextmanager
def locked(path: Path, *, shared_by_nodes: bool) -> Iterator[None]:
    """Hold a run directory for this launcher. The kernel drops the lock when the process dies, however it dies.

    The lock file lies beside the run directory, so that ``--fresh`` can move the directory while it is held.

    Args:
        path: the run directory.
        shared_by_nodes: several launchers, one per host, work in it together: the lock is then per host.

    Raises:
        RunDirError: another live launcher holds it.
    """
    lock = hold(path, shared_by_nodes=shared_by_nodes)
    try:
        yield
    finally:
        lock.release()


def hold(path: Path, *, shared_by_nodes: bool = False) -> BaseFileLock:
    """As :func:`locked`, for whoever holds it until the process ends; the caller keeps the lock alive.

    Raises:
        RunDirError: another live launcher holds it.
    """
    alone, with_others = _lock_files(path)
    own, other = (with_others, alone) if shared_by_nodes else (alone, with_others)
    try:
        durable.make_dirs(own.parent)
        lock = _acquired(own, path)
        own.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")
        try:
            if other.exists():  # a run of one node and one of several keep out of each other's directory
                _acquired(other, path).release()
        except RunDirError:
            lock.release()
            raise
    except OSError as error:
        raise RunDirError(
            f"{own.parent} can't be written: {error.strerror}. Choose another place with --run-dir."
        ) from error
    return lock


def _acquired(file: Path, path: Path) -> BaseFileLock:
    # Workers import this module for its paths: what only launchers need is not put into the user's process.
    from filelock import FileLock, Timeout

    # `ftrun status` tries the lock for an instant: a moment's patience tells it from a live launcher.
    lock = FileLock(file, timeout=0.5)
    try:
        lock.acquire()
    except Timeout:
        with_others = _lock_files(path)[1]
        nodes = " Nodes of one run need a machine or a container each." if file == with_others else ""
        raise RunDirError(
            f"{path} is in use by another launcher ({_holder(file)}). Wait for it, stop it, or choose another "
            f"--name or --run-dir.{nodes}"
        ) from None
    return lock


def in_use(path: Path) -> bool:
    """Whether a live launcher of this host holds the run directory."""
    from filelock import FileLock, Timeout

    for file in _lock_files(path):
        if not file.exists():
            continue
        lock = FileLock(file, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return True
        except OSError:
            continue
        lock.release()
    return False


def _lock_files(path: Path) -> tuple[Path, Path]:
    """The lock of a run with one launcher, and this host's lock of a run with one launcher per host."""
    return path.with_name(f".{path.name}.lock"), path.with_name(f".{path.name}@{socket.gethostname()}.lock")


def _holder(file: Path) -> str:
    try:
        return file.read_text().strip() or "unknown process"
    except OSError:
        return "unknown process"
