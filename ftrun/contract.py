"""What the launcher and the workers agree on: exit codes, and the environment a worker starts with.

Standard library only. The launcher builds a :class:`WorkerContract` for each attempt and writes it into the
environment of every worker; the worker reads it once. Neither side imports the other.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ExitCode(enum.IntEnum):
    """Exit codes of ``ftrun``. A signal ``n`` is ``128 + n``; a worker's own code is passed on where it has one."""

    OK = 0
    FAILED = 1
    USAGE = 2
    TRY_AGAIN = 75
    GAVE_UP = 76
    EXCLUDED = 86


RESERVED_CODES = frozenset({ExitCode.USAGE, ExitCode.GAVE_UP, ExitCode.EXCLUDED})
"""Codes that only ftrun may mean: a worker's own 2, 76 or 86 is reported as 1."""


@dataclass(frozen=True)
class Every:
    """How often a checkpoint is taken: every ``steps`` steps, or every ``seconds`` seconds. One of them is set.

    Attributes:
        steps: a number of steps.
        seconds: a time; where it is chosen by what is measured, the first one.
        auto: choose it by what is measured, see :mod:`ftrun.checkpoint.interval`.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False


AUTO = Every(seconds=600.0, auto=True)
"""``every: auto``."""


@dataclass(frozen=True)
class Fault:
    """A scripted fault: at step ``at_step`` rank ``rank`` does ``do``, once in a run.

    Attributes:
        at_step: 1-based number of the step that is about to begin.
        rank: global rank.
        do: ``kill`` (SIGKILL), ``raise``, ``exit`` (code 1), ``hang``, ``spin``, ``stop`` (SIGSTOP) or ``segv``.
    """

    at_step: int
    rank: int
    do: str


@dataclass(frozen=True)
class WorkerContract:
    """What one worker is told by the launcher. Written to and read from the environment as one variable.

    Attributes:
        run_dir: absolute path of the run directory.
        run_id: identity of the run; commits of another run in the same root are refused.
        root: checkpoint root, a path or a URL.
        storage_options: options of the driver that a URL needs.
        attempt: number of this attempt, from 1.
        epoch: fencing epoch of this attempt, or None where the attempt takes no checkpoints.
        since: fencing epoch at which the run's lineage of commits began.
        resume: name of the commit to resume from, or None for a fresh start. Decided once for all ranks.
        node: number of this node.
        worker_dir: directory for this rank's logs, error file and pulse.
        every: the checkpoint interval that the job asks for, or None to leave it to the script.
        keep_last: how many commits are kept.
        allow_new_total: resume although the script asks for another total.
        alone: there is no launcher; the process stands in for one.
        faults: scripted faults.
        callbacks: modules to import for their callbacks.
        agent: process id of the agent, with whom the worker dies; 0 where there is none.
        tier: directory of the node's memory tier, see :mod:`ftrun.checkpoint.memory.tier`.
        local: directory of the node's local tier, between memory and the root; empty where there is none.
        start: random text, the same for all ranks of an attempt and new for each: names that come of it are never used
            twice, not even where a run was deleted and its name taken again.
        resume_sealed: ``resume`` names a snapshot in the memory tier that isn't committed yet.
        overlap: copy state beside the next forward and backward.
        when_busy: what a save does that finds both slots full: ``skip``, ``wait`` or ``replace``.
        failures: how often this run has failed so far, code errors apart, in ``uptime`` seconds.
        uptime: seconds that the run's attempts have lasted so far.
        cache: directory of the node's cache of data files; empty for the default one.
        cache_limit: bytes that it may take; None for no limit but free space.
        cache_reserve: free space that it leaves on its disk: ``10%``, or a number of bytes.
    """

    run_dir: str
    run_id: str
    root: str
    attempt: int
    epoch: int | None
    resume: str | None
    node: int
    worker_dir: str
    since: int = 0
    every: Every | None = None
    keep_last: int = 3
    allow_new_total: bool = False
    alone: bool = False
    faults: tuple[Fault, ...] = ()
    callbacks: tuple[str, ...] = field(default=())
    agent: int = 0
    storage_options: tuple[tuple[str, Any], ...] = ()
    tier: str = ""
    local: str = ""
    start: str = ""
    resume_sealed: bool = False
    overlap: bool = True
    when_busy: str = "skip"
    failures: int = 0
    uptime: float = 0.0
    cache: str = ""
    cache_limit: int | None = None
    cache_reserve: str = "10%"

    VARIABLE = "FTRUN_WORKER"

    @property
    def to_start_over(self) -> str:
        """How the user starts over, as part of a message."""
        return "start over in another FTRUN_RUN_DIR" if self.alone else "start over with --fresh"

    @property
    def to_allow_new_total(self) -> str:
        """How the user goes on with another total, as part of a message."""
        return f"`ftrun --run-dir {self.run_dir} --allow-new-total`" if self.alone else "--allow-new-total"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the environment of this launcher's workers holds, and that of no other process."""
        return f'"run_dir": {json.dumps(self.run_dir)}', f'"agent": {self.agent},'

    @property
    def run_path(self) -> Path:
        """The run directory as a path."""
        return Path(self.run_dir)

    def to_environment(self) -> dict[str, str]:
        """The variables to add to the worker's environment."""
        document = {name: value for name, value in self.__dict__.items() if name not in ("every", "faults")}
        document["every"] = self.every and self.every.__dict__
        document["faults"] = [fault.__dict__ for fault in self.faults]
        return {self.VARIABLE: json.dumps(document)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerContract | None:
        """Read the contract back; None where the process was not started by ftrun."""
        text = environment.get(cls.VARIABLE)
        if not text:
            return None
        try:
            document: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{cls.VARIABLE} is not what ftrun sets ({error}). Unset it.") from error
        document["every"] = document["every"] and Every(**document["every"])
        document["faults"] = tuple(Fault(**fault) for fault in document["faults"])
        document["callbacks"] = tuple(document["callbacks"])
        document["storage_options"] = tuple((name, value) for name, value in document["storage_options"])
        return cls(**document)
