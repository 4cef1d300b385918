"""Shifts the wall clock of a Python process by ``CLOCK_AHEAD`` seconds. Python imports this by itself, before all else.

Files keep the times that the machine gives them, as those of a file server would.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import time
from pathlib import Path
from typing import Self

_AHEAD = float(os.environ.get("CLOCK_AHEAD", "0"))
_NO_COMPILER = Path(__file__).parents[2] / "no_compiler" / "sitecustomize.py"
_time, _time_ns = time.time, time.time_ns


class _Datetime(dt.datetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return super().now(tz) + dt.timedelta(seconds=_AHEAD)

    @classmethod
    def utcnow(cls) -> Self:
        return cls.now(dt.UTC).replace(tzinfo=None)


time.time = lambda: _time() + _AHEAD
time.time_ns = lambda: _time_ns() + int(_AHEAD * 1e9)
dt.datetime = _Datetime  # type: ignore[misc]

# Only one file of this name is ever imported by itself.
_spec = importlib.util.spec_from_file_location("no_compiler", _NO_COMPILER)
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))
