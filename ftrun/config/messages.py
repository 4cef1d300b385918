"""Validation errors in the words of the person who wrote the job file."""

from __future__ import annotations

import difflib
import typing
from typing import TYPE_CHECKING

from ftrun.config.fields import Section
from ftrun.config.findings import Path, dotted
from ftrun.config.job import JobConfig
from ftrun.config.supervisor import Budgets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

_SECTION_TYPES = {"model_type", "mapping_type", "dict_type"}
_NUMBER_TYPES = {"int_type", "int_parsing", "int_from_float"}


def message(error: ErrorDetails, path: Path) -> str:
    """One line for one error: what is wrong with the value at ``path``, and what to write instead."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"unknown key '{dotted(path)}'; {_suggestion(path)}"
    if kind == "missing":
        return f"missing key '{dotted(path)}'; add it ({_description(path)})"
    name = dotted(path)
    return f"{name}: {_complaint(error)}" if name else _complaint(error)


def _complaint(error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_type":
        return _not_text(value)
    if kind == "string_too_short":
        return "is empty; write a value or remove the key"
    if kind == "greater_than_equal":
        return f"must be {context['ge']:g} or more, not {value}"
    if kind == "literal_error":
        return f"expects {context['expected']}, not {shown(value)}"
    if kind == "less_than_equal":
        return f"must be {context['le']:g} or less, not {value}"
    if kind == "bool_type":
        return f"expects true or false, not {shown(value)}"
    if kind == "float_type":
        return f"expects a number such as 0.1, not {shown(value)}"
    if kind in _NUMBER_TYPES:
        return f"expects a whole number such as 3, not {shown(value)}"
    if kind == "tuple_type":
        example = f"; write for example [{', '.join(str(value).split())}]" if _is_scalar(value) else ""
        return f"expects a list, not {shown(value)}{example}"
    if kind in _SECTION_TYPES:
        return f"expects keys and values, not {shown(value)}; remove it or give it keys"
    return error["msg"]


def shown(value: object) -> str:
    """A value of the tree as a message names it."""
    if value is None:
        return "nothing"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _not_text(value: object) -> str:
    if value is None:
        return "expects text, not nothing; write '' for an empty text, or remove it"
    if _is_scalar(value):
        return f"expects text, not {shown(value)}; put it in quotes"
    return f"expects text, not {shown(value)}"


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float)


def _suggestion(path: Path) -> str:
    """The key that was probably meant: the nearest in its section, or the same one in another section."""
    key, section = str(path[-1]).replace("-", "_"), _section(path[:-1])
    keys = list(section.model_fields) if section else []
    for known in _known(JobConfig, ()):
        # 'keep_last' is 'keep.last', and 'max_restarts' at the top is 'restart.max_restarts'.
        if key in (known[-1], "_".join(known[-2:])) and known[-1] not in keys:
            return f"did you mean '{dotted(known)}'?"
    if near := difflib.get_close_matches(key, keys, n=1):
        return f"did you mean '{near[0]}'?"
    launch = " (options of torchrun go under 'launch')" if len(path) == 1 else ""
    return f"the keys here are {', '.join(keys)}{launch}"


def _known(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every key that a job may hold, outside lists."""
    for name, field in section.model_fields.items():
        yield (*path, name)
        inner = _as_section(field.annotation)
        # Kinds of failure are words like 'data' and 'exit', which mean something else anywhere else.
        if inner is not None and inner is not Budgets and not typing.get_args(field.annotation):
            yield from _known(inner, (*path, name))


def _section(path: Path) -> type[Section] | None:
    """The model that validates the section at ``path``."""
    section: type[Section] | None = JobConfig
    for part in path:
        if isinstance(part, str) and section is not None:
            section = _as_section(section.model_fields[part].annotation)
    return section


def _as_section(annotation: object) -> type[Section] | None:
    """The model of a section, or of the items of a list of sections."""
    candidates = (annotation, *typing.get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def _description(path: Path) -> str:
    section = _section(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return (field.description if field and field.description else "required").rstrip(".")
