"""Several launchers of one run on this machine, as far as they decide together what an attempt resumes from.

Each has a memory tier and, when there is something to drain, a real keeper; workers are stood in for by seals.
"""

from __future__ import annotations

import datetime as dt
import os
import shlex
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import forget_memory, kill_tree
from loading_kit import Written, replicated, seal, written
from torch.distributed import TCPStore

from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.faults import VARIABLE
from ftrun.launch import bringing_in, plan
from ftrun.launch.options import LaunchParser
from ftrun.launch.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ftrun.checkpoint.layout import AttemptName
    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.launch.keeping import Keeping
    from ftrun.launch.rounds import Round

JOIN_SECONDS = 60.0


class Words:
    """What a launcher says."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def say(self, text: str) -> None:
        pass


@dataclass
class Launcher:
    """One node's launcher."""

    rounds: Rounds
    words: Words = field(default_factory=Words)

    @property
    def keeping(self) -> Keeping:
        assert self.rounds.keeping is not None
        return self.rounds.keeping

    @property
    def tier(self) -> Tier:
        return self.keeping.tier

    @property
    def warned(self) -> str:
        return "\n".join(self.words.warnings)

    def seal(self, made: Written, ranks: Sequence[int], slot: int = 0, **changes: Any) -> None:
        """Do what this node's workers do."""
        current = self.rounds.current
        assert current is not None
        where = {"node": self.rounds.node, "node_ranks": tuple(ranks), "parent": current.resume}
        seal(self.tier, made, slot, ranks, **(where | changes))

    def keep(self, fault: str = "") -> None:
        """Have a keeper that drains, perhaps one to which something happens."""
        if fault:
            os.environ[VARIABLE] = fault
        try:
            self.keeping.look(wanted=True)
        finally:
            os.environ.pop(VARIABLE, None)

    def kill_keeper(self) -> None:
        """Kill it, and wait for its end: until then it may go on, and holds what it holds."""
        for pid in self.keeping.pids():
            kill_tree(pid)
        copies = self.keeping._copies
        for keeper in (self.keeping._keeper, copies._adopted if copies is not None else None):
            if keeper is not None and keeper._process is not None:
                keeper._process.wait(60)

    def close(self) -> None:
        """Leave no process and no socket."""
        if self.rounds.keeping is None:
            return
        self.kill_keeper()
        copies = self.keeping._copies
        if copies is not None:
            copies._socket.close()
            self.tier.copies.remove()


@dataclass
class Run:
    """A run of several nodes, which meet again and again."""

    cwd: Path
    made: list[Launcher] = field(default_factory=list)

    def launcher(self, *options: str) -> Launcher:
        """A launcher that hasn't met the others yet."""
        parser = LaunchParser()
        line = f"--nnodes 1:4 --run-dir run {shlex.join(options)} train.py"
        words: Any = Words()
        made = plan.make(parser.parse(shlex.split(line)), parser, os.environ, cwd=self.cwd)
        if not self.made:
            made.run_dir.create({"schema_version": 1, "run_id": made.run_id, "ftrun": "0"})
        self.made.append(Launcher(Rounds(made, words), words))
        return self.made[-1]

    def meet(self, *launchers: Launcher) -> list[Round]:
        """Begin an attempt: they are its nodes, in this order."""
        return [each.result() for each in self.begun(*launchers)]

    def begun(self, *launchers: Launcher) -> list[Future[Round]]:
        """The same, whatever comes of it."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=dt.timedelta(seconds=20))
        clients = [
            TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=dt.timedelta(seconds=20))
            for _ in launchers
        ]
        with ThreadPoolExecutor(len(launchers)) as pool:
            begun = [
                pool.submit(each.rounds.begin, client, node, len(launchers))
                for node, (each, client) in enumerate(zip(launchers, clients, strict=True))
            ]
            assert not wait(begun, JOIN_SECONDS).not_done
            return begun

    def committed(self) -> list[str]:
        root = self.made[0].rounds._root
        return [str(each.name) for each in reader.attempts(root) if each.status == "committed"]

    def close(self) -> None:
        for each in self.made:
            each.close()
        forget_memory(self.cwd)


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    # No keeper is given up because this machine was busy.
    monkeypatch.setattr(bringing_in, "STILL", 15.0)
    monkeypatch.setattr(bringing_in, "_STRAY", 15.0)
    (tmp_path / "train.py").write_text("")
    made, before = Run(tmp_path), threading.enumerate()
    yield made
    made.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("ftrun") and each not in before]


def snapshot(name: AttemptName, world: int = 2) -> Written:
    """A replica that is split over the ranks of a world, and a word of each rank's own."""
    weights = torch.arange(100_000, dtype=torch.float32) + name.step
    return written(world, lambda rank: {"tracked": {"w": weights}, "extra": {"rank": rank}}, replicated(world), name)
