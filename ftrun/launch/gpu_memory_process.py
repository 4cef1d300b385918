"""Asks NVML until no GPU holds anything for some processes: ``PROGRAM PLACE-OF-PYNVML PID...``, a line for each look.

Started by path, with an interpreter that loads nothing else: standard library and pynvml, and no import of ftrun.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

_POLL_SECONDS = 0.02


def main(place: str, pids: set[int]) -> None:
    """Ends once all are gone; by itself it knows no limit, its parent does."""
    sys.path.append(place)
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    while True:
        found = sorted(pids & {pid for index in range(nvml.nvmlDeviceGetCount()) for pid in _held_for(nvml, index)})
        print(*found, flush=True)
        if not found:
            return
        time.sleep(_POLL_SECONDS)


def _held_for(nvml: Any, index: int) -> set[int]:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        return {int(each.pid) for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    except nvml.NVMLError:  # a GPU that is lost or can't say: the others still can
        return set()


if __name__ == "__main__":
    main(sys.argv[1], {int(each) for each in sys.argv[2:]})
