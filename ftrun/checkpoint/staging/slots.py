"""Which slot the next snapshot goes into, and what happens when both are full."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.files import make_directory, read, remove
from ftrun.checkpoint.records import Seal
from ftrun.checkpoint.staging.work import remaining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ftrun.checkpoint.memory.arena import Arena
    from ftrun.checkpoint.memory.outcomes import Outcomes
    from ftrun.checkpoint.memory.tier import Slot

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


@dataclass(frozen=True)
class Held:
    """What a slot holds.

    Attributes:
        attempt: the snapshot that it is sealed for; None where it is not sealed.
        draining: the keeper reads it.
        over: nobody needs it any more: it is safe elsewhere, or will never be a checkpoint.
    """

    attempt: str | None = None
    draining: bool = False
    over: bool = False

    @property
    def free(self) -> bool:
        """Whether it may be filled."""
        return self.attempt is None or (self.over and not self.draining)


def choose(held: Sequence[Held]) -> int | None:
    """The slot to fill: an empty one, else the one that holds the oldest snapshot, for it is worth least."""
    free = [number for number, each in enumerate(held) if each.free]
    return min(free, key=lambda number: _age(held[number]), default=None)


def choose_to_replace(held: Sequence[Held]) -> int | None:
    """The slot whose snapshot waits for the keeper and may give way to a newer one: the newest of them."""
    waiting = [number for number, each in enumerate(held) if not each.free and not each.draining]
    return max(waiting, key=lambda number: _age(held[number]), default=None)


def _age(held: Held) -> tuple[int, int]:
    name = AttemptName.parse(held.attempt or "")
    return (-1, -1) if name is None else (name.epoch, name.step)


class Slots:
    """The slots of one rank. Training thread only.

    Args:
        arena: says which there are.
        outcomes: what became of earlier saves.
        when_busy: ``skip``, ``wait`` or ``replace``.
        replaced: called with the attempt whose snapshot gave way.
    """

    def __init__(self, arena: Arena, outcomes: Outcomes, when_busy: str, replaced: Callable[[str], None]) -> None:
        self._arena = arena
        self._outcomes = outcomes
        self._when_busy = when_busy
        self._replaced = replaced
        self._read: dict[int, tuple[tuple[int, ...], str | None]] = {}
        self._seen: dict[int, Held] = {}

    def may_save(self, besides: Slot | None = None) -> bool:
        """Whether a save that nobody insists on may begin now.

        Args:
            besides: a slot that is being filled.
        """
        if self._when_busy != "skip":
            return True
        slots = [slot for slot in self._arena.slots() if slot != besides]
        return choose([self._held(slot) for slot in slots]) is not None

    def idle(self) -> list[Slot]:
        """Slots that nobody needs, as of when one was last taken."""
        return [slot for slot in self._arena.slots() if slot.number in self._seen and self._seen[slot.number].free]

    def take(self, timeout: float) -> Slot | None:
        """An empty slot, waited for until the timeout; None where there was none."""
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while (slot := self._try()) is None:
            if remaining(deadline) == 0:
                return None
            time.sleep(min(pause, remaining(deadline)))
            pause = min(2 * pause, _LONGEST_PAUSE)
        empty(slot)
        return slot

    def _try(self) -> Slot | None:
        slots = self._arena.slots()
        held = [self._held(slot) for slot in slots]
        self._seen = {slot.number: each for slot, each in zip(slots, held, strict=True)}
        number = choose(held)
        if number is not None:
            return slots[number]
        number = choose_to_replace(held) if self._when_busy == "replace" else None
        return slots[number] if number is not None and self._replace(slots[number], held[number].attempt) else None

    def _replace(self, slot: Slot, attempt: str | None) -> bool:
        """Take a sealed slot from under the keeper; False where it has just begun to read."""
        aside = slot.seal.with_suffix(".aside")
        slot.seal.replace(aside)
        if attempt is None or slot.is_marked(slot.draining, attempt):
            aside.replace(slot.seal)
            return False
        remove(aside)
        self._replaced(attempt)
        return True

    def look(self, slot: Slot) -> None:
        """Read a seal that was just put, so that no save waits for that. Whoever calls it has no other call beside."""
        self._sealed(slot)

    def _held(self, slot: Slot) -> Held:
        attempt = self._sealed(slot)
        if attempt is None:
            return Held()
        draining = _says(slot.draining, attempt)
        over = _says(slot.drained, attempt) or self._failed(attempt)
        return Held(attempt, draining, over)

    def _sealed(self, slot: Slot) -> str | None:
        """The attempt that a slot is sealed for; None for none. A seal is taken apart once: training waits for this."""
        try:
            status = os.stat(slot.seal)
        except OSError:
            return None
        known = self._read.get(slot.number)
        version = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode)
        if known is None or known[0] != version:
            try:
                known = version, _attempt_of(read(slot.seal))
            except OSError:
                return None
            self._read[slot.number] = known
        return known[1]

    def _failed(self, attempt: str) -> bool:
        outcome = self._outcomes.get(attempt)
        return outcome is not None and not outcome.committed


def _says(marker: Path, attempt: str) -> bool:
    """:meth:`ftrun.checkpoint.memory.tier.Slot.is_marked` with as few calls as can be, for training waits."""
    try:
        descriptor = os.open(marker, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.read(descriptor, len(attempt) + 1) == attempt.encode()
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _attempt_of(seal: bytes) -> str | None:
    try:
        return Seal.from_bytes(seal).attempt
    except ValueError:  # a damaged one says nothing
        return None


def empty(slot: Slot) -> None:
    """Take away what says that a slot holds something. The markers name the snapshot that they are about, and stay.

    Raises:
        OSError: it can't be taken away.
    """
    if not os.path.isdir(slot.directory):
        make_directory(slot.directory)
    remove(slot.seal)
