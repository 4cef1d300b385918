"""A filler from outside: started, started again when it dies, and ended. It is never waited for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import TYPE_CHECKING

from ftrun import background
from ftrun.contract import WorkerContract

if TYPE_CHECKING:
    from ftrun.data.filler.places import FillDir

_FIRST, _LONGEST = 0.2, 30.0
_HEALTHY = 60.0
"""Seconds of life after which a death counts as the first one."""
_LEAVE = 2.0
_LOG_BYTES = 1 << 20


class FillerProcess:
    """The filler of one directory, as its parent holds it. One thread uses it.

    Args:
        directory: the run's.
        spare: of a node that waits: members come first for the network.
    """

    def __init__(self, directory: FillDir, *, spare: bool = False) -> None:
        self.directory = directory
        self._spare = spare
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._not_before = 0.0
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """Its process; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def ensure(self) -> None:
        """Have a filler that runs, where there is a plan. Cheap where it does; one that died is replaced."""
        now = time.monotonic()
        process = self._process
        if process is not None:
            if process.poll() is None:
                return
            self._process = None
            self._deaths = 1 if now - self._started > _HEALTHY else self._deaths + 1
            self._not_before = now + min(_LONGEST, _FIRST * 2.0 ** (self._deaths - 1))
        if now >= self._not_before and any(self.directory.plans.glob("*.json")):
            self._started = now
            try:
                self._process = _spawn(self.directory, spare=self._spare)
            except OSError:
                self._not_before = now + _LONGEST

    def finish(self) -> None:
        """End it. It holds nothing that would be lost."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and goes when that lets it
                process.wait(_LEAVE)


def _spawn(directory: FillDir, *, spare: bool) -> subprocess.Popen[bytes]:
    # The cache is known, and it is no worker; NumPy needs no threads for what it does there.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(WorkerContract.VARIABLE, None)
    with contextlib.suppress(OSError):
        if directory.log.stat().st_size > _LOG_BYTES:
            directory.log.unlink()
    arguments = [str(directory.path), str(os.getpid()), *(["spare"] if spare else [])]
    return background.start("ftrun.data.filler", arguments, directory.log, environment)
