"""Where the benchmarks of many nodes run: nodes in network namespaces of the tests, and the launchers on them."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
from common import JOBS, PROJECT, VENV

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from common import Settings

START = 60.0
"""Seconds that a world may take to come about where nothing is measured."""
_SETTLED_FOR = 1.0
_LOOKS = 10
_SETTLE_SECONDS = 60.0


def tests(name: str) -> Any:
    """A module of the tests' package of nodes: ``namespaces`` itself where the name is empty."""
    folder = str(PROJECT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"namespaces.{name}" if name else "namespaces")


@dataclass(frozen=True)
class Launcher:
    """One way to start a training on many nodes.

    Attributes:
        name: for people.
        program: its command.
        options: what it needs to meet over a store on node 1.
        session: whether its training is the one with a Session.
        environment: variables that it needs.
    """

    name: str
    program: str
    options: tuple[str, ...]
    session: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, nodes: str, script: str, *arguments: str) -> list[str]:
        """The command line for a script of ``jobs/``, the same on all nodes.

        Args:
            nodes: how many, as ``--nnodes`` takes it.
            script: name of the script.
            arguments: its arguments.
        """
        meet = ("--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-endpoint", "node1:29400", "--rdzv-id", "bench")
        return [str(VENV / self.program), *meet, *self.options, str(JOBS / script), *arguments]


def ftrun(name: str = "ftrun") -> Launcher:
    """The project's launcher, with its own rendezvous. Nodes that are lost again and again are not left out for it."""
    forgiving = ("--set", "health.nodes.exclude=false", "--set", "health.nodes.check=false")
    options = ("--name", "bench", "--rdzv-conf", "last_call_timeout=1", *forgiving)
    return Launcher(name, "ftrun", options, session=True)


def torchrun(name: str = "torchrun") -> Launcher:
    """The installed torch's launcher at its best: losses are noticed early, addresses of dead workers not met again."""
    conf = "last_call_timeout=1,keep_alive_interval=1"
    options = ("--rdzv-backend", "c10d", "--rdzv-conf", conf, "--max-restarts", "100")
    return Launcher(name, "torchrun", options, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@contextlib.contextmanager
def job(settings: Settings, launcher: Launcher, nodes: int, seats: str, script: str, *more: str) -> Iterator[Any]:
    """A training on a net of its own; nobody is started yet. Nothing of it is left afterwards.

    Args:
        settings: of the benchmark.
        launcher: on each node.
        nodes: how many nodes there are.
        seats: how many take part, as ``--nnodes`` takes it.
        script: of ``jobs/``.
        more: the script's arguments beyond ``--out``.
    """
    folder: Path = settings.folder(launcher.program)
    with tests("").Net(nodes) as net:
        command = launcher.command(seats, script, "--out", str(folder), *more)
        yield tests("job").Job(net, command, folder, launcher.environment)


def settle() -> None:
    """Wait until what launchers prepare in the background is ready: until nothing is at work most of the time."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        at_work: Counter[int] = Counter()
        for _ in range(_LOOKS):
            at_work.update(_running())
            time.sleep(_SETTLED_FOR / _LOOKS)
        if max(at_work.values(), default=0) < _LOOKS / 2:
            return


def _running() -> list[int]:
    """Which of the processes that were started from here want a processor, be it that they have none."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.status() == psutil.STATUS_RUNNING:
                found.append(each.pid)
    return found


def last_word(told: str) -> str:
    """The last line of what was printed, for a note."""
    return (told.strip().splitlines() or ["nothing"])[-1][-200:]
