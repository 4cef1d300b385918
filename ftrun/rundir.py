"""The run directory: one class owns every path in it, and who may use it.

::

    runs/llama/
      job.yaml  job.resolved.json    as given; as understood
      events/n0000.jsonl             one file per node, append-only
      attempts/0003/n0000/r00005/    stdout.log stderr.log error.json pulse stacks.txt
      attempts/latest                link to the newest attempt
      postmortem/0003/               why an attempt failed: report.md failure.json, and copies of what ranks left
        parts/n0001.json             where several nodes take part: what each of them has to say
      nodes.json                     what is known of each node across attempts
      rendezvous/                    of several nodes: by what they know that they see the same directory, or root
      control/                       requests, and scripted faults that have fired
      checkpoints/                   the default checkpoint root
"""

from __future__ import annotations

import contextlib
import datetime as dt
import glob
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import durable
from ftrun.errors import RunDirError, RunDirTaken

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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

    @property
    def root_mark(self) -> Path:
        """The mark of the checkpoint root, as a node remembers it that has a run directory of its own."""
        return self.path / "rendezvous" / "root"

    def events(self, node: int = 0) -> Path:
        """The event file of a node."""
        return self.path / "events" / f"n{node:04d}.jsonl"

    def event_files(self) -> list[Path]:
        """The files that hold the history of the run: that of its first node.

        A node with a run directory of its own has them all to itself, one for each number that it has had.
        """
        try:
            shared = self.identity().get("shared_run_dir", True)
        except RunDirError:
            shared = True
        own = [] if shared else sorted(self.events().parent.glob("n*.jsonl"))
        return own or [self.events()]

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

    def next_attempt(self, least: int = 1) -> int:
        """Take the next attempt number, exclusively, and create its directory.

        Args:
            least: the number is this one or higher.
        """
        number = max(least, max(self.attempt_numbers(), default=0) + 1)
        while True:
            try:
                self.attempt(number).mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                self._point_latest(number)
                return number

    def enter_attempt(self, number: int, node: int = 0) -> None:
        """Begin an attempt whose number another node has taken in a run directory of its own.

        Args:
            number: of the attempt.
            node: this node's in it. What it has left under this number before, while the run had another checkpoint
                root, is moved aside: an old error must not be taken for a new one.
        """
        left = self.attempt(number) / f"n{node:04d}"
        if left.exists():
            left.rename(left.with_name(f"aside-{timestamp()}-{left.name}"))
        self.attempt(number).mkdir(parents=True, exist_ok=True)
        self._point_latest(number)

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
def locked(path: Path, *, shared_by_nodes: bool, most_here: int = 1) -> Iterator[int]:
    """Hold a run directory for this launcher. The kernel drops the lock when the process dies, however it dies.

    The lock file lies beside the run directory, so that ``--fresh`` can move the directory while it is held.

    Args:
        path: the run directory.
        shared_by_nodes: several launchers, one per host, work in it together: the lock is then per host.
        most_here: how many of them there may be on this host.

    Yields:
        Which of the launchers on this host it is, from 1.

    Raises:
        RunDirTaken: another live launcher holds it.
        RunDirError: its place can't be written.
    """
    lock, number = _held(path, shared_by_nodes=shared_by_nodes, most_here=most_here)
    try:
        yield number
    finally:
        lock.release()


def hold(path: Path, *, shared_by_nodes: bool = False) -> BaseFileLock:
    """As :func:`locked`, for whoever holds it until the process ends; the caller keeps the lock alive.

    Raises:
        RunDirError: another live launcher holds it.
    """
    return _held(path, shared_by_nodes=shared_by_nodes, most_here=1)[0]


def _held(path: Path, *, shared_by_nodes: bool, most_here: int) -> tuple[BaseFileLock, int]:
    alone, with_others = _lock_files(path)
    own, other = (with_others, alone) if shared_by_nodes else (alone, with_others)
    try:
        durable.make_dirs(own.parent)
        lock, number = _one_of([own, *(_numbered(own, each) for each in range(2, most_here + 1))], path)
        Path(lock.lock_file).write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")
        try:
            for each in _with_numbers(other):  # a run of one node and one of several keep out of each other's directory
                _acquired(each, path).release()
        except RunDirError:
            lock.release()
            raise
    except OSError as error:
        raise RunDirError(
            f"{own.parent} can't be written: {error.strerror}. Choose another place with --run-dir."
        ) from error
    return lock, number


def _one_of(files: Sequence[Path], path: Path) -> tuple[BaseFileLock, int]:
    """The first of these locks that is free, and its number from 1."""
    *first, last = files
    for number, file in enumerate(first, 1):
        with contextlib.suppress(RunDirError):
            return _acquired(file, path), number
    return _acquired(last, path), len(files)


def _acquired(file: Path, path: Path) -> BaseFileLock:
    # Workers import this module for its paths: what only launchers need is not put into the user's process.
    from filelock import FileLock, Timeout

    # `ftrun status` tries the lock for an instant: a moment's patience tells it from a live launcher.
    lock = FileLock(file, timeout=0.5)
    try:
        lock.acquire()
    except Timeout:
        way_out = "a machine or a container each, or an --rdzv-endpoint that means this machine, like localhost:29400"
        nodes = f" Nodes of one run need {way_out}." if file == _lock_files(path)[1] else ""
        raise RunDirTaken(
            f"{path} is in use by another launcher ({_holder(file)}). Wait for it, stop it, or choose another "
            f"--name or --run-dir.{nodes}"
        ) from None
    return lock


def is_free(path: Path) -> bool:
    """Whether no launcher has taken this place, nor begun to: the lock comes first."""
    return not path.exists() and not any(file.exists() for file in _lock_files(path))


def in_use(path: Path) -> bool:
    """Whether a live launcher of this host holds the run directory."""
    from filelock import FileLock, Timeout

    alone, with_others = _lock_files(path)
    for file in (*_with_numbers(alone), *_with_numbers(with_others)):
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


def _numbered(file: Path, number: int) -> Path:
    """This host's lock for a further launcher of such a run."""
    return file.with_name(f"{file.name.removesuffix('.lock')}#{number}.lock")


def _with_numbers(file: Path) -> list[Path]:
    """A lock and those with numbers, as far as they are there."""
    further = file.parent.glob(f"{glob.escape(file.name.removesuffix('.lock'))}#*.lock")
    return [each for each in (file, *sorted(further)) if each.exists()]


def _holder(file: Path) -> str:
    try:
        return file.read_text().strip() or "unknown process"
    except OSError:
        return "unknown process"
