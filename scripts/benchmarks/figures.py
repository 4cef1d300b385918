"""A figure: a ratio or a count with its control, its target and what was measured beside it. Pure."""

from __future__ import annotations

import json
import operator
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COMPARE = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True)
class Target:
    """What a figure should be.

    Attributes:
        how: ``<=``, ``>=`` or ``=``.
        limit: against which number.
    """

    how: str
    limit: float

    def met_by(self, value: float) -> bool:
        return bool(_COMPARE[self.how](value, self.limit))

    def __str__(self) -> str:
        return f"{self.how} {self.limit:g}"


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        id: its name, ``subject.what``.
        value: the median; None where it could not be measured.
        target: what it should be.
        control: the same thing measured twice, as the same kind of number; None where there is no such thing.
        n: how many measurements the value is the median (or the count, or the share) of.
        reference: what was measured beside it, by name.
        notes: lines for people.
    """

    id: str
    value: float | None
    target: Target
    control: float | None = None
    n: int = 0
    reference: Mapping[str, float | str | None] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """``met``, ``not met`` or ``not measured``."""
        if self.value is None:
            return "not measured"
        return "met" if self.target.met_by(self.value) else "not met"


def median(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def ratio(above: float | None, below: float | None) -> float | None:
    """A quotient, where both sides were measured."""
    return above / below if above is not None and below else None


def spread(values: Sequence[float], unit: str = "s") -> str:
    """A series in a few words: median, extremes and how many."""
    if not values:
        return "nothing measured"
    return f"{statistics.median(values):.3f} {unit} ({min(values):.3f} to {max(values):.3f}, n={len(values)})"


def to_json(figures: Sequence[Figure]) -> str:
    """Each figure's id with ``value``, ``control``, ``n`` and ``reference``."""
    document: dict[str, Any] = {
        each.id: {"value": each.value, "control": each.control, "n": each.n, "reference": dict(each.reference)}
        for each in figures
    }
    return json.dumps(document, indent=1) + "\n"


def table(figures: Sequence[Figure]) -> str:
    """The figures as aligned text, notes below."""
    head = ("figure", "value", "target", "", "control", "n", "beside it")
    rows = [head, *(_row(each) for each in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for each in figures:
        lines += ["", each.id, *(f"  {note}" for note in each.notes)] if each.notes else []
    return "\n".join(lines)


def _row(figure: Figure) -> tuple[str, ...]:
    beside = ", ".join(f"{name} {_number(value)}" for name, value in figure.reference.items())
    value, control = _number(figure.value), _number(figure.control)
    return figure.id, value, str(figure.target), figure.verdict, control, str(figure.n), beside


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"
