"""Timing on all ranks at once, the baselines that figures are divided by, and where the numbers are written down."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CHUNK = 16 << 20


class Clock:
    """Times things that all ranks do at once, and appends ``{"name", "cycle", "value"}`` to ``results-RANK.jsonl``."""

    def __init__(self, out: str) -> None:
        self.rank = dist.get_rank()
        self._file = (Path(out) / f"results-{self.rank}.jsonl").open("a", buffering=1)

    def put(self, name: str, cycle: int, value: float | str) -> None:
        self._file.write(json.dumps({"name": name, "cycle": cycle, "value": value}) + "\n")

    def time(self, name: str, cycle: int, action: Callable[[], object]) -> float:
        """Seconds of something, begun by all ranks together."""
        dist.barrier()
        began = time.perf_counter()
        action()
        seconds = time.perf_counter() - began
        self.put(name, cycle, seconds)
        return seconds


class Baseline:
    """A rank's bytes, a warm buffer for them, and a file for them.

    Args:
        size: bytes that this rank owns.
        file: where they are written.
    """

    def __init__(self, size: int, file: Path) -> None:
        self._memory = mmap.mmap(-1, size)
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._source = torch.randint(0, 255, (size,), dtype=torch.uint8)
        self._file = file
        self.copy()

    def copy(self) -> None:
        """The plain memcpy."""
        self._buffer.copy_(self._source)

    def write(self) -> None:
        """Write and fsync, as plainly as can be."""
        view = memoryview(self._memory)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                while part:
                    part = part[os.write(descriptor, part) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """Remove what :meth:`write` has written."""
        self._file.unlink()


def read_all(files: Sequence[Path], into: mmap.mmap) -> int:
    """Plain ``readinto`` of some files into a warm buffer.

    Returns:
        Number of bytes.
    """
    view, at = memoryview(into), 0
    for each in files:
        with each.open("rb", buffering=0) as file:
            while count := file.readinto(view[at : at + _CHUNK]):
                at += count
    return at


def agree(value: float) -> float:
    """The largest of all ranks' values, on all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)
