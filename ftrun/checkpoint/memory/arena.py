"""The memory of one rank's slots: two in shared memory; one where there is too little; files where there is none."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from ftrun.checkpoint.memory.files import make_directory, remove
from ftrun.checkpoint.memory.slot_memory import NoRoomError, SlotMemory

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import torch

    from ftrun.checkpoint.memory.tier import Slot, Tier

_log = logging.getLogger(__name__)


class Arena:
    """Hands out memory for slots. The training thread and its helper use it; a lock keeps them apart.

    Where shared memory is too small, that is said once, with what is missing and how to get it.

    Args:
        tier: the node's memory tier.
        rank: global rank.
        fallback: directory for files in place of shared memory, on a disk.
        device: a GPU for which to pin the memory; None for none.
    """

    def __init__(self, tier: Tier, rank: int, fallback: Path, *, device: torch.device | None = None) -> None:
        self._rank = rank
        self._slots = tier.slots(rank)
        self._fallback = fallback / f"{tier.path.name}-r{rank:05d}"
        self._device = device
        self._lock = threading.Lock()
        # An earlier attempt may have put payloads into files.
        self._memories = {slot: SlotMemory(slot.stand_in or slot.payload, device=device) for slot in self._slots}
        self._given_up: set[Slot] = set()
        self._said: set[str] = set()

    def slots(self) -> tuple[Slot, ...]:
        """Those that can be used: two, or one where there is room for one only."""
        return tuple(slot for slot in self._slots if slot not in self._given_up)

    def prepare(self, size: int) -> None:
        """Get memory for payloads of about this size ahead of the first save. The helper's thread calls it.

        Raises:
            OSError: not even files can be had; :meth:`memory` will say so to somebody who can tell the user.
        """
        first, *others = self.slots()
        in_files = self._prepare(first, size, give_up=False)
        for slot in others:
            self._prepare(slot, size, give_up=not in_files)

    def _prepare(self, slot: Slot, size: int, *, give_up: bool) -> bool:
        """Whether the slot lies in files."""
        with self._lock:
            try:
                if slot.seal.exists() and not self._fits(slot, size):
                    return False  # what an earlier attempt sealed stays whole until a save takes the slot
                self._memories[slot].resize(size)
            except NoRoomError as error:
                self._say_missing(error, size, alone=give_up)
                if give_up:
                    self._given_up.add(slot)
                    return False
                self._to_files(slot, size)
            self._memories[slot].populate()
            return self._memories[slot].path != slot.payload

    def _fits(self, slot: Slot, size: int) -> bool:
        path = self._memories[slot].path
        return path.exists() and path.stat().st_size == size

    def memory(self, slot: Slot, size: int, idle: Collection[Slot] = ()) -> SlotMemory:
        """Memory of exactly this size for a slot that the caller has taken.

        Args:
            slot: one of :meth:`slots`.
            size: of the payload, at least 1.
            idle: slots that hold nothing which somebody still needs; they give their room where it is short.

        Raises:
            OSError: not even files can be had.
        """
        with self._lock:
            try:
                self._memories[slot].resize(size)
            except NoRoomError as error:
                self._make_room(slot, size, idle, error)
            return self._memories[slot]

    def _make_room(self, slot: Slot, size: int, idle: Collection[Slot], error: NoRoomError) -> None:
        for other in idle:
            if other != slot and other not in self._given_up and self._memories[other].path == other.payload:
                self._memories[other].release()
                self._given_up.add(other)
                with contextlib.suppress(NoRoomError):
                    self._memories[slot].resize(size)
                    self._say_missing(error, size, alone=True)
                    return
        self._say_missing(error, size, alone=False)
        self._to_files(slot, size)

    def _to_files(self, slot: Slot, size: int) -> None:
        path = self._fallback / slot.payload.name
        self._memories[slot].close()
        self._memories[slot] = SlotMemory(path, device=self._device)
        self._memories[slot].resize(size)
        # Whoever removes the tier finds by this link what else there is to remove.
        make_directory(slot.directory)
        remove(slot.payload)
        slot.payload.symlink_to(path)

    def _say_missing(self, error: NoRoomError, size: int, *, alone: bool) -> None:
        what = (
            "one snapshot is kept in memory in place of two: a save waits until the one before is drained"
            if alone
            else f"snapshots go through files in {self._fallback}, which is slower"
        )
        if what in self._said:
            return
        self._said.add(what)
        where = error.path.parents[3]  # /dev/shm
        _log.warning(
            "ftrun: rank %d: %s lacks %s bytes for a snapshot of %s bytes; %s. Enlarge it to a little more than twice "
            "what the ranks of this node store (mount -o remount,size=... %s; docker run --shm-size=...; under "
            "Kubernetes an emptyDir of medium Memory).",
            self._rank,
            where,
            f"{error.missing:,}",
            f"{size:,}",
            what,
            where,
        )

    def close(self) -> None:
        """Let go of all memory; what is in it stays."""
        with self._lock:
            for memory in self._memories.values():
                memory.close()
