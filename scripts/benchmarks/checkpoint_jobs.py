"""Starting the jobs of the checkpoint benchmarks, ftrun's and the peers'."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from checkpoint_results import Results, read_results
from checkpoint_samples import Sample, sample
from common import say, started
from kills import read_events
from peers import Absent, checkpointers, ftrun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from common import Job, Settings

RANKS = 2
DEADLINE = 420.0
LAYOUTS = {"ddp": "DDP", "fsdp2": "FSDP2"}
TENSORS = {"large": "4 tensors", "small": "3,000 tensors"}

_QUIETLY = (
    *("--max-restarts", "0"),
    *("--set", "standby.enabled=false", "--set", "watch.enabled=false", "--set", "checkpoint.every=100000000 steps"),
)
"""Nothing but what is measured: no standbys, no watch that would wonder about the pauses, no save of its own accord."""

_RAISED = r"(?:\w+\.)*\w*(?:Error|Exception)\b.*"
_EXCEPTION = re.compile(rf"^(?:\[rank\d+\]: )?{_RAISED}$", re.MULTILINE)
_ERROR = re.compile(rf"^(?:\[rank\d+\]: )?({_RAISED}|ftrun: .+)$", re.MULTILINE)
"""Of a job that has failed: ftrun says less bad things in lines of the same look."""
_GRACE = 5.0
"""Seconds that a job may go on after it has printed an exception."""
_SAMPLES = 0.02


@dataclass(frozen=True)
class Subject:
    """What is saved.

    Attributes:
        layout: ``ddp`` or ``fsdp2``.
        tensors: ``large`` or ``small``.
        size: bytes of the whole state, without the small body that is trained beside it.
    """

    layout: str
    tensors: str
    size: int

    @property
    def name(self) -> str:
        return f"{LAYOUTS[self.layout]}, {TENSORS[self.tensors]}"

    @property
    def options(self) -> tuple[str, ...]:
        return "--layout", self.layout, "--tensors", self.tensors, "--size", str(self.size)


def subjects(settings: Settings, tensors: str, *, size: int = 512) -> list[Subject]:
    """Both layouts with one kind of tensors, and so many MiB of them all, where it need not be quick."""
    return [Subject(layout, tensors, settings.count(size, 64) << 20) for layout in LAYOUTS]


@dataclass(frozen=True)
class Trained:
    """A job of ftrun's that has ended.

    Attributes:
        subject: what it saved.
        folder: where it ran.
        results: what its ranks wrote.
        samples: of its memory, where that was asked for.
        phases: times and words of rank 0's stamps.
    """

    subject: Subject
    folder: Path
    results: Results
    samples: Sequence[Sample] = ()
    phases: Sequence[tuple[float, str]] = ()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What ftrun recorded of the run."""
        return [each for each in read_events(self.folder) if each["kind"] in kinds]


@dataclass(frozen=True)
class Plan:
    """How a job of ftrun's is started.

    Attributes:
        scenarios: of ``jobs/ckpt_session.py``.
        cycles: how often each measures.
        options: more options of the launcher.
        environment: more variables.
    """

    scenarios: tuple[str, ...]
    cycles: int
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def train(settings: Settings, plan: Plan, subject: Subject) -> Trained:
    """Run one of ftrun's jobs to its end."""
    folder = settings.folder("checkpoint")
    arguments = ("--cycles", str(plan.cycles), "--out", str(folder), *subject.options, "--scenarios", *plan.scenarios)
    command = ftrun(*_QUIETLY, "--name", "bench", *plan.options).run(RANKS, "ckpt_session.py", *arguments)
    began = time.monotonic()
    with started(command, folder, ranks=RANKS, environment=plan.environment) as job:
        samples = _watch(job) if "memory" in plan.scenarios else []
        problem = _end(job, DEADLINE)
        phases = [(each.time, each.word) for each in job.stamps.of(0)]
    what = f"{subject.name}: {', '.join(plan.scenarios) or 'one commit'}"
    say(f"{what}: {problem or f'{time.monotonic() - began:.0f} s'}")
    return Trained(subject, folder, read_results(folder, RANKS, problem), samples, phases)


def _watch(job: Job) -> list[Sample]:
    """Look at a job's memory from its first stamp to the one that says it is over."""
    samples: list[Sample] = []
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and job.process.poll() is None:
        words = [each.word for each in job.stamps.of(0)]
        if "over" in words:
            break
        if words:
            samples.append(sample([job.process.pid, *(each.pid for each in job.family())]))
        time.sleep(_SAMPLES)
    return samples


def _end(job: Job, limit: float) -> str:
    """Wait for a job's end; one that hangs after an error is not waited for.

    Returns:
        What went wrong, or nothing.
    """
    deadline = time.monotonic() + limit
    while (code := job.wait(1.0)) is None and time.monotonic() < deadline:
        if _EXCEPTION.search(job.output) and job.wait(_GRACE) is None:
            break
    code = job.process.poll()
    return "" if code == 0 else why(job.output, code)


def load(trained: Trained, cycle: int, run_name: str, *options: str) -> str:
    """Open a Session in a run, and get its state back if it has one.

    Args:
        trained: the job that wrote it.
        cycle: number of the measurement.
        run_name: name of the run.
        options: more options of ``jobs/ckpt_load.py``.

    Returns:
        What went wrong, or nothing.
    """
    folder = trained.folder
    files = folder / "runs" / run_name / "checkpoints"
    arguments = ("--out", str(folder), "--files", str(files), "--cycle", str(cycle), *trained.subject.options)
    arguments += options
    # The run has come to its end, and does not start again for less.
    launched = (*_QUIETLY, "--name", run_name, "--allow-new-total")
    command = ftrun(*launched).run(RANKS, "ckpt_load.py", *arguments)
    with started(command, folder, ranks=RANKS) as job:
        return _end(job, DEADLINE)


def run_peers(settings: Settings, subject: Subject, methods: Sequence[str], cycles: int) -> Results:
    """Run some of the peers' methods, which take turns, to their end."""
    launcher = checkpointers()
    if isinstance(launcher, Absent):
        return Results(problem=launcher.why)
    folder = settings.folder("peers")
    arguments = ("--methods", ",".join(methods), "--cycles", str(cycles), "--out", str(folder), *subject.options)
    began = time.monotonic()
    command = launcher.run(RANKS, "ckpt_peers.py", *arguments)
    with started(command, folder, ranks=RANKS, environment=launcher.environment) as job:
        problem = _end(job, DEADLINE)
        # A peer that hangs is asked first: killed at once it leaves its semaphores in /dev/shm.
        job.process.terminate()
        job.wait(_GRACE)
    say(f"{subject.name}: {', '.join(methods)}: {problem or f'{time.monotonic() - began:.0f} s'}")
    return read_results(folder, RANKS, problem)


def why(output: str, code: int | None) -> str:
    """What a job that went wrong said of it, in a line."""
    told = _ERROR.findall(output)
    state = "hangs" if code is None else f"ended with code {code}"
    return f"{state}: {told[0][:200]}" if told else f"{state} without a word"
