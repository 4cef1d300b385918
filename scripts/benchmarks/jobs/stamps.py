"""What the benchmarks' training scripts write down: a line for each thing that happens, with its time.

Standard library only, so that a script's first line can be its first stamp.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class Stamps:
    """Appends ``time pid rank word step`` to ``stamps-RANK.txt``, each line with one write."""

    def __init__(self, out: str) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._file = os.open(Path(out) / f"stamps-{self.rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, word: str, step: int = 0) -> None:
        os.write(self._file, f"{time.time():.6f} {os.getpid()} {self.rank} {word} {step}\n".encode())
