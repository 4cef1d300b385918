"""``detect.cause``: the 18 classes of interruptions of Llama 3's training, each in the nearest form that CPUs allow.

The classes and their counts are table 5 of "The Llama 3 Herd of Models" (419 unexpected interruptions, 54 days, 16,384
GPUs). Real processes fall, or stall; what only a device could do is said by the kernel's line in a file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import say, started
from figures import Figure, Target
from kills import read_events
from peers import ftrun, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common import Settings
    from peers import Launcher

RANKS = 4
DEADLINE = 60.0
STOCK_DEADLINE = 25.0


@dataclass(frozen=True)
class Class:
    """One row of the table.

    Attributes:
        name: as ``jobs/faulty.py`` knows it.
        component: as the table has it.
        count: how often it was in the table.
        form: what is injected.
    """

    name: str
    component: str
    count: int
    form: str


CLASSES = (
    Class("faulty_gpu", "Faulty GPU", 148, "Xid 79, CUDA error raised"),
    Class("hbm3", "GPU HBM3 memory", 72, "Xid 48 and 94, CUDA ECC error raised"),
    Class("software_bug", "Software bug", 54, "IndexError raised"),
    Class("network", "Network switch/cable", 35, "link down, sockets cut, NCCL's error raised"),
    Class("maintenance", "Host maintenance", 32, "SIGTERM"),
    Class("sram", "GPU SRAM memory", 19, "Xid 95, sockets cut, ECC error raised 0.3 s later"),
    Class("gsp", "GPU system processor", 17, "Xid 119, SIGABRT"),
    Class("nic", "NIC", 7, "mlx5 fatal error, ncclSystemError raised"),
    Class("watchdog", "NCCL watchdog timeouts", 7, "the rank stalls, its peers' collectives time out"),
    Class("corruption", "Silent data corruption", 6, "the rank's loss is not a number, and it raises"),
    Class("thermal", "GPU thermal interface + sensor", 6, "throttled for a second, Xid 79, SIGKILL"),
    Class("ssd", "SSD", 3, "nvme errors, OSError EIO raised"),
    Class("power", "Power supply", 3, "SIGKILL without a word"),
    Class("chassis", "Server chassis", 2, "SIGSTOP: it answers nobody"),
    Class("io_board", "IO expansion board", 2, "PCIe AER fatal, SIGBUS"),
    Class("dependency", "Dependency", 2, "a library that can't be loaded, OSError raised"),
    Class("cpu", "CPU", 2, "machine check, SIGILL"),
    Class("system_memory", "System memory", 2, "EDAC uncorrected error, SIGBUS"),
)


@dataclass(frozen=True)
class Named:
    """Whom a launcher named, and as what."""

    rank: int | None
    kind: str


def cause(settings: Settings) -> Iterator[Figure]:
    """The share of injections after which the right rank is named first."""
    rng = settings.random("cause")
    repeats = settings.count(2, 1)
    classes = CLASSES if not settings.quick else CLASSES[::3]
    ours: list[bool] = []
    stock: list[bool] = []
    notes = []
    for each in classes:
        told = []
        for turn in range(repeats):
            rank = rng.randrange(RANKS)
            named = _under_ftrun(settings, each, rank)
            ours.append(named.rank == rank)
            told.append(f"{'right' if ours[-1] else f'WRONG (rank {named.rank}, was {rank})'}, {named.kind!r}")
            if turn == 0:
                stock.append(_under_torchrun(settings, each, rank).rank == rank)
        notes.append(f"{each.component} ({each.form}): {'; '.join(told)}; torchrun {'right' if stock[-1] else 'wrong'}")
        say(notes[-1])
    yield Figure(
        "detect.cause",
        sum(ours) / len(ours),
        Target(">=", 0.95),
        n=len(ours),
        reference={"torchrun": sum(stock) / len(stock)},
        notes=[f"{RANKS} ranks, a random one at fault, plain script without restarts", *notes],
    )


def _under_ftrun(settings: Settings, each: Class, rank: int) -> Named:
    folder = settings.folder(each.name)
    launcher = ftrun("--name", "bench", "--max-restarts", "0")
    code = _fall(launcher, folder, each, rank, DEADLINE)
    for path in sorted((folder / "runs" / "bench" / "postmortem").glob("*/failure.json"))[:1]:
        named = json.loads(path.read_text())["failure"]
        return Named(named["rank"], named["kind"])
    for event in read_events(folder):
        if event["kind"] == "failed":
            return Named(event["failed_rank"], event["cause"])
    return Named(None, "still running" if code is None else f"exit code {code}")


_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)


def _under_torchrun(settings: Settings, each: Class, rank: int) -> Named:
    folder = settings.folder(each.name)
    _fall(torchrun(), folder, each, rank, STOCK_DEADLINE)
    found = _ROOT_CAUSE.search((folder / "output.txt").read_text(errors="replace"))
    return Named(int(found[1]) if found else None, "")


def _fall(launcher: Launcher, folder: Path, each: Class, rank: int, deadline: float) -> int | None:
    log = folder / "kernel.log"
    log.touch()
    options = ["--out", str(folder), "--case", each.name, "--rank", str(rank), "--kernel-log", str(log)]
    environment = {**launcher.environment, "FTRUN_KMSG": str(log)}
    with started(launcher.run(RANKS, "faulty.py", *options), folder, ranks=RANKS, environment=environment) as job:
        return job.wait(deadline)
