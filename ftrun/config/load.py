"""Read a job: a file, the ``--set`` arguments on top of it, and every mistake in both at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from ftrun.config import messages, source, values, yaml
from ftrun.config.findings import Finding, Mark, Path, config_error, dotted
from ftrun.config.job import AS_TYPED, JobConfig, LaunchValue
from ftrun.config.origins import Resolved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic_core import ErrorDetails

LaunchCheck = Callable[[Mapping[str, LaunchValue]], Mapping[str, str]]
"""Looks at the options under ``launch`` and says what is wrong, by the option's name."""


@dataclass(frozen=True)
class Setting:
    """One effective value.

    Attributes:
        path: the way to it from the top of the job.
        value: the value in the form of a job file: text, number, list, None.
        origin: ``job.yaml:6``, ``--set`` or ``default``.
    """

    path: Path
    value: object
    origin: str

    @property
    def name(self) -> str:
        """The path as it is written in messages and in ``--set``."""
        return dotted(self.path)


@dataclass(frozen=True)
class JobFile:
    """A job as understood, and where each value of it came from.

    Attributes:
        path: the file, or None for a job made of ``--set`` alone.
        text: what the file holds, byte order mark removed.
        config: the validated job.
        marks: where each given value was written, by its path. Values that are not here are defaults.
    """

    path: FilePath | None
    text: str
    config: JobConfig
    marks: Mapping[Path, Mark]

    def origin(self, path: Path) -> str:
        """``job.yaml:6``, ``--set`` or ``default``. A list with one item from ``--set`` is from ``--set``."""
        below = [mark for at, mark in self.marks.items() if at[: len(path)] == path]
        if any(mark.origin == "--set" for mark in below):
            return "--set"
        return self.marks[path].origin if path in self.marks else "default"

    def settings(self) -> list[Setting]:
        """Every effective value, in the order of the job's sections. A list of plain values is one value."""
        dumped = self.config.model_dump(mode="json")
        return [Setting(path, value, self.origin(path)) for path, value in _leaves(dumped, ())]

    def launch_options(self) -> dict[str, Resolved]:
        """The options under ``launch`` with their origins: a layer for :func:`ftrun.config.origins.merge`."""
        options = self.config.launch
        return {name: Resolved(value, self.origin(("launch", name))) for name, value in options.items()}


def load_job(path: FilePath | str | None, sets: Sequence[str] = (), check_launch: LaunchCheck | None = None) -> JobFile:
    """Read and validate a job.

    Args:
        path: the job file; None for a job that only ``sets`` and defaults make.
        sets: arguments of ``--set``, each ``a.b=value``, applied in order on top of the file.
        check_launch: knows torchrun's options; without it any option under ``launch`` passes.

    Raises:
        ConfigError: the file can't be read, or something in it or in ``sets`` is wrong. It lists all.
    """
    path = None if path is None else FilePath(path)
    document = yaml.Document({}, {}, (), "") if path is None else source.read(path)
    document = values.apply(document, sets)
    tree = as_typed(document)
    config, wrong = _validate(tree, document.marks)
    if check_launch is not None:
        wrong |= _check_launch(tree.get("launch"), document.marks, check_launch, wrong)
    # What YAML has said about a value need not be said again.
    told = {finding.at for finding in document.findings}
    findings = [*document.findings, *(finding for finding in wrong.values() if finding.at not in told)]
    if findings or config is None:
        raise config_error(findings, document.text)
    return JobFile(path, document.text, config, document.marks)


def to_json(job: JobFile) -> dict[str, object]:
    """The document of ``job.resolved.json``: the whole job, defaults filled in, and the origin of each value.

    ``config`` is itself a valid job file.
    """
    return {
        "schema_version": 1,
        "job": None if job.path is None else str(job.path),
        "config": job.config.model_dump(mode="json"),
        "origins": {setting.name: setting.origin for setting in job.settings()},
    }


def as_typed(document: yaml.Document) -> dict[str, yaml.Value]:
    """The tree with the user's spelling where a value is text for somebody else.

    Everything under ``args`` and ``env`` is text. Under ``launch``, a number that Python would spell in
    another way stays text, so that ``rdzv_id: 0123`` isn't 123.
    """
    tree = dict(document.value) if isinstance(document.value, dict) else {}
    for section in (*AS_TYPED, "launch"):
        if isinstance(tree.get(section), dict | tuple):
            tree[section] = _spelled(tree[section], (section,), document.marks)
    return tree


def _spelled(value: yaml.Value, path: Path, marks: Mapping[Path, Mark]) -> yaml.Value:
    if isinstance(value, dict):
        return {key: _spelled(inner, (*path, key), marks) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_spelled(inner, (*path, index), marks) for index, inner in enumerate(value))
    text = marks[path].text
    if value is None or text is None:
        return value
    respelled = isinstance(value, int | float) and not isinstance(value, bool) and str(value) != text
    return text if respelled or path[0] in AS_TYPED else value


def _validate(tree: dict[str, yaml.Value], marks: Mapping[Path, Mark]) -> tuple[JobConfig | None, dict[Path, Finding]]:
    """The job, or None and one finding for each place that is wrong."""
    try:
        return JobConfig.model_validate(tree), {}
    except ValidationError as invalid:
        wrong: dict[Path, Finding] = {}
        for error in invalid.errors(include_url=False):
            path = _path(error, tree)
            on_key = error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",)
            # Several errors at one place are the alternatives of one value: the first speaks for all.
            wrong.setdefault(path, _finding(path, messages.message(error, path), marks, on_key=on_key))
        return None, wrong


def _path(error: ErrorDetails, tree: yaml.Value) -> Path:
    """The part of pydantic's location that is a place in the job: no '[key]', no names of alternatives."""
    path: list[str | int] = []
    for part in error["loc"]:
        if isinstance(tree, dict) and part in tree:
            tree = tree[str(part)]
        elif isinstance(tree, tuple) and isinstance(part, int):
            tree = tree[part]
        elif error["type"] != "missing":
            continue
        path.append(part)
    return tuple(path)


def _finding(path: Path, text: str, marks: Mapping[Path, Mark], *, on_key: bool) -> Finding:
    """Points at the key or at the value."""
    mark = _nearest(path, marks)
    return Finding(mark.source, mark.key if on_key else mark.value, text)


def _nearest(path: Path, marks: Mapping[Path, Mark]) -> Mark:
    """The mark of a value; of something in it, where ``--set`` made the section; or of what is around it."""
    if path in marks:
        return marks[path]
    below = next((mark for at, mark in marks.items() if at[: len(path)] == path), None)
    return below or (_nearest(path[:-1], marks) if path else Mark("the job", None, None))


def _check_launch(
    launch: yaml.Value, marks: Mapping[Path, Mark], check: LaunchCheck, wrong: Mapping[Path, Finding]
) -> dict[Path, Finding]:
    """What torchrun's parser has against the options whose form is right."""
    if not isinstance(launch, dict):
        return {}
    bad = {path[1] for path in wrong if path[:1] == ("launch",) and len(path) > 1}
    right = {name: cast("LaunchValue", value) for name, value in launch.items() if name not in bad}
    found = {("launch", name): f"launch.{name}: {problem}" for name, problem in check(right).items()}
    return {path: _finding(path, text, marks, on_key=True) for path, text in found.items()}


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Plain values of a dumped job. Empty sections and lists of plain values are values themselves."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value
