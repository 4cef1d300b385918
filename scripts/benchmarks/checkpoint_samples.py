"""Looking at a job's memory."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHARED = Path("/dev/shm")
_PRIVATE = re.compile(rb"^Pss_Anon:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes.

    Attributes:
        time: seconds since 1970.
        private: of all processes of the job, pages that several share divided among them.
        shared: of all files in shared memory, mapped or not, the job's or not.
    """

    time: float
    private: int
    shared: int

    @property
    def all(self) -> int:
        return self.private + self.shared


def sample(pids: Iterable[int]) -> Sample:
    """Look at some processes and at the shared memory."""
    space = os.statvfs(_SHARED)
    return Sample(time.time(), sum(map(_private, pids)), (space.f_blocks - space.f_bfree) * space.f_frsize)


def _private(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = _PRIVATE.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
        return int(found[1]) << 10 if found else 0
    return 0
