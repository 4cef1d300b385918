"""What a job file may hold, as frozen models. The docstring under a field is its help.

Validation is strict: YAML has said what is text and what is a number, and nothing is converted in silence.
Fields with several forms have one validator of their own (:mod:`ftrun.config.fields`), so that one mistake gives
one message.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from ftrun.config.fields import (
    Argument,
    DriverOptions,
    Duration,
    Environment,
    Interval,
    JobName,
    LaunchOptions,
    LaunchScalar,
    LaunchValue,
    Module,
    Reserve,
    Section,
    Size,
    Steps,
    Tee,
    Text,
    empty,
)
from ftrun.config.health import Health
from ftrun.config.supervisor import Restart, Standby, Watch
from ftrun.contract import AUTO, Fault

__all__ = ["AS_TYPED", "JobConfig", "LaunchScalar", "LaunchValue", "Section"]

AS_TYPED = ("args", "env")
"""Sections whose values are text for somebody else: they are passed on as typed, ``3e-4`` as ``3e-4``."""


class RunDirectory(Section):
    """The run directory, where several nodes take part."""

    shared: bool = True
    """Whether all nodes see the same one; false where each has its own, and checkpoint.root is what they share."""


class Keep(Section):
    """Which commits stay when newer ones arrive."""

    last: int = Field(default=3, ge=2)
    """How many of the latest commits are kept; two at least, so that a bad one has a predecessor."""
    every: Steps | None = None
    """Also keep for good the first commit in every so many steps, such as 10000 steps."""


class Checkpoint(Section):
    """Where checkpoints go and how often they are taken."""

    root: Text | None = None
    """Directory or URL of the checkpoints; without it, checkpoints/ in the run directory."""
    options: DriverOptions = Field(default_factory=empty)
    """Options of the fsspec driver that a URL needs, such as endpoint_url."""
    local: Text | None = None
    """Directory on a fast local disk: a tier between memory and the root, for roots that are slow or far."""
    every: Interval = Field(default=AUTO)
    """How often a checkpoint is taken: a number of steps, a duration, or auto, from what is measured."""
    overlap: bool = True
    """Copy state beside the next forward and backward instead of before them."""
    when_busy: Literal["skip", "wait", "replace"] = "skip"
    """What becomes of a save while two others are on their way: skip it, wait, or replace the one not yet begun."""
    drain_limit: Size | None = None
    """Bytes a second that a node writes at most, so that checkpoints leave room on the network."""
    peer_copies: int = Field(default=0, ge=0, le=1)
    """How many other nodes keep a copy of each node's newest snapshots in memory, so that losing a node loses none."""
    keep: Keep = Field(default_factory=Keep)
    """Which commits stay when newer ones arrive."""


class Data(Section):
    """The node's cache of data files, for what reads them through ftrun.CachedFiles."""

    cache: Text | None = None
    """Directory on a fast local disk; jobs may share it. Without it, .cache/ftrun/data in the home directory."""
    limit: Size | None = None
    """Bytes that the cache may take; without it, whatever reserve_free leaves."""
    reserve_free: Reserve = "10%"
    """Free space that the cache leaves on its disk: a share of the disk, or a size."""


class Signals(Section):
    """What happens when the run is asked to stop."""

    grace: Duration = Field(default=timedelta(seconds=30))
    """Time for a last checkpoint before workers are killed."""


class Logs(Section):
    """What becomes of the workers' output."""

    tee: Tee = Field(default="all")
    """Local ranks whose output is also shown on the terminal: all, or a list such as [0]."""


class FaultEntry(Section):
    """A scripted fault, for demonstrations and tests. It happens once in a run."""

    at_step: int = Field(ge=1)
    """Number of the step, from 1, that is about to begin."""
    rank: int = Field(ge=0)
    """Global rank that it happens to."""
    do: Literal["kill", "raise", "exit", "hang", "spin", "stop", "segv"]
    """What happens: kill (SIGKILL), raise an exception, exit with code 1, hang, spin (hang busily), stop or segv."""

    def to_fault(self) -> Fault:
        """The form that workers are told."""
        return Fault(at_step=self.at_step, rank=self.rank, do=self.do)


class JobConfig(Section):
    """A training job for ftrun."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["script", "module"]}})

    name: JobName | None = None
    """Name of the run, and of its directory; a named job continues where it stopped."""
    script: Text | None = None
    """Python file to run; or give module."""
    module: Module | None = None
    """Module to run, as with python -m; or give script."""
    args: tuple[Argument, ...] = ()
    """Arguments of the script, passed on as they are typed here."""
    launch: LaunchOptions = Field(default_factory=empty)
    """Options of torchrun, with underscores."""
    run_dir: RunDirectory = Field(default_factory=RunDirectory)
    """The run directory, where several nodes take part."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Where checkpoints go and how often they are taken."""
    restart: Restart = Field(default_factory=Restart)
    """When a failed attempt is followed by another, and when to give up."""
    watch: Watch = Field(default_factory=Watch)
    """When a run that makes no step counts as hung."""
    standby: Standby = Field(default_factory=Standby)
    """Processes that wait with their imports done, so that a restart is short."""
    health: Health = Field(default_factory=Health)
    """What is made of hardware that seems to be sick."""
    data: Data = Field(default_factory=Data)
    """The node's cache of data files."""
    signals: Signals = Field(default_factory=Signals)
    """What happens when the run is asked to stop."""
    logs: Logs = Field(default_factory=Logs)
    """What becomes of the workers' output."""
    exit_codes: Literal["ftrun", "torchrun"] = "ftrun"
    """Exit codes: ftrun tells apart why a run ended; torchrun knows 0 and 1, and ends with its table of failures."""
    env: Environment = Field(default_factory=empty)
    """Environment variables for the workers."""
    callbacks: tuple[Module, ...] = ()
    """Modules to import in every worker for the callbacks that they register."""
    faults: tuple[FaultEntry, ...] = ()
    """Scripted faults, for demonstrations and tests."""

    @field_validator("module")
    @classmethod
    def _one_program(cls, module: str | None, info: ValidationInfo) -> str | None:
        if module and info.data.get("script"):
            raise ValueError("'script' is given too; keep one of them")
        return module
