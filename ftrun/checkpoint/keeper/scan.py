"""Looks at the seals of the memory tier, many times a minute and for next to nothing when nothing has changed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.decide import GONE
from ftrun.checkpoint.keeper.work import NodeWork, works
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.tier import NUM_SLOTS, Slot, remove

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.checkpoint.records import Seal


class Scanner:
    """Reads seals, each one only once. One thread uses it.

    Args:
        tier: the memory tier.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._read: dict[str, tuple[tuple[int, int, int], Seal | None]] = {}

    def scan(self) -> dict[str, NodeWork]:
        """What lies sealed in memory now, by attempt."""
        sealed = list(self._sealed())
        return {attempt: _with_drained(work) for attempt, work in works(sealed).items()}

    def _sealed(self) -> Iterator[tuple[Slot, Seal]]:
        for directory in self._directories():
            for number in range(NUM_SLOTS):
                slot = Slot(self._tier.path / directory, number)
                seal = self._seal(slot)
                if seal is not None:
                    yield slot, seal

    def _directories(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._tier.path) if name[:1] == "r" and name[1:].isdecimal())
        except OSError:
            return []

    def _seal(self, slot: Slot) -> Seal | None:
        path = os.fspath(slot.seal)
        try:
            status = os.stat(path)
        except OSError:
            self._read.pop(path, None)
            return None
        # A seal is never written in place: another one is another file.
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._read.get(path)
        if known is None or known[0] != version:
            known = self._read[path] = version, slot.read_seal()
        return known[1]


def _with_drained(work: NodeWork) -> NodeWork:
    attempt = str(work.name)
    pairs = zip(work.slots, work.seals, strict=True)
    return replace(work, drained=frozenset(seal.rank for slot, seal in pairs if slot.is_marked(slot.drained, attempt)))


def hold(work: NodeWork) -> bool:
    """Mark the slots as being read; False, and nothing is marked, when one was taken for another snapshot meanwhile."""
    attempt = str(work.name)
    for slot in work.slots:
        slot.mark(slot.draining, attempt)
    if is_held(work):
        return True
    let_go(work)
    return False


def is_held(work: NodeWork) -> bool:
    """Whether the slots still hold what was sealed."""
    return all(slot.read_seal() == seal for slot, seal in zip(work.slots, work.seals, strict=True))


def is_still_held(work: NodeWork) -> bool:
    """As :func:`is_held`, patient with a worker that takes a seal away, finds the slot held, and puts it back."""
    deadline = time.monotonic() + GONE
    while not is_held(work):
        if time.monotonic() > deadline or any(
            slot.read_seal() not in (None, seal) for slot, seal in zip(work.slots, work.seals, strict=True)
        ):
            return False
        time.sleep(0.01)
    return True


def let_go(work: NodeWork) -> None:
    """Take the marks away."""
    for slot in work.slots:
        if slot.is_marked(slot.draining, str(work.name)):
            remove(slot.draining)


def free(work: NodeWork) -> None:
    """Say that the slots may be filled again. Their seals stay: until then the snapshot can be restored from."""
    attempt = str(work.name)
    for slot in work.slots:
        if not slot.is_marked(slot.drained, attempt):
            slot.mark(slot.drained, attempt)
    let_go(work)


def drop_former_ranks(tier: Tier, work: NodeWork) -> list[int]:
    """Give back the memory of ranks that this node had when nodes were numbered otherwise; which those are.

    Args:
        tier: the memory tier.
        work: a part of the start that runs now, and a checkpoint: nobody needs what came before.
    """
    former = [rank for rank in tier.ranks() if rank not in work.first.node_ranks and _is_past(tier, rank, work)]
    for rank in former:
        tier.drop(rank)
    return former


def _is_past(tier: Tier, rank: int, work: NodeWork) -> bool:
    """Whether what a rank's slots hold is older than a checkpoint, and safe elsewhere or given up."""
    held = [(slot, seal) for slot in tier.slots(rank) if (seal := slot.read_seal()) is not None]
    return all(
        AttemptName.of(seal.attempt) < work.name and slot.is_marked(slot.drained, seal.attempt) for slot, seal in held
    )
