"""The error file: how a worker's last words reach the launcher. JSON in the shape that torch's ``@record`` uses.

Standard library only: it must work when importing torch is what failed.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.errors import CorruptCheckpoint, LostSnapshot, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "TORCHELASTIC_ERROR_FILE"

# An honest error file holds a message and a traceback.
_LARGEST = 8 << 20


@dataclass(frozen=True)
class ErrorRecord:
    """What an error file says.

    Attributes:
        message: the exception, one line.
        traceback: the Python traceback, empty if there is none.
        time: seconds since 1970, 0.0 if unknown.
        kind: ``usage``, ``corrupt_checkpoint``, ``lost_snapshot`` or ``exception``.
        attempt: the checkpoint that was found corrupt.
    """

    message: str
    traceback: str = ""
    time: float = 0.0
    kind: str = "exception"
    attempt: str = ""


def write(error: BaseException, environment: Mapping[str, str]) -> None:
    """Write the error file that the launcher asked for, unless the script has already written it."""
    target = environment.get(VARIABLE)
    if not target or Path(target).exists():
        return
    now = time.time()
    trace = "".join(traceback.format_exception(error))
    document: dict[str, Any] = {
        "message": {
            "message": f"{type(error).__name__}: {_text(error)}",
            "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))},
        },
        "ftrun": {"time": now, "kind": _kind(error), "attempt": getattr(error, "attempt", "")},
    }
    temporary = Path(f"{target}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(document))
        temporary.replace(target)
    except OSError:
        # A full disk must not hide the error that is on its way to the console.
        temporary.unlink(missing_ok=True)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's __str__ may do anything, and the error itself matters more
        return "<its text can't be made>"


def _kind(error: BaseException) -> str:
    if isinstance(error, CorruptCheckpoint):
        return "corrupt_checkpoint"
    if isinstance(error, LostSnapshot):
        return "lost_snapshot"
    return "usage" if isinstance(error, UsageError) else "exception"


def read(path: Path) -> ErrorRecord | None:
    """Read an error file, of ftrun or of torch. A torn or foreign one is evidence too, never an exception."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    try:
        document = json.loads(raw)
        outer = document["message"]
        if isinstance(outer, str):
            return ErrorRecord(outer)
        extra, own = outer.get("extraInfo", {}), document.get("ftrun", {})
        return ErrorRecord(
            message=str(outer["message"]),
            traceback=str(extra.get("py_callstack", "")),
            time=_time(own.get("time") or extra.get("timestamp")),
            kind=str(own.get("kind", "exception")),
            attempt=str(own.get("attempt", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ErrorRecord(f"unreadable error file ({size} bytes)")


def _time(value: str | float | None) -> float:
    at = float(value or 0.0)
    return at if math.isfinite(at) else 0.0
