"""Durations, sizes and checkpoint intervals as people write them: ``10m``, ``200GB``, ``500 steps``.

Parsers raise ValueError with a message that says what to write instead. A number without a unit is refused:
whoever reads ``grace: 30`` can't know whether it means seconds or minutes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction

from ftrun.contract import AUTO, Every

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SECONDS = {
    "d": Fraction(86400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
}

# These go into the JSON schema too, so they stay in the syntax that Python and JavaScript share.
DURATION_PATTERN = "^(?=[0-9])" + " ?".join(f"(?:({_NUMBER}) ?{unit})?" for unit in _SECONDS) + "$"
STEPS_PATTERN = "^([1-9][0-9]*) steps?$"
WINDOW_PATTERN = f"^([1-9][0-9]*) in {DURATION_PATTERN[1:]}"
SIZE_PATTERN = f"^({_NUMBER}) ?([kKMGTP]?B|[KMGTP]iB)$"
SHARE_PATTERN = "^([0-9]|[1-9][0-9])%$"


@dataclass(frozen=True)
class Window:
    """So many things in so long: ``5 in 1h``."""

    count: int
    time: timedelta


def parse_duration(value: object) -> timedelta:
    """``500ms``, ``90s``, ``10m``, ``1.5h``, ``2d``, or several from large to small: ``1h30m``."""
    if isinstance(value, timedelta):
        return value
    match = re.match(DURATION_PATTERN, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_unlike(value, "a duration", "500ms, 90s, 10m, 1.5h or 2d", "{0}s, {0}m or {0}h"))
    pairs = zip(match.groups(), _SECONDS.values(), strict=True)
    seconds = sum(Fraction(number) * unit for number, unit in pairs if number)
    try:
        return timedelta(microseconds=round(seconds * 1_000_000))
    except OverflowError:
        raise ValueError(f"{value!r} is too long; write 999999999d or less") from None


def parse_size(value: object) -> int:
    """``200GB`` (powers of 1000) or ``1.5TiB`` (powers of 1024), in bytes."""
    match = re.match(SIZE_PATTERN, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_unlike(value, "a size", "500MB, 200GB or 1.5TiB", "{0}MB, {0}GB or {0}GiB"))
    number, unit = match.groups()
    base = 1024 if unit.endswith("iB") else 1000
    return int(Fraction(number) * base ** "BKMGTP".index(unit[0].upper()))


def parse_reserve(value: object) -> str:
    """A share of a disk or a size, as it is typed: ``10%`` or ``200GB``."""
    text = value.strip() if isinstance(value, str) else ""
    if not re.match(SHARE_PATTERN, text) and not re.match(SIZE_PATTERN, text):
        raise ValueError(_unlike(value, "a size or a share of the disk", "10% or 200GB", "{0}% or {0}GB"))
    return text


def parse_steps(value: object) -> int:
    """``500 steps`` or ``1 step``."""
    match = re.match(STEPS_PATTERN, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_unlike(value, "a number of steps", "500 steps", "'{0} steps'"))
    return int(match[1])


def parse_interval(value: object) -> Every:
    """``auto``, ``500 steps`` or a duration."""
    if isinstance(value, Every):
        return value
    if value == "auto":
        return AUTO
    if isinstance(value, str) and re.match(STEPS_PATTERN, value.strip()):
        return Every(steps=parse_steps(value))
    try:
        seconds = parse_duration(value).total_seconds()
    except ValueError:
        unlike = _unlike(value, "an interval", "auto, 500 steps or 10m", "'{0} steps' or {0}m")
        raise ValueError(unlike) from None
    if not seconds:
        raise ValueError(f"{value!r} is no time at all; write auto, 500 steps or 10m")
    return Every(seconds=seconds)


def parse_window(value: object) -> Window:
    """``5 in 1h``: a count and a duration."""
    if isinstance(value, Window):
        return value
    match = re.match(WINDOW_PATTERN, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_unlike_a_window(value))
    time = parse_duration(match[0].partition(" in ")[2])
    if not time:
        raise ValueError(f"{value!r} is no time at all; write for example {match[1]} in 1h")
    return Window(int(match[1]), time)


def _unlike_a_window(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return "expects a count and a duration such as 5 in 1h"
    text = str(value).strip()
    if re.fullmatch(r"[0-9]+", text):
        return f"{text} says no time; write for example {max(1, int(text))} in 1h"
    if count := re.match(r"([0-9]+) *(?:in|per|/) *([0-9]+)$", text):
        return f"{count[2]} has no unit; write {count[1]} in {count[2]}m or {count[1]} in {count[2]}h"
    return f"{text!r} is not a count and a duration; write for example 5 in 1h"


def size_text(size: int) -> str:
    """The exact size as a user would type it: ``200MB``; ``parse_size`` reads it back."""
    for base, units in ((1000, ("TB", "GB", "MB", "kB")), (1024, ("TiB", "GiB", "MiB", "KiB"))):
        for power, unit in zip((4, 3, 2, 1), units, strict=True):
            if size and size % base**power == 0:
                return f"{size // base**power}{unit}"
    return f"{size}B"


def steps_text(steps: int) -> str:
    """A number of steps as a user would type it."""
    return f"{steps} step{'s' if steps != 1 else ''}"


def window_text(window: Window) -> str:
    """The window as a user would type it."""
    return f"{window.count} in {duration_text(window.time)}"


def duration_text(value: timedelta) -> str:
    """The exact duration as a user would type it: ``1h30m``, ``1.5ms``; ``parse_duration`` reads it back."""
    left = value // timedelta(microseconds=1)
    parts = []
    for unit, seconds in _SECONDS.items():
        size = int(seconds * 1_000_000)
        count, left = (left / size, 0) if unit == "ms" else divmod(left, size)
        if count:
            parts.append(f"{count:g}{unit}" if unit == "ms" else f"{count}{unit}")
    return "".join(parts) or "0s"


def interval_text(every: Every) -> str:
    """The interval as a user would type it: ``auto``, ``500 steps``, ``10m``."""
    if every.auto:
        return "auto"
    if every.steps is not None:
        return steps_text(every.steps)
    return duration_text(timedelta(seconds=every.seconds or 0.0))


def format_duration(seconds: float) -> str:
    """Measured seconds for people, in two units at most: ``3.1 ms``, ``0.31 s``, ``4m12s``, ``2d03h``."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if 0 < seconds < 0.01:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.3g} s"
    return _two_units(round(seconds))


def format_size(size: float) -> str:
    """Measured bytes for people: ``817 B``, ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _two_units(seconds: int) -> str:
    """From a minute up. The smaller unit is rounded before the larger is chosen, so that 60m never shows."""
    minutes, hours = (seconds + 30) // 60, (seconds + 1800) // 3600
    if seconds < 3600:
        large, small, per, units = seconds // 60, seconds % 60, "m", "s"
    elif minutes < 24 * 60:
        large, small, per, units = minutes // 60, minutes % 60, "h", "m"
    else:
        large, small, per, units = hours // 24, hours % 24, "d", "h"
    return f"{large}{per}{small:02}{units}" if small else f"{large}{per}"


def _unlike(value: object, kind: str, examples: str, with_unit: str) -> str:
    """The message for a value that has the wrong form; a bare number gets its likely spellings."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"expects {kind} such as {examples}"
    text = str(value).strip()
    if re.fullmatch(_NUMBER, text):
        return f"{text} has no unit; write {with_unit.format(text)}"
    return f"{text!r} is not {kind}; write for example {examples}"
