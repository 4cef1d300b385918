"""The guard's own program: waits for its standard input to end, then kills what the workers had started.

Started by path, with an interpreter that loads nothing else: standard library only, and no import of ftrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys


def main() -> None:
    """Read the marks of a worker's environment, then lines of pids: the session leaders of each attempt in turn.

    At the end everything goes that is in a session of the last line, or that carries the marks; but for what removes
    the workers' shared memory when they are dead, which ends by itself then.
    """
    marks = [text.encode() for text in json.loads(sys.stdin.readline() or "[]")]
    leaders: set[int] = set()
    guarding = False
    for line in sys.stdin:
        leaders = {int(word) for word in line.split()}
        guarding = bool(leaders)
    if not guarding:
        return  # the agent has cleared everything away itself
    # Twice: a process may be starting another while the first look is under way.
    for _ in range(2):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if (os.getsid(int(name)) in leaders or _carries(name, marks)) and not _tidies_up(name):
                        os.kill(int(name), signal.SIGKILL)


def _carries(pid: str, marks: list[bytes]) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        environment = file.read()
    # A process that was parked before its run was known keeps that environment here, with the last mark alone.
    wanted = marks[-1:] if b"FTRUN_PARKED=" in environment else marks
    return bool(wanted) and all(mark in environment for mark in wanted)


def _tidies_up(pid: str) -> bool:
    # As in family.py, which this program can't import.
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        line = file.read()
    return b"resource_tracker import main" in line or line.partition(b"\0")[0].endswith(b"torch_shm_manager")


if __name__ == "__main__":
    main()
