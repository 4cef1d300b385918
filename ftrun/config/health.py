"""Section of the job file about sick hardware: ``health``, with when a node is left out for what it did."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction
from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from ftrun.config.fields import Duration, Section
from ftrun.config.units import SHARE_PATTERN, duration_text

_PART_PATTERN = "^[1-9][0-9]*/[1-9][0-9]*$"
_WEEK = timedelta(weeks=1)
_Marks = int | None


def part(text: str) -> Fraction:
    """``1/3`` or ``25%`` as a number."""
    return Fraction(int(text[:-1]), 100) if text.endswith("%") else Fraction(text)


def _part(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not re.match(SHARE_PATTERN, text) and not re.match(_PART_PATTERN, text):
        raise ValueError(f"{value!r} is no part of the nodes; write for example 1/3 or 25%")
    if part(text) >= 1:
        raise ValueError(f"{text} is all of the nodes; write for example 1/3 or 25%")
    return text


Part = Annotated[
    str,
    PlainValidator(_part),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "pattern": p} for p in (_PART_PATTERN, SHARE_PATTERN)],
            "examples": ["1/3", "25%"],
        }
    ),
]


class After(Section):
    """How many of each within the window exclude a node; null for none do. Those of a kind count once in an attempt."""

    device: _Marks = Field(default=1, ge=1)
    """A GPU or a memory bank that needs a reset or has to be replaced, by the kernel log."""
    check: _Marks = Field(default=1, ge=1)
    """A wrong result under load."""
    host: _Marks = Field(default=2, ge=1)
    """The kernel log reports trouble with PCIe, a network adapter, the cooling, and so does no other node's."""
    lost: _Marks = Field(default=2, ge=1)
    """The node was lost without notice, and no other one with it."""
    contained_error: _Marks = Field(default=3, ge=1)
    """A memory error of a GPU that a restart mends (Xid 94)."""
    suspect_device: _Marks = Field(default=2, ge=1)
    """An error of a GPU that the program may have caused, on this node alone."""
    host_out_of_memory: _Marks = Field(default=2, ge=1)
    """The kernel killed a process for memory, on this node alone."""
    segfault: _Marks = Field(default=2, ge=1)
    """A crash of native code, on this node alone."""
    storage: _Marks = Field(default=3, ge=1)
    """A file system failed, on this node alone."""
    killed: _Marks = Field(default=3, ge=1)
    """A process was ended by a signal from outside, on this node alone."""
    hang: _Marks = Field(default=3, ge=1)
    """The watch saw no progress of this node alone."""


class Nodes(Section):
    """When a node of several is left out for what it did, and when it may come back."""

    exclude: bool = True
    """Whether ftrun leaves nodes out by itself; `ftrun nodes exclude` does so in any case."""
    after: After = Field(default_factory=After)
    """How many of each kind of trouble within the window exclude a node."""
    window: Duration = Field(default=_WEEK)
    """For how long something counts against its node."""
    first: Duration = Field(default=timedelta(hours=4))
    """How long a node is left out the first time; four times as long each time after that."""
    max: Duration = Field(default=_WEEK)
    """Longest time that a node is left out for."""
    most: Part = "1/3"
    """Part of the nodes that may be left out at once; of three or more it is one at least."""
    check: bool = True
    """Whether a node that comes back has to pass a check under load of a few seconds."""
    probation: Duration = Field(default=_WEEK)
    """How long a node that has come back is left out again for anything that counts at all."""

    @model_validator(mode="after")
    def _in_order(self) -> Nodes:
        if self.first > self.max:
            first, longest = duration_text(self.first), duration_text(self.max)
            raise ValueError(f"first ({first}) is longer than max ({longest}); make max {first} or more")
        return self


class Health(Section):
    """What is made of hardware that seems to be sick."""

    nodes: Nodes = Field(default_factory=Nodes)
    """When a node of several is left out for what it did, and when it may come back."""
