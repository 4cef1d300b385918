"""Having this node checked under load, within a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import ftrun
from ftrun.health import check

SECONDS = 3.0
LIMIT_SECONDS = 60.0

_REAP_SECONDS = 2.0
# Signals that a process gets for what it did, or what its memory did to it; any other comes from somebody.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}


@dataclass(frozen=True)
class Found:
    """How a check went.

    Attributes:
        trouble: what is wrong with the node; empty for nothing.
        detail: what was done, or why nothing was.
    """

    trouble: str
    detail: str

    def __str__(self) -> str:
        return self.trouble or self.detail


def run(seconds: float = SECONDS, limit: float = LIMIT_SECONDS) -> Found:
    """Load processors, memory and GPUs for some seconds each, in a process of its own.

    A check that can't be done, for want of memory or of a library, finds nothing wrong.

    Args:
        seconds: for how long.
        limit: seconds that all of it may take; a check that isn't done by then has failed.
    """
    with contextlib.ExitStack() as stack:
        try:
            out, said = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = _start(seconds, out, said)
        except OSError as error:
            return Found("", f"it could not be started ({error.strerror})")
        stack.callback(_end, process)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return Found(f"the check did not end within {limit:g} s", "")
        return read(code, *(_content(each) for each in (out, said)))


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _start(seconds: float, out: IO[bytes], said: IO[bytes]) -> subprocess.Popen[bytes]:
    # One thread for each product: every processor has one of its own.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    home = str(Path(ftrun.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", check.__name__, str(seconds)],
        stdin=subprocess.PIPE,  # it ends with this, and this ends with us
        stdout=out,
        stderr=said,
        env={**os.environ, **single, "PYTHONPATH": path},
        start_new_session=True,
    )


def read(code: int, out: bytes, said: bytes) -> Found:
    """What the end of the process means. Pure.

    Args:
        code: its exit code, negative for a signal.
        out: its standard output.
        said: its standard error.
    """
    if code in (check.RIGHT, check.WRONG):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            loads = json.loads(out)
            trouble = "; ".join(each["trouble"] for each in loads if each["trouble"])
            if bool(trouble) == (code == check.WRONG):
                return Found(trouble, ", ".join(each["detail"] for each in loads))
    if -code in _CRASHES:
        return Found(f"the check crashed ({signal.Signals(-code).name})", "")
    words = said.decode(errors="replace").strip().rpartition("\n")[2]
    how = words or (f"ended by signal {-code}" if code < 0 else f"exit code {code}")
    return Found("", f"it could not be done ({how})")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        # One that is stuck in the kernel is fetched by the interpreter whenever it is dead.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)
    if process.stdin is not None:
        process.stdin.close()
