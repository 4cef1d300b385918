"""The end of a save in memory: the rank's record, then the seal, and a ring at the keeper's door."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.layout import rank_json, rank_shard
from ftrun.checkpoint.memory.tier import put

if TYPE_CHECKING:
    from ftrun.checkpoint.memory.slot_memory import SlotMemory
    from ftrun.checkpoint.memory.tier import Slot, Tier
    from ftrun.checkpoint.records import Seal


def seal_slot(slot: Slot, memory: SlotMemory | None, record: bytes, seal: Seal) -> None:
    """Say that a slot is whole. ``seal`` lacks its files and time, which are filled in.

    Every byte is summed up here, in memory and after the last of them is copied, however it got there: whoever reads
    the slot later compares. On the helper's thread, beside training, as it reads as much as was copied.

    Args:
        slot: an empty slot whose payload is filled.
        memory: of the payload; None where the rank stores no bytes.
        record: of the rank, as it is to be stored.
        seal: of the rank.

    Raises:
        OSError: no room for the record.
    """
    put(slot.record, record)
    files = {rank_json(seal.rank): (str(slot.record), record_of(record))}
    if memory is not None:
        files[rank_shard(seal.rank)] = (str(memory.path), memory.record())
    put(slot.seal, replace(seal, files=files, sealed_at=time.time()).to_bytes())


def ring(tier: Tier) -> None:
    """Wake the keeper, if it listens. It looks by itself too."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bell:
        bell.sendto(b"", str(tier.socket))
