"""``--set a.b=value``: single values on top of a job, in the syntax of the job file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.config import yaml
from ftrun.config.findings import Finding, Mark, Path, config_error, dotted
from ftrun.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class _RefusedError(Exception):
    """A path that leads nowhere; the message says why."""


def apply(document: yaml.Document, arguments: Sequence[str]) -> yaml.Document:
    """Set each ``a.b=value`` in a job's tree, in order; a later one wins.

    A value is read as in the file (``--set args=[--lr,3e-4]``), an empty one is the empty text, and numbers
    in the path count list items (``faults.0.rank=1``). Findings of the file stay as they are.

    Raises:
        ConfigError: an argument has no ``=``, its value is no YAML, or its path crosses a plain value.
    """
    problems: list[str] = []
    for argument in arguments:
        try:
            document = _set(document, argument)
        except _RefusedError as refused:
            problems.append(f"--set {argument}: {refused}")
        except ConfigError as error:
            problems += error.findings
    if problems:
        raise ConfigError(problems)
    return document


def _set(document: yaml.Document, argument: str) -> yaml.Document:
    name, equals, text = argument.partition("=")
    keys = name.strip().split(".")
    if not equals:
        raise _RefusedError(f"has no value; write --set {name}=value")
    if not all(keys):
        raise _RefusedError("names no key; write for example --set checkpoint.every=10m")
    path = _resolve(document.value, keys)
    given = _parse(text.strip(), f"--set {argument}")
    marks = {at: mark for at, mark in document.marks.items() if at[: len(path)] != path}
    marks |= {(*path, *at): replace(mark, key=None, value=None) for at, mark in given.marks.items()}
    return replace(document, value=_put(document.value, path, given.value), marks=marks)


def _parse(text: str, source: str) -> yaml.Document:
    if not text:
        return yaml.Document("", {(): Mark(source, None, None, "")}, (), "")
    try:
        given = yaml.parse(text, source)
    except ConfigError as error:
        # Line and column would be those of the argument's value, which nobody counts.
        raise _RefusedError(_without_place(error.findings[0], source)) from None
    if given.findings:
        raise config_error([Finding(source, None, finding.text) for finding in given.findings])
    if not given.marks:  # only a comment
        raise _RefusedError("has no value; put a value that begins with '#' in quotes")
    return given


def _without_place(finding: str, source: str) -> str:
    return finding.splitlines()[0].removeprefix(source).partition(" ")[2]


def _resolve(tree: yaml.Value, keys: Sequence[str]) -> Path:
    """The path with list items counted by numbers. Sections that are not there yet are fine."""
    path: list[str | int] = []
    for key in keys:
        if isinstance(tree, tuple):
            if not (key.isdecimal() and int(key) < len(tree)):
                raise _RefusedError(f"'{dotted(tuple(path))}' is a list of {len(tree)}; count its items from 0")
            path.append(int(key))
            tree = tree[int(key)]
        elif isinstance(tree, dict | None):
            path.append(key)
            tree = (tree or {}).get(key)
        else:
            raise _RefusedError(f"'{dotted(tuple(path))}' is a plain value and has no '{key}'; check the path")
    return tuple(path)


def _put(tree: yaml.Value, path: Path, value: yaml.Value) -> yaml.Value:
    """A copy of the tree with one value replaced."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(tree, tuple):
        return tuple(_put(item, rest, value) if index == head else item for index, item in enumerate(tree))
    section: Mapping[str, yaml.Value] = tree if isinstance(tree, dict) else {}
    return {**section, str(head): _put(section.get(str(head)), rest, value)}
