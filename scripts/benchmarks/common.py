"""What all subjects share: settings, jobs that are started, watched and ended, and what they wrote down."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import leftovers
import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

JOBS = Path(__file__).parent / "jobs"
PROJECT = Path(__file__).parents[2]
VENV = Path(sys.executable).parent

# What a surrounding launcher left in the environment must not reach what is measured.
_FOREIGN = ("FTRUN_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "LOGLEVEL", "DLROVER_")
_POLL = 0.01


@dataclass(frozen=True)
class Settings:
    """How the benchmark was asked to measure.

    Attributes:
        quick: fewer measurements: a look, not a result.
        work: directory for everything that jobs write.
        seed: of every random choice.
        only: ids to measure; all where empty.
    """

    quick: bool
    work: Path
    seed: int = 17
    only: frozenset[str] = frozenset()

    def count(self, full: int, quick: int) -> int:
        """How many measurements."""
        return quick if self.quick else full

    def wants(self, *ids: str) -> bool:
        """Whether one of these figures was asked for."""
        return not self.only or not self.only.isdisjoint(ids)

    def random(self, name: str) -> random.Random:
        """Random numbers for one purpose."""
        return random.Random(f"{self.seed}/{name}")

    def folder(self, name: str) -> Path:
        """A new, empty directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.work))


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(f"  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Stamp:
    """One line that a training script wrote: see ``jobs/stamps.py``."""

    time: float
    pid: int
    rank: int
    word: str
    step: int


class Stamps:
    """Reads what the ranks of a job write, as it grows."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        self._folder = folder
        self._read = [0] * ranks
        self._lines: list[list[Stamp]] = [[] for _ in range(ranks)]

    def of(self, rank: int) -> list[Stamp]:
        """Everything that one rank has written so far, in order."""
        with contextlib.suppress(FileNotFoundError), (self._folder / f"stamps-{rank}.txt").open("rb") as file:
            file.seek(self._read[rank])
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            self._lines[rank] += [_stamp(line) for line in whole.splitlines()]
        return self._lines[rank]

    def all(self) -> list[Stamp]:
        """Everything that all ranks have written, by time."""
        return sorted((each for rank in range(self.ranks) for each in self.of(rank)), key=lambda each: each.time)

    def pids(self) -> list[int | None]:
        """The process that wrote last, of each rank."""
        return [lines[-1].pid if (lines := self.of(rank)) else None for rank in range(self.ranks)]

    def first_step(self, rank: int, *, after: float = 0.0, other_than: Sequence[int | None] = ()) -> Stamp | None:
        """The first step of this rank completed after a moment by a process that is none of some."""
        for each in self.of(rank):
            if each.word == "step" and each.time > after and each.pid not in other_than:
                return each
        return None

    def whole_step(self, *, after: float = 0.0, other_than: Sequence[int | None] = ()) -> float | None:
        """When all ranks had completed such a step; None if they have not."""
        firsts = [self.first_step(rank, after=after, other_than=other_than) for rank in range(self.ranks)]
        return None if None in firsts else max(each.time for each in firsts if each is not None)


def _stamp(line: bytes) -> Stamp:
    at, pid, rank, word, step = line.split()
    return Stamp(float(at), int(pid), int(rank), word.decode(), int(step))


@dataclass
class Job:
    """A launcher that runs in a directory of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    stamps: Stamps
    began: float
    seen: set[int] = field(default_factory=set)

    @property
    def output(self) -> str:
        """What it printed."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def wait_for(self, condition: Callable[[], float | None], timeout: float) -> float | None:
        """Poll until the condition has a value; None at the deadline, or soon after the launcher has ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            value = condition()
            if value is not None or ended:
                return value
            time.sleep(_POLL)
        return None

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it is still running at the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        return None

    def family(self) -> list[psutil.Process]:
        """The launcher's descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def end(self) -> None:
        """Kill everything that this job has started: its descendants, and whatever carries its directory's name."""
        for _ in range(2):
            family = self.family()
            _kill([self.process.pid, *(each.pid for each in family)])
            _kill([each.pid for each in psutil.process_iter() if each.pid != os.getpid() and self._is_ours(each)])
        self.process.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any(str(self.folder) in word for word in process.cmdline())
        return False


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, *, ranks: int, environment: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """A job for the length of a ``with`` block; nothing of it is left afterwards."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    clean |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", **(environment or {})}
    with (folder / "output.txt").open("wb") as output:
        began = time.time()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    job = Job(process, folder, Stamps(folder, ranks), began)
    try:
        yield job
    finally:
        job.end()
        leftovers.forget(folder)


@contextlib.contextmanager
def work_directory(keep: bool) -> Iterator[Path]:
    """A directory for everything that jobs write; removed at the end unless it is kept."""
    folder = Path(tempfile.mkdtemp(prefix="ftrun-bench-"))
    try:
        yield folder
    finally:
        leftovers.forget(folder)  # once more: a second Ctrl-C may have come in the middle of the first one's work
        if keep:
            say(f"everything is kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
