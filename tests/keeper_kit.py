"""What the tests of the keeper share: snapshots as workers seal them, made without torch, and keepers for them."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import eventually, kill_tree

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.epochs import EpochRecord, claim
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.faults import VARIABLE
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.layout import AttemptName, Root, attempt_key, rank_json, rank_shard
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.memory.tier import Slot, Tier, put, remove
from ftrun.checkpoint.plan.pieces import Box, Piece
from ftrun.checkpoint.records import RankRecord, Seal, TensorEntry, Word
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 300_000  # of a rank's payload
RUN = "run"


def name_of(epoch: int, step: int) -> str:
    return str(AttemptName(epoch, step, f"{(epoch * 7919 + step) % 2**32:08x}"))


def payload_of(attempt: str, rank: int, size: int = SIZE) -> bytes:
    return random.Random(f"{attempt}/{rank}").randbytes(size)


def a_record(attempt: str, rank: int, *, size: int = SIZE, data: Any = None, digest: str | None = None) -> RankRecord:
    name = AttemptName.of(attempt)
    entry = TensorEntry("uint8", (size,), "0-1" if digest else str(rank), digest)
    piece = Piece("w", Box.whole((size,)), 0, size, rank_shard(rank), 0)
    return RankRecord(attempt, rank, name.step, None, data, {"$": "tensor", "name": "w"}, {"w": entry}, (piece,))


def a_seal(attempt: str, rank: int = 0, world: int = 1, **changes: Any) -> Seal:
    """The seal of a rank, without files: all ranks on one node unless it is said otherwise."""
    plain = Seal(
        attempt=attempt,
        run_id=RUN,
        rank=rank,
        world_size=world,
        node=0,
        node_ranks=tuple(range(world)),
        step=AttemptName.of(attempt).step,
        total=None,
        reason="interval",
        data=None,
        parent=None,
        torch="2.13.0",
        run_attempt=3,
        files={rank_json(rank): (f"/nowhere/{rank}.json", record_of(b"{"))},
        word=Word("here", {}),
        sealed_at=time.time(),
    )
    return replace(plain, **changes)


@dataclass
class Node:
    """A node: its tier, its workers' slots, and its keepers."""

    tier: Tier
    config: KeeperConfig
    world: int = 1
    ranks: tuple[int, ...] = (0,)
    keepers: list[Keeper] = field(default_factory=list)

    @property
    def root(self) -> Root:
        return Root.open(self.config.root, self.config.storage_options)

    def seal(self, attempt: str, slot: int = 0, *, ranks: tuple[int, ...] | None = None, **changes: Any) -> None:
        """Do what the workers do: fill a slot, then seal it."""
        self.tier.create()
        for rank in self.ranks if ranks is None else ranks:
            self.seal_rank(attempt, rank, self.tier.slots(rank)[slot], **changes)

    def seal_rank(
        self,
        attempt: str,
        rank: int,
        slot: Slot,
        *,
        size: int = SIZE,
        data: Any = None,
        digest: str | None = None,
        **changes: Any,
    ) -> None:
        slot.directory.mkdir(exist_ok=True)
        for marker in (slot.seal, slot.drained):
            remove(marker)
        payload = payload_of(attempt, rank, size)
        record = a_record(attempt, rank, size=size, data=data, digest=digest).to_bytes()
        slot.payload.write_bytes(payload)
        slot.record.write_bytes(record)
        files = {
            rank_shard(rank): (str(slot.payload), record_of(payload)),
            rank_json(rank): (str(slot.record), record_of(record)),
        }
        where = {"node": self.config.node, "node_ranks": self.ranks, "files": files, "data": data}
        put(slot.seal, a_seal(attempt, rank, self.world, **(where | changes)).to_bytes())

    def keeper(self, fault: str = "", **changes: Any) -> Keeper:
        """Start a keeper."""
        made = Keeper(self.tier, replace(self.config, **changes))
        self.keepers.append(made)
        before = os.environ.pop(VARIABLE, None)
        if fault:
            os.environ[VARIABLE] = fault
        try:
            made.ensure()
        finally:
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before
        return made

    def outcome(self, attempt: str, timeout: float = 60.0) -> Outcome:
        """Wait for it."""

        def found() -> Outcome | None:
            for each in self.keepers[-1:]:
                each.ensure()
            return Outcomes(self.tier).get(attempt)

        result = eventually(found, timeout, f"an outcome of {attempt}; the keeper said:\n{self.log()}")
        assert isinstance(result, Outcome)
        return result

    def log(self) -> str:
        try:
            return (self.tier.path / "keeper.log").read_text()
        except OSError:
            return "nothing"

    def begin(self, *, fresh: bool = False, parent: str | None = None) -> EpochRecord:
        """Start the worker group."""
        record = claim(self.root, self.config.run_id, fresh=fresh, parent=parent)
        self.tier.create()
        from ftrun.checkpoint.sealed import seal

        put(self.tier.path / "epoch.json", seal(dict(record.__dict__)))
        return record

    def events(self) -> list[events.Event]:
        path = RunDir(Path(self.config.run_dir)).events(self.config.node)
        return [each.event for each in events.read(path)]

    def committed(self) -> list[str]:
        return [str(each.name) for each in reader.attempts(self.root) if each.status == "committed"]

    def assert_whole(self, attempt: str, size: int = SIZE) -> None:
        """A committed checkpoint holds, bit for bit, what was sealed."""
        info = reader.inspect(self.root, AttemptName.of(attempt))
        assert info.status == "committed", info
        assert info.manifest is not None
        for file, record in info.manifest.files.items():
            content = self.root.read(attempt_key(info.name, file))
            assert record_of(content) == record, file
        for rank in self.ranks:
            assert self.root.read(attempt_key(info.name, rank_shard(rank))) == payload_of(attempt, rank, size)

    def is_free(self, attempt: str) -> bool:
        slots = [slot for slot, seal in self.tier.sealed() if seal.attempt == attempt]
        return all(slot.is_marked(slot.drained, attempt) for slot in slots)

    def close_keepers(self) -> None:
        for each in self.keepers:
            if each.pid is not None:
                kill_tree(each.pid)
                each._process.wait(60)  # type: ignore[union-attr]

    def close(self) -> None:
        self.close_keepers()
        shutil.rmtree(self.tier.path, ignore_errors=True)


@pytest.fixture(name="nodes")
def nodes_fixture(tmp_path: Path) -> Iterator[Any]:
    """Makes nodes of one run, all on this machine."""
    made: list[Node] = []

    def make(number: int = 0, *, world: int = 1, ranks: tuple[int, ...] | None = None, **changes: Any) -> Node:
        run = RunDir(tmp_path / "run")
        run.events().parent.mkdir(parents=True, exist_ok=True)
        config = KeeperConfig(
            run_dir=str(run.path),
            run_id=RUN,
            root=str(run.checkpoints),
            storage_options={},
            local="",
            node=number,
            keep_last=3,
            keep_every=None,
            drain_limit=None,
            parent=os.getpid(),
            timeout=60.0,
        )
        tier = Tier(tmp_path / "memory" / f"n{number}")
        tier.path.parent.mkdir(exist_ok=True)
        node = Node(tier, replace(config, **changes), world, tuple(range(world)) if ranks is None else ranks)
        made.append(node)
        return node

    yield make
    for node in made:
        node.close()


def manifest_of(node: Node, attempt: str) -> dict[str, Any]:
    document = json.loads(node.root.read(attempt_key(AttemptName.of(attempt), "MANIFEST.json")))
    assert isinstance(document, dict)
    return document
