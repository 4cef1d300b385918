"""A short name for a bug: the same on every rank and in every attempt, another for another bug. Pure."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.launch.failures.traces import Frame

_NUM_FRAMES = 2
_LIBRARIES = ("site-packages/", "dist-packages/", "<frozen ", "<string>", "/torch/", "/lib/python3")
_STANDARD = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).resolve().parent.parent) + "/"

# What differs from rank to rank and from attempt to attempt. The order counts.
_VARIES = [
    (re.compile(r"['\"][^'\"]*/[^'\"]*['\"]"), "<path>"),
    (re.compile(r"(?<![\w<])(/|\./|[A-Za-z]:\\)[^\s'\",:;)\]]+"), "<path>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<n>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<n>"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", re.IGNORECASE), "<n>"),
    (re.compile(r"[-+]?\d+(\.\d+)*([eE][-+]?\d+)?(:\d+)?"), "<n>"),
    (re.compile(r"\s+"), " "),
]


def make(*parts: str) -> str:
    """Eight hexadecimal digits."""
    return hashlib.sha256("\n".join(parts).encode(errors="backslashreplace")).hexdigest()[:8]


def normal(text: str) -> str:
    """A message without what differs between ranks and attempts: numbers, addresses, paths, identities."""
    for pattern, stand_in in _VARIES:
        text = pattern.sub(stand_in, text)
    return text.strip()


def users_frames(frames: Iterable[Frame]) -> tuple[str, ...]:
    """The innermost frames of the user's own code, outermost first, as ``file:line in function``."""
    own = [frame for frame in frames if is_users(frame.file)]
    return tuple(f"{Path(frame.file).name}:{frame.line} in {frame.function}" for frame in own[-_NUM_FRAMES:])


def users_stack(stack: Iterable[str]) -> tuple[str, ...]:
    """The same of a stack: innermost first, as ``file:line in function``."""
    own = [frame for frame in stack if is_users(frame)]
    return tuple(frame.rpartition("/")[2] for frame in own[:_NUM_FRAMES])


def is_users(file: str) -> bool:
    """Whether a file, or a frame that begins with one, is the user's own code."""
    return not file.startswith((_STANDARD, _OWN)) and not any(part in file for part in _LIBRARIES)
