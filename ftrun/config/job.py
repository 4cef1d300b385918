"""What a job file may hold, as frozen models. The docstring under a field is its help.

Validation is strict: YAML has said what is text and what is a number, and nothing is converted in silence.
Fields with several forms have one validator of their own, so that one mistake gives one message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated, Literal, Never, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ftrun.config.units import (
    AUTO,
    DURATION_PATTERN,
    STEPS_PATTERN,
    duration_text,
    interval_text,
    parse_duration,
    parse_interval,
)
from ftrun.contract import Every, Fault

AS_TYPED = ("args", "env")
"""Sections whose values are text for somebody else: they are passed on as typed, ``3e-4`` as ``3e-4``."""

_K = TypeVar("_K")
_V = TypeVar("_V")

_OWNED = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
_OWNED_PREFIXES = ("ROLE_", "TORCHELASTIC_", "FTRUN_")

_SCALAR_SCHEMA = {"type": ["string", "number", "boolean"]}
_RANK_SCHEMA = {"type": "integer", "minimum": 0}
_INTERVAL_SCHEMA = {
    "anyOf": [
        {"const": "auto"},
        {"type": "string", "pattern": STEPS_PATTERN},
        {"type": "string", "pattern": DURATION_PATTERN},
    ],
    "examples": ["auto", "500 steps", "10m"],
}


def _name(value: str) -> str:
    if wrong := sorted(set(re.sub(r"[A-Za-z0-9._-]", "", value))):
        raise ValueError(f"{value!r} holds {wrong[0]!r}; use letters, digits, '.', '_' and '-'")
    if value.startswith((".", "-")):
        raise ValueError(f"{value!r} begins with {value[0]!r}; begin with a letter or a digit")
    return value


def _module(value: str) -> str:
    if not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"{value!r} is not the dotted name of a module; write for example my_pkg.hooks")
    return value


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not the name of an environment variable; use letters, digits and '_'")
    if name in _OWNED or name.startswith(_OWNED_PREFIXES):
        raise ValueError("the launcher sets this variable for every worker; remove it")
    return name


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        spelled = name.lstrip("-").replace("-", "_").lower()
        raise ValueError(f"options are written with underscores here; write {spelled!r}")
    return name


LaunchScalar = str | int | float | bool
LaunchValue = LaunchScalar | tuple[LaunchScalar, ...]


def _launch_value(value: object) -> LaunchValue:
    if isinstance(value, LaunchScalar):
        return value
    if isinstance(value, tuple) and all(isinstance(item, LaunchScalar) for item in value):
        return value
    found = "nothing" if value is None else "a section" if isinstance(value, dict) else "a list within a list"
    raise ValueError(f"expects a value or a list of values, not {found}; remove the key to keep the default")


def _tee(value: object) -> tuple[int, ...] | Literal["all"]:
    if value == "all":
        return "all"
    if isinstance(value, tuple) and all(type(item) is int and item >= 0 for item in value):
        return value
    raise ValueError("expects 'all' or a list of local ranks; write for example [0]")


def _unchanged(value: object) -> object:
    return value


def _frozen(value: Mapping[_K, _V]) -> Mapping[_K, _V]:
    return MappingProxyType(dict(value))


def _empty() -> Mapping[str, Never]:
    return MappingProxyType({})


_Frozen = (AfterValidator(_frozen), PlainSerializer(dict))

Text = Annotated[str, Field(min_length=1)]
JobName = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_name),
    WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9._-]*$"}),
]
Module = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_module),
    WithJsonSchema({"type": "string", "pattern": r"^[^\s./-]+(\.[^\s./-]+)*$"}),
]
Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(duration_text),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["90s", "10m", "1.5h"]}),
]
Interval = Annotated[
    Every,
    PlainValidator(parse_interval),
    PlainSerializer(interval_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "auto"},
                *({"type": "string", "pattern": p} for p in (STEPS_PATTERN, DURATION_PATTERN)),
            ],
            "examples": ["auto", "500 steps", "10m"],
        }
    ),
]
Tee = Annotated[
    tuple[int, ...] | Literal["all"],
    PlainValidator(_tee),
    PlainSerializer(_unchanged),
    WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "array", "items": _RANK_SCHEMA}]}),
]
Argument = Annotated[str, WithJsonSchema(_SCALAR_SCHEMA)]
Environment = Annotated[
    Mapping[
        Annotated[str, AfterValidator(_variable)],
        Annotated[str, WithJsonSchema(_SCALAR_SCHEMA)],
    ],
    *_Frozen,
]
LaunchOptions = Annotated[
    Mapping[
        Annotated[str, AfterValidator(_option)],
        Annotated[
            LaunchValue,
            PlainValidator(_launch_value),
            WithJsonSchema({"anyOf": [_SCALAR_SCHEMA, {"type": "array", "items": _SCALAR_SCHEMA}]}),
        ],
    ],
    *_Frozen,
]


class Section(BaseModel):
    """A part of the job file: frozen, strict, and closed to keys that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Keep(Section):
    """Which commits stay when newer ones arrive."""

    last: int = Field(default=3, ge=2)
    """How many of the latest commits are kept; two at least, so that a bad one has a predecessor."""


class Checkpoint(Section):
    """Where checkpoints go and how often they are taken."""

    root: Text | None = None
    """Directory or URL of the checkpoints; without it, checkpoints/ in the run directory."""
    every: Interval = Field(default=AUTO)
    """How often a checkpoint is taken: a number of steps, a duration, or auto (10m)."""
    keep: Keep = Field(default_factory=Keep)
    """Which commits stay when newer ones arrive."""


class Backoff(Section):
    """How long to wait before a restart; doubles from the first to the longest."""

    first: Duration = Field(default=timedelta(seconds=1))
    """Wait before the second restart in a row without a new commit; the first one comes at once."""
    max: Duration = Field(default=timedelta(minutes=5))
    """Longest wait."""

    @model_validator(mode="after")
    def _in_order(self) -> Backoff:
        if self.first > self.max:
            first, longest = duration_text(self.first), duration_text(self.max)
            raise ValueError(f"first ({first}) is longer than max ({longest}); make max {first} or more")
        return self


class Restart(Section):
    """When a failed attempt is followed by another, and when to give up."""

    no_progress: int = Field(default=3, ge=1)
    """Give up after this many restarts in a row without a new commit."""
    max_restarts: int | None = Field(default=None, ge=0)
    """Give up after this many restarts in all; null for no limit."""
    backoff: Backoff = Field(default_factory=Backoff)
    """How long to wait before a restart."""


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
    do: Literal["kill", "raise", "exit", "hang"]
    """What happens: kill (SIGKILL), raise an exception, exit with code 1, or hang."""

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
    launch: LaunchOptions = Field(default_factory=_empty)
    """Options of torchrun, with underscores."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Where checkpoints go and how often they are taken."""
    restart: Restart = Field(default_factory=Restart)
    """When a failed attempt is followed by another, and when to give up."""
    signals: Signals = Field(default_factory=Signals)
    """What happens when the run is asked to stop."""
    logs: Logs = Field(default_factory=Logs)
    """What becomes of the workers' output."""
    env: Environment = Field(default_factory=_empty)
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
