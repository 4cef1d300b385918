"""Small snapshots sealed in a memory tier, made without torch, and what a reader must get out of them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.layout import AttemptName, rank_json, rank_shard
from ftrun.checkpoint.plan.pieces import Box, Piece, ranks_text, share
from ftrun.checkpoint.records import RankRecord, Seal, TensorEntry, Word

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.tier import Tier

RUN = "run"
NUM_SHARED, NUM_OWN = 700, 150
"""Elements of the tensor that all ranks share and of the one that each rank has for itself: some sectors each."""


def attempt(epoch: int, step: int) -> AttemptName:
    return AttemptName(epoch, step, f"{epoch:04x}{step:04x}")


def shared_value(name: AttemptName) -> float:
    return name.step + name.epoch / 16


def own_value(name: AttemptName, rank: int) -> float:
    return shared_value(name) + 1000 * (rank + 1)


@dataclass(frozen=True)
class World:
    """Who takes a snapshot.

    Attributes:
        size: number of ranks.
        node: the node whose ranks seal.
        ranks: those ranks.
    """

    size: int = 1
    node: int = 0
    ranks: tuple[int, ...] = (0,)


ALONE = World()
TWO_RANKS = World(2, 0, (0, 1))
TWO_NODES = World(2, 0, (0,)), World(2, 1, (1,))


def seal(tier: Tier, name: AttemptName, world: World = ALONE, *, slot: int = 0) -> None:
    """Seal a snapshot of a node's ranks."""
    tier.create()
    world_size = world.size
    for rank in world.ranks:
        place = tier.slots(rank)[slot]
        place.directory.mkdir(exist_ok=True)
        payload, pieces = _payload(name, rank, world_size)
        record = _record(name, rank, world_size, pieces).to_bytes()
        place.payload.write_bytes(payload)
        place.record.write_bytes(record)
        sealed = Seal(
            attempt=str(name),
            run_id=RUN,
            rank=rank,
            world_size=world_size,
            node=world.node,
            node_ranks=world.ranks,
            step=name.step,
            total=100,
            reason="interval",
            data={"samples": name.step},
            parent=None,
            torch="2",
            run_attempt=1,
            files={
                rank_shard(rank): (str(place.payload), record_of(payload)),
                rank_json(rank): (str(place.record), record_of(record)),
            },
            word=Word("position", {_everyone(world_size): "content"} if world_size > 1 else {}),
            sealed_at=0.0,
        )
        place.seal.write_bytes(sealed.to_bytes())


def _payload(name: AttemptName, rank: int, world_size: int) -> tuple[bytes, tuple[Piece, ...]]:
    start, stop = share(NUM_SHARED, rank, world_size)
    parts = {"shared": [shared_value(name)] * (stop - start), "own": [own_value(name, rank)] * NUM_OWN}
    header, data = {}, b""
    for key, values in parts.items():
        content = struct.pack(f"<{len(values)}f", *values)
        header[key] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    pieces = (
        Piece("shared", Box.whole((NUM_SHARED,)), start, stop, rank_shard(rank), first),
        Piece("own", Box.whole((NUM_OWN,)), 0, NUM_OWN, rank_shard(rank), first + 4 * (stop - start)),
    )
    return struct.pack("<Q", len(text)) + text + data, pieces


def _record(name: AttemptName, rank: int, world_size: int, pieces: tuple[Piece, ...]) -> RankRecord:
    return RankRecord(
        attempt=str(name),
        rank=rank,
        step=name.step,
        total=100,
        data={"samples": name.step},
        tree={"tracked": {"model": {key: {"$": "tensor", "name": key} for key in ("shared", "own")}}},
        tensors={
            "shared": TensorEntry("float32", (NUM_SHARED,), _everyone(world_size)),
            "own": TensorEntry("float32", (NUM_OWN,), ranks_text((rank,))),
        },
        pieces=pieces,
    )


def _everyone(world_size: int) -> str:
    return ranks_text(tuple(range(world_size)))
