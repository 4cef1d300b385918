"""What the data jobs write down: lines ``{"name", "cycle", "value"}`` in ``results-RANK.jsonl``."""

from __future__ import annotations

import json
import os
from pathlib import Path


class Notes:
    """Appends numbers, each line whole."""

    def __init__(self, out: str | Path) -> None:
        self._file = (Path(out) / f"results-{os.environ.get('RANK', '0')}.jsonl").open("a", buffering=1)

    def put(self, name: str, cycle: int, value: float) -> None:
        self._file.write(json.dumps({"name": name, "cycle": cycle, "value": value}) + "\n")
