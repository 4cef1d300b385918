"""What workers on many nodes write down: all into one file, a JSON line for each thing that happens.

Standard library only, so that a script's first line can be its first entry. ``tests/namespaces/diary.py`` reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

NAME = "diary.jsonl"


def begun() -> tuple[argparse.Namespace, Diary]:
    """The options of a training, and its diary with the first entry: before it imports torch, which takes a second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    diary = Diary(options.out)
    diary.write("start")
    return options, diary


class Diary:
    """Appends to one file, each line with one write. The clock is the machine's, and so the same for all nodes."""

    def __init__(self, out: str) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        # Each round has a store at another port, and restarts are counted differently on each node by some launchers.
        self._same = {
            "node": socket.gethostname(),
            "rank": self.rank,
            "size": int(os.environ.get("WORLD_SIZE", "1")),
            "world": f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}",
        }
        self._file = os.open(Path(out) / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **more: object) -> None:
        line = {"at": time.monotonic(), "what": what, **self._same, **more}
        os.write(self._file, json.dumps(line).encode() + b"\n")
