"""The kinds of value that a job file holds, each with the one validator that gives its one message."""

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
    WithJsonSchema,
)

from ftrun.config.units import (
    DURATION_PATTERN,
    SHARE_PATTERN,
    SIZE_PATTERN,
    STEPS_PATTERN,
    WINDOW_PATTERN,
    Window,
    duration_text,
    interval_text,
    parse_duration,
    parse_interval,
    parse_reserve,
    parse_size,
    parse_steps,
    parse_window,
    size_text,
    steps_text,
    window_text,
)
from ftrun.contract import Every

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


def _patience(value: object) -> timedelta | Literal["auto", "off"]:
    if value in ("auto", "off"):
        return "auto" if value == "auto" else "off"
    if value is False or value is None:
        raise ValueError("expects auto, off or a duration; write off for no limit")
    try:
        limit = parse_duration(value)
    except ValueError as error:
        raise ValueError(str(error).replace("a duration", "auto, off or a duration")) from None
    if not limit:
        raise ValueError(f"{value!r} is no time at all; write off for no limit")
    return limit


def _patience_text(limit: timedelta | str) -> str:
    return limit if isinstance(limit, str) else duration_text(limit)


def _size(value: object) -> int:
    size = parse_size(value)
    if not size:
        raise ValueError(f"{value!r} is nothing at all; write for example 200MB")
    return size


def _unchanged(value: object) -> object:
    return value


def _frozen(value: Mapping[_K, _V]) -> Mapping[_K, _V]:
    return MappingProxyType(dict(value))


def empty() -> Mapping[str, Never]:
    """The default of a section that is a frozen mapping."""
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
Size = Annotated[
    int,
    PlainValidator(_size),
    PlainSerializer(size_text),
    WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["200MB", "1.5GiB"]}),
]
Reserve = Annotated[
    str,
    PlainValidator(parse_reserve),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "pattern": p} for p in (SHARE_PATTERN, SIZE_PATTERN)],
            "examples": ["10%", "200GB"],
        }
    ),
]
Steps = Annotated[
    int,
    PlainValidator(parse_steps),
    PlainSerializer(steps_text),
    WithJsonSchema({"type": "string", "pattern": STEPS_PATTERN, "examples": ["10000 steps"]}),
]
DriverOptions = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], LaunchScalar],
    *_Frozen,
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
Patience = Annotated[
    timedelta | Literal["auto", "off"],
    PlainValidator(_patience),
    PlainSerializer(_patience_text),
    WithJsonSchema(
        {
            "anyOf": [{"enum": ["auto", "off"]}, {"type": "string", "pattern": DURATION_PATTERN}],
            "examples": ["auto", "off", "30m"],
        }
    ),
]
"""A limit of the watch: learnt from what was seen, none, or a given one."""
RestartWindow = Annotated[
    Window,
    PlainValidator(parse_window),
    PlainSerializer(window_text),
    WithJsonSchema({"type": "string", "pattern": WINDOW_PATTERN, "examples": ["5 in 1h"]}),
]


class Section(BaseModel):
    """A part of the job file: frozen, strict, and closed to keys that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
