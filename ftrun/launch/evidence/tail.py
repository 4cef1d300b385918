"""Bounded reading of files that a worker wrote: they may be torn, binary, endless, or no file at all."""

from __future__ import annotations

import itertools
import os
import re
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST_LINE = 500
# Colours and cursor movements of a terminal, and every other control character but the tab.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def read_at(path: Path, start: int, limit: int) -> bytes:
    """At most ``limit`` bytes from ``start``, which counts from the end if negative; nothing if it can't be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b""
        return os.pread(descriptor, limit, start if start >= 0 else max(0, status.st_size + start))
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def last_lines(path: Path, count: int, limit: int = 32 << 10) -> tuple[str, ...]:
    """The last lines of a log that aren't blank, fit to be shown: no control characters, none endless.

    Of a line that a progress bar has written over and over, what was to be seen last.
    """
    text = read_at(path, -limit, limit).decode(errors="replace")
    newest_first = (shown(line.rstrip("\r").rpartition("\r")[2]) for line in reversed(text.split("\n")))
    lines = itertools.islice((line for line in newest_first if line.strip()), count)
    return tuple(reversed(list(lines)))


def shown(line: str) -> str:
    """A line of unknown origin as it can be put before people."""
    clean = _CONTROL.sub("", line).rstrip()
    return clean if len(clean) <= _LONGEST_LINE else f"{clean[:_LONGEST_LINE]}... ({len(clean)} characters)"
