"""The end of a save in memory: the rank's record, then the seal, and a ring at the keeper's door."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import rank_json, rank_shard
from ftrun.checkpoint.memory.tier import put

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.slot_memory import SlotMemory
    from ftrun.checkpoint.memory.tier import Slot, Tier
    from ftrun.checkpoint.records import RankRecord, Seal


def seal_slot(slot: Slot, memory: SlotMemory | None, record: RankRecord, seal: Seal) -> None:
    """Say that a slot is whole. ``seal`` lacks its files and time, which are filled in.

    Args:
        slot: an empty slot whose payload is filled.
        memory: of the payload; None where the rank stores no bytes.
        record: of the rank.
        seal: of the rank.

    Raises:
        OSError: no room for the record.
    """
    content = record.to_bytes()
    put(slot.record, content)
    files = {rank_json(record.rank): (str(slot.record), len(content))}
    if memory is not None:
        files[rank_shard(record.rank)] = (str(memory.path), memory.size)
    put(slot.seal, replace(seal, files=files, sealed_at=time.time()).to_bytes())


def ring(tier: Tier) -> None:
    """Wake the keeper, if it listens. It looks by itself too."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bell:
        bell.sendto(b"", str(tier.socket))
