"""Sections of the job file that tell the supervisor what to do: ``restart``, ``watch``, ``standby``."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, model_validator

from ftrun.config.fields import Duration, Module, Patience, RestartWindow, Section
from ftrun.config.units import duration_text

_HALF_AN_HOUR = timedelta(minutes=30)
_Count = int | None


class Backoff(Section):
    """How long to wait before a restart; doubles from the first to the longest."""

    first: Duration = Field(default=timedelta(seconds=1))
    """Wait before the second restart in a row without a new commit; the first one comes at once."""
    max: Duration = Field(default=timedelta(minutes=5))
    """Longest wait."""
    jitter: float = Field(default=0.1, ge=0, le=1)
    """Part of each wait that is left to chance, from 0 to 1, so that jobs don't all come back at one moment."""

    @model_validator(mode="after")
    def _in_order(self) -> Backoff:
        if self.first > self.max:
            first, longest = duration_text(self.first), duration_text(self.max)
            raise ValueError(f"first ({first}) is longer than max ({longest}); make max {first} or more")
        return self


class Budgets(Section):
    """Restarts in a row without a new commit, by the kind of failure; null for no limit but no_progress."""

    code_error: _Count = Field(default=2, ge=0)
    """An exception of the script; enough to see that it comes again at the same step."""
    import_error: _Count = Field(default=1, ge=0)
    """An import or the configuration failed, although an earlier attempt has made steps."""
    host_out_of_memory: _Count = Field(default=2, ge=0)
    """The kernel killed a process for memory."""
    gpu_out_of_memory: _Count = Field(default=1, ge=0)
    """An accelerator's memory was not enough."""
    segfault: _Count = Field(default=2, ge=0)
    """A crash of native code: SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT."""
    killed: _Count = Field(default=None, ge=0)
    """Ended by a signal from outside."""
    collective_timeout: _Count = Field(default=None, ge=0)
    """Ranks waited too long for each other in a collective."""
    hang: _Count = Field(default=2, ge=0)
    """The watch saw no progress."""
    left_early: _Count = Field(default=1, ge=0)
    """A rank ended in good order while the others went on."""
    hardware: _Count = Field(default=None, ge=0)
    """A device, a link or the host is at fault."""
    storage: _Count = Field(default=None, ge=0)
    """A file system or an object store failed."""
    data: _Count = Field(default=2, ge=0)
    """A sample couldn't be read."""
    preempted: _Count = Field(default=None, ge=0)
    """The machine was taken away."""
    exit: _Count = Field(default=2, ge=0)
    """A plain exit code, with nothing that explains it."""
    unknown: _Count = Field(default=None, ge=0)
    """Nothing tells the cause."""


class Restart(Section):
    """When a failed attempt is followed by another, and when to give up."""

    no_progress: int = Field(default=3, ge=1)
    """Give up after this many restarts in a row without a new commit."""
    max_restarts: int | None = Field(default=None, ge=0)
    """Give up after this many restarts in all; null for no limit."""
    window: RestartWindow | None = None
    """Give up when more failures than these come in this time, such as 5 in 1h; null for no limit."""
    refill_after: Duration | None = Field(default=timedelta(hours=1))
    """Without a Session there are no commits: this much training in one attempt counts as one; null for none does."""
    budgets: Budgets = Field(default_factory=Budgets)
    """Restarts in a row without a new commit, by the kind of failure."""
    backoff: Backoff = Field(default_factory=Backoff)
    """How long to wait before a restart."""


class Watch(Section):
    """When a run that makes no step counts as hung. Each limit is auto (learnt), off, or a duration."""

    enabled: bool = True
    """Whether the watch ends a hung attempt; false leaves that to the timeouts of the collectives."""
    start: Patience = Field(default=_HALF_AN_HOUR)
    """Limit from the start of a worker to its restored state or first step."""
    restore: Patience = Field(default=_HALF_AN_HOUR)
    """Limit for loading a checkpoint."""
    first_step: Patience = Field(default=_HALF_AN_HOUR)
    """Limit for the first step of an attempt, compilation included."""
    step: Patience = Field(default="auto")
    """Limit for a step; auto learns it from the steps that were made."""
    save: Patience = Field(default=_HALF_AN_HOUR)
    """Limit for taking a checkpoint."""
    eval: Patience = Field(default=_HALF_AN_HOUR)
    """Limit for an evaluation."""
    end: Patience = Field(default=_HALF_AN_HOUR)
    """Limit from the first rank's end to the last one's."""
    floor: Duration = Field(default=timedelta(seconds=4))
    """Shortest limit that auto chooses."""
    ceiling: Duration = Field(default=_HALF_AN_HOUR)
    """Longest limit that auto chooses, and its limit before it has seen enough."""

    @model_validator(mode="after")
    def _in_order(self) -> Watch:
        if self.floor > self.ceiling:
            floor, ceiling = duration_text(self.floor), duration_text(self.ceiling)
            raise ValueError(f"floor ({floor}) is longer than ceiling ({ceiling}); make ceiling {floor} or more")
        return self


class Standby(Section):
    """Processes that wait with their imports done, so that a restart is short."""

    enabled: bool = True
    """Whether there are any; they need memory for the imports of each worker."""
    exclude: tuple[Module, ...] = ()
    """Packages that a standby must not import, such as one that looks at the environment when it is imported."""
