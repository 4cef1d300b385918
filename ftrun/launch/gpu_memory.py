"""Waiting until killed workers are off the GPUs: their memory comes free some time after they are dead.

NVML (the package ``nvidia-ml-py``) says which processes a GPU still holds memory for. It is asked in a process of its
own: on a sick GPU a call can stay in the kernel for ever, and a launcher with such a thread could not even end. Without
the package or without a driver there is nothing to wait for. Where the launcher runs in a container, NVML may not show
its processes, and the wait then ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

LIMIT_SECONDS = 30.0

_PROGRAM = Path(__file__).with_name("gpu_memory_process.py")
_LIBRARY = "libnvidia-ml.so.1"
_REAP_SECONDS = 0.2
_SLICE_SECONDS = 1.0


@dataclass(frozen=True)
class Waited:
    """How the wait ended.

    Attributes:
        seconds: how long it took.
        still_there: pids that a GPU still held for at the last look.
        reason: why the wait ended before all were gone, or why there was none; empty if all are gone.
    """

    seconds: float
    still_there: tuple[int, ...] = ()
    reason: str = ""


def wait_until_free(pids: Collection[int], limit: float = LIMIT_SECONDS) -> Waited:
    """Wait until no GPU of this node holds anything for some processes, which are dead.

    Args:
        pids: of processes that were killed.
        limit: seconds that it may take at most.
    """
    package = _package()
    if not pids or package is None:
        return Waited(0.0, reason="no NVIDIA driver, or nvidia-ml-py isn't installed" if pids else "")
    start = time.monotonic()
    try:
        process = _ask(package, pids)
    except OSError as error:
        return Waited(0.0, reason=f"NVML can't be asked: {error.strerror}")
    try:
        out = _answer(process, start + limit)
        reason = "" if process.returncode == 0 else "NVML can't be read"
    except subprocess.TimeoutExpired as expired:
        out, reason = expired.stdout or b"", f"not within {limit:g} s"
        _end(process)
    return Waited(time.monotonic() - start, _last(out) if reason else (), _because(out, reason))


def _answer(process: subprocess.Popen[bytes], until: float) -> bytes:
    """What it says, in slices of waiting: a launcher that does nothing for long stands still (see main_thread).

    Raises:
        TimeoutExpired: it hasn't ended in time.
    """
    while True:
        left = until - time.monotonic()
        try:
            return process.communicate(timeout=max(0.0, min(_SLICE_SECONDS, left)))[0]
        except subprocess.TimeoutExpired:
            if left <= _SLICE_SECONDS:
                raise


def _ask(package: Path, pids: Collection[int]) -> subprocess.Popen[bytes]:
    # -I and -S: nothing of the user's environment is imported, and it starts in a few milliseconds.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROGRAM), str(package), *map(str, pids)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _package() -> Path | None:
    """Where pynvml is, if there is a driver for it to talk to. Takes well under a millisecond where there is none."""
    try:
        ctypes.CDLL(_LIBRARY)
        found = importlib.util.find_spec("pynvml")
    except (OSError, ValueError):
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    # One that is stuck in the kernel is fetched by the interpreter whenever it is dead.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_SECONDS)


def _last(out: bytes) -> tuple[int, ...]:
    """Pids of the last look, one look a line."""
    words = out.decode(errors="replace").splitlines()[-1:]
    return tuple(int(word) for word in " ".join(words).split() if word.isdecimal())


def _because(out: bytes, reason: str) -> str:
    """A process that was ended before its first look says why only in part."""
    return f"{reason}: NVML doesn't answer" if reason.startswith("not within") and not out else reason
