"""Training processes that are killed with -9 while their loader's workers are busy: who is alive 5 s later."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from typing import Any

import data_loaders as loaders
import psutil
from data_notes import Notes
from torch.utils.data import DataLoader, Dataset

from ftrun.data.loader import DataLoader as Ours

_WORKERS, _AFTER = 2, 5.0


class Blocking(Dataset[bytes]):
    """Samples that are too large for a pipe, or that are never ready but for the first ones."""

    def __init__(self, asleep: bool) -> None:
        self._asleep = asleep

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> bytes:
        if self._asleep and index >= 2:
            time.sleep(1000)
        return bytes(1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--trainers", type=int, required=True, help="of each loader")
    options = parser.parse_args()
    loaders.quieten()
    trainers = {number: _forked(number) for number in range(2 * options.trainers)}
    workers = {number: _workers(pid) for number, pid in trainers.items()}
    for pid in trainers.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for _ in range(50):  # and not at once: a machine that stands still meanwhile gives nobody the time to end
        time.sleep(_AFTER / 50)
    notes = Notes(options.out)
    for number, mine in workers.items():
        notes.put("torch workers" if number % 2 else "workers", number, len(mine))
        notes.put("torch orphans" if number % 2 else "orphans", number, sum(map(_runs, mine)))
        for worker in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def _forked(number: int) -> int:
    child = os.fork()
    if not child:
        dataset = Blocking(asleep=number // 2 % 2 == 1)
        how: dict[str, Any] = {"num_workers": _WORKERS, "collate_fn": list}
        loader: Any = DataLoader(dataset, batch_size=1, **how) if number % 2 else Ours(dataset, global_batch=1, **how)
        batches = iter(loader)
        next(batches)
        time.sleep(1000)
        os._exit(0)
    return child


def _workers(pid: int) -> list[psutil.Process]:
    """A trainer's workers, once all have begun and had the time to get stuck."""
    deadline = time.monotonic() + 30.0
    while len(found := psutil.Process(pid).children()) < _WORKERS and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    return found


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


if __name__ == "__main__":
    main()
