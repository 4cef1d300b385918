"""What is wrong with a job file, where, and how it is shown to the person who wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

Path = tuple[str | int, ...]
"""The way to one value from the top of a job: names of keys, numbers of list items."""

# A longer line of source is shown in part.
_WIDEST = 160
# The line breaks that YAML knows; str.splitlines() knows more and would count differently.
_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


@dataclass(frozen=True)
class Mark:
    """Where and how one value was written.

    Attributes:
        source: the file's name as the user gave it, or the whole ``--set a.b=c``.
        key: 1-based (line, column) where its key begins; None for ``--set``.
        value: 1-based (line, column) where the value begins; None for ``--set``.
        text: the characters of a scalar as typed, without quotes; None for lists and sections.
    """

    source: str
    key: tuple[int, int] | None
    value: tuple[int, int] | None
    text: str | None = None

    @property
    def origin(self) -> str:
        """``job.yaml:6`` or ``--set``."""
        return "--set" if self.key is None else f"{self.source}:{self.key[0]}"


@dataclass(frozen=True)
class Finding:
    """One mistake. ``at`` is its 1-based (line, column), or None where there is no line to point at."""

    source: str
    at: tuple[int, int] | None
    text: str


def dotted(path: Path) -> str:
    """``checkpoint.keep.last``: how a path is spelled in messages and in ``--set``."""
    return ".".join(str(part) for part in path)


def config_error(findings: Iterable[Finding], text: str = "") -> ConfigError:
    """All findings as one error, in the order of their lines, each with an excerpt of the source ``text``."""
    lines = _LINE_BREAK.split(text)
    ordered = sorted(findings, key=lambda finding: (finding.at is None, finding.at or (0, 0)))
    return ConfigError([_render(finding, lines) for finding in ordered])


def position(text: str, offset: int) -> tuple[int, int]:
    """The 1-based (line, column) of a character."""
    before = _LINE_BREAK.split(text[:offset])
    return len(before), len(before[-1]) + 1


def _render(finding: Finding, lines: list[str]) -> str:
    if finding.at is None:
        return f"{finding.source}: {finding.text}"
    number, column = finding.at
    head = f"{finding.source}:{number}:{column}: {finding.text}"
    if number > len(lines) or not lines[number - 1].strip():
        return head
    line = lines[number - 1]
    if len(line) > _WIDEST:
        skipped = max(0, column - _WIDEST // 2)
        line, column = line[skipped : skipped + _WIDEST], column - skipped
    shown = "".join(char if char.isprintable() or char == "\t" else "?" for char in line)
    # Tabs are kept in front of the caret, so that it stands right at any tab width.
    indent = "".join("\t" if char == "\t" else " " for char in line[: column - 1])
    return f"{head}\n{number:>5} | {shown}\n{'':>5} | {indent}^"
