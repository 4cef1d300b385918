"""``checkpoint.power_loss``: the tests that replay every state a power loss can leave."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from common import PROJECT, say
from figures import Figure, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings

_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_REFERENCE = {"DCP": "has two faults that it must find first"}


def power_loss(settings: Settings) -> Iterator[Figure]:
    """How many of them fail."""
    test = [sys.executable, "-m", "pytest", "-q", "-k", "power_loss", "-p", "no:cacheprovider", "--no-header", "tests"]
    try:
        done = subprocess.run(test, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
        output = done.stdout or done.stderr
    except subprocess.TimeoutExpired:
        output = "not over within 300 s"
    passed, failed = counts(output)
    last = (output.strip().splitlines() or ["no word"])[-1]
    say(f"power loss: {last}")
    yield Figure(
        "checkpoint.power_loss",
        float(failed) if passed + failed else None,
        Target("=", 0.0),
        n=passed + failed,
        reference=_REFERENCE,
        notes=[last, *re.findall(r"^.*power-loss states.*$", output, re.MULTILINE)],
    )


def counts(output: str) -> tuple[int, int]:
    """Numbers of tests that passed and that did not, by pytest's last line."""
    last = (output.strip().splitlines() or [""])[-1]
    found = {word.rstrip("s"): int(number) for number, word in _COUNTS.findall(last)}
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)
