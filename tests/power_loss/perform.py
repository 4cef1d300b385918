"""Runs subjects under the recorder: ``python -m power_loss.perform MODULE DIRECTORY FUNCTION...``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Each subject gets a new directory, which begins its section of the log."""
    module = importlib.import_module(sys.argv[1])
    for name in sys.argv[3:]:
        directory = Path(sys.argv[2]) / name
        directory.mkdir()
        getattr(module, name)(directory)


def mark(directory: Path, name: str) -> None:
    """Note in the log that the program has come so far, and may have told so."""
    (directory / "marks").mkdir(exist_ok=True)
    (directory / "marks" / name).mkdir()


if __name__ == "__main__":
    main()
