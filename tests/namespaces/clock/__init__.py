"""Wall clocks that are apart: no namespace has one of its own, so Python's is shifted in the processes of a node.

A process with what :func:`ahead` returns in its environment has it, and so has all that it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "CLOCK_AHEAD"


def ahead(seconds: float, *more: str | Path) -> dict[str, str]:
    """The environment of a process whose clock is ahead of the machine's.

    Args:
        seconds: by how much; less than nothing is behind.
        more: what else ``PYTHONPATH`` names.
    """
    return {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, *more))), VARIABLE: str(seconds)}
