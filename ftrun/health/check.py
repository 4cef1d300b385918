"""``python -m ftrun.health.check SECONDS``: loads this node and says in one line of JSON whether all results are right.

A process of its own, started by :mod:`ftrun.health.checking`: a faulty node may crash it or have it hang. It ends when
its standard input does, so that nothing is left of it where its starter is killed. Exit codes: 0 all right, 1 a wrong
result, 3 it couldn't be done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path

RIGHT, WRONG, NOT_DONE = 0, 1, 3

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")


def main(seconds: float) -> int:
    """Load what there is."""
    from ftrun.health import burn

    loads = [burn.processors(seconds)]
    if any(Path(each).exists() for each in _DRIVERS):
        from ftrun.health import burn_gpu

        loads.append(burn_gpu.gpus(seconds))
    print(json.dumps([dataclasses.asdict(each) for each in loads]), flush=True)
    return WRONG if any(each.trouble for each in loads) else RIGHT


def _end_with_starter() -> None:
    sys.stdin.buffer.read()
    os._exit(NOT_DONE)


if __name__ == "__main__":
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        CODE = main(float(sys.argv[1]))
    except Exception as error:  # memory, a library, a driver: whoever started it says so
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        CODE = NOT_DONE
    # Threads that hang in a driver must not keep the process.
    sys.stdout.flush()
    os._exit(CODE)
