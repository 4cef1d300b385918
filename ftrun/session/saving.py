"""Saving from a Session's side: what goes into a snapshot, which name it gets, and what became of it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftrun import events
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.arena import Arena
from ftrun.checkpoint.memory.outcomes import Outcomes
from ftrun.checkpoint.memory.tier import Tier
from ftrun.checkpoint.plan.encoding import Encoding
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.record_text import RecordText
from ftrun.checkpoint.records import RankRecord, Seal
from ftrun.checkpoint.sealed import canonical
from ftrun.checkpoint.staging.sealing import ring, seal_slot
from ftrun.checkpoint.staging.slots import Slots
from ftrun.checkpoint.staging.stager import Stager
from ftrun.checkpoint.staging.work import is_crowded, remaining
from ftrun.errors import CheckpointError, NotStorable
from ftrun.garbage import no_collections
from ftrun.session.open_saves import OpenSaves, Save

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch.distributed import Store

    from ftrun.checkpoint.memory.slot_memory import SlotMemory
    from ftrun.checkpoint.memory.tier import Slot
    from ftrun.checkpoint.plan.planner import Plan
    from ftrun.checkpoint.state import Encoded
    from ftrun.contract import WorkerContract
    from ftrun.session.checkpoint import Checkpoint
    from ftrun.session.place import Place

_SLOT_SECONDS = 600.0
_SETTLE_SECONDS = 600.0
_NAMED = 3


@dataclass(frozen=True)
class _Room:
    """Where a save goes."""

    slot: Slot
    memory: SlotMemory | None


@dataclass(frozen=True)
class _Taken:
    """A snapshot on its way, and what will be said of it.

    Attributes:
        save: what is said of the save.
        room: where it goes.
        plan: what this rank stores.
        tree: of the state.
        settled: parts of the tree, see :class:`ftrun.checkpoint.state.Encoded`.
    """

    save: Save
    room: _Room
    plan: Plan
    tree: Any
    settled: Mapping[str, Any]


class Saver:
    """Takes snapshots and hears what became of them. Training thread only; the keeper drains and commits.

    Args:
        place: where this rank stands.
        contract: what the launcher told this worker; it has an epoch.
        log: where events go.
        store: by which ranks agree on who stores what; None for a group of one.

    Attributes:
        stall_seconds: how long the last save held the training thread, at its fence too; None before the first.
        commit_seconds: from the seal of the last checkpoint that was committed to its commit; None before that.
    """

    def __init__(self, place: Place, contract: WorkerContract, log: events.EventLog, store: Store | None) -> None:
        self._place = place
        self._contract = contract
        self._log = log
        self._tier = Tier(Path(contract.tier)) if contract.tier else Tier.of(contract.run_path, contract.node)
        self._tier.require()
        fallback = Path(contract.local or contract.run_dir) / "memory"
        has_gpu = torch.cuda.is_available() and place.local_rank < torch.cuda.device_count()
        device = torch.device("cuda", place.local_rank) if has_gpu else None
        self._arena = Arena(self._tier, place.rank, fallback, device=device)
        self._encoding = Encoding()
        self._planner = Planner(place.rank, place.world_size, store)
        self._open = OpenSaves(self._tier, place.rank, contract.root, self._planner.distrust)
        self._slots = Slots(self._arena, Outcomes(self._tier), contract.when_busy, self._open.give_way)
        self._stager = Stager(overlap=contract.overlap, crowded=is_crowded(place.local_world_size))
        self._text = RecordText()
        self._objects: dict[str, Any] = {}
        self._saves = 0
        self._tried = (-1, 0)
        self._held: float | None = None
        self._filling: Slot | None = None

    @property
    def stall_seconds(self) -> float | None:
        """How long the last save held the training thread."""
        return None if self._held is None else self._held + self._stager.held

    @property
    def commit_seconds(self) -> float | None:
        """From the seal of the last checkpoint that was committed to its commit."""
        return self._open.commit_seconds

    def watch(self, objects: Mapping[str, Any]) -> None:
        """Say what is tracked, as the script gave it. Again whenever that changes."""
        self._objects = dict(objects)
        self._stager.watch([each for each in objects.values() if isinstance(each, torch.optim.Optimizer)])

    def prepare(self, collect: Callable[[], dict[str, Any]]) -> None:
        """Get memory for states like this one, in the background. After the first step, on all ranks."""
        encoded = self._encoding.encode(collect())
        size = self._planner.plan(encoded, self._objects, 0).size
        if size:
            self._stager.in_background(lambda: self._prepare(size))

    def _prepare(self, size: int) -> None:
        with contextlib.suppress(OSError):  # the first save meets it again, and can say it
            self._arena.prepare(size)

    def may_save(self) -> bool:
        """Whether a save that nobody insists on may begin now. Rank 0 asks before the ranks agree on one."""
        return self._slots.may_save(besides=self._filling)

    def save(
        self,
        step: int,
        total: int | None,
        reason: str,
        collect: Callable[[], dict[str, Any]],
        data: dict[str, Any],
    ) -> None:
        """Take a snapshot of the state that ``collect`` returns. Called on all ranks at one step boundary.

        Returns when all of it is copied that anything but the steps of tracked optimizers may change. Waits first for
        an empty slot. What goes wrong with memory is reported, and the next :meth:`wait` raises it.

        Raises:
            NotStorable: something in the state, or in the data position, can't be stored.
        """
        with no_collections():
            self._save(step, total, reason, collect, data)

    def _save(
        self,
        step: int,
        total: int | None,
        reason: str,
        collect: Callable[[], dict[str, Any]],
        data: dict[str, Any],
    ) -> None:
        began = time.monotonic()
        self._saves += 1  # first: ranks that count otherwise name their saves otherwise, and never commit again
        settled = self._stager.settle(_SETTLE_SECONDS)
        self._held = None
        name = str(AttemptName(self._contract.epoch or 0, step, self._suffix(step)))
        save = Save(name, step, total, reason, data, "", began)
        self._open.add(save)
        try:
            position = _position(step, total, data)
            save = replace(save, data=copy.deepcopy(data), position=position)
            encoded = self._encoding.encode(collect())
            plan = self._planner.plan(encoded, self._objects, self._saves)
            self._fill(save, plan, encoded, settled=settled)
        except BaseException as error:  # the caller hears of it; nobody else is to wait for this save or count on it
            self._filling = None
            self._open.drop(save, f"it was broken off: {type(error).__name__}: {error}")
            raise
        self._held = time.monotonic() - began

    def _fill(self, save: Save, plan: Plan, encoded: Encoded, *, settled: bool) -> None:
        try:
            if not settled:
                raise CheckpointError(f"the snapshot before is not copied after {_SETTLE_SECONDS:g} s")
            room = self._room(plan.size)
            self._filling = room.slot
            finish = partial(self._finish, _Taken(save, room, plan, encoded.tree, encoded.settled))
            self._stager.stage(plan, room.memory, encoded.tensors, finish, encoded.alike)
        except OSError as error:
            self._open.drop(save, str(error))

    def _suffix(self, step: int) -> str:
        """The same on all ranks without a word between them, and new for each save.

        One step may be saved again, if its first save fails; it begins with the number of the try, since the later of
        two names is taken for the newer snapshot.
        """
        contract = self._contract
        self._tried = (step, self._tried[1] + 1 if self._tried[0] == step else 0)
        text = f"{contract.run_id}/{contract.epoch}/{contract.start}/{step}/{self._saves}"
        number = min(self._tried[1], 0xF)
        return f"{number:x}{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()[1:]}"

    def _room(self, size: int) -> _Room:
        slot = self._slots.take(_SLOT_SECONDS)
        if slot is None:
            raise CheckpointError(
                f"rank {self._place.rank} found no empty slot in memory for {_SLOT_SECONDS:g} s: the snapshots before "
                "are still being drained; `ftrun status` shows how far they are"
            )
        return _Room(slot, self._arena.memory(slot, size, self._slots.idle()) if size else None)

    def _finish(
        self, taken: _Taken, torn: Collection[str], found: Mapping[str, str], error: BaseException | None
    ) -> None:
        """On the helper's thread: all is copied."""
        try:
            if error is not None:
                self._open.drop(taken.save, f"its state could not be copied: {error}")
            elif torn:
                self._open.drop(taken.save, _torn(torn))
            else:
                self._seal(taken, found)
        except Exception as problem:  # of whatever kind: else the save never ends, and whoever waits for it neither
            self._open.drop(taken.save, f"its record could not be written: {str(problem) or repr(problem)}")
        finally:
            self._filling = None

    def _seal(self, taken: _Taken, found: Mapping[str, str]) -> None:
        save, plan, room = taken.save, taken.plan, taken.room
        place = self._place
        record = RankRecord(
            attempt=save.attempt,
            rank=place.rank,
            step=save.step,
            total=save.total,
            data=save.data,
            tree=taken.tree,
            tensors=plan.with_digests(found),
            pieces=plan.pieces,
        )
        first = place.rank - place.local_rank
        seal = Seal(
            attempt=save.attempt,
            run_id=self._contract.run_id,
            rank=place.rank,
            world_size=place.world_size,
            node=place.node,
            node_ranks=tuple(range(first, first + place.local_world_size)),
            step=save.step,
            total=save.total,
            reason=save.reason,
            data=save.data,
            parent=self._contract.resume,
            torch=torch.__version__,
            run_attempt=self._contract.attempt,
            files={},
            word=plan.word(found, save.position),
            sealed_at=0.0,
        )
        seal_slot(room.slot, room.memory, self._text.to_bytes(record, taken.settled), seal)
        ring(self._tier)
        self._slots.look(room.slot)  # the training thread looks when this one is done
        if place.rank == 0:
            held = self._held if self._held is not None else time.monotonic() - save.began
            self._log.write(events.Saved(step=save.step, reason=save.reason, seconds=held, size=plan.size))

    def poll(self) -> list[Checkpoint]:
        """What was committed since the last call. Called at every step boundary, and quick.

        Whatever is still to be copied is copied here: a loop whose optimizer doesn't step is fenced too.
        """
        self._stager.fence(by_step=False)
        return self._open.news()

    def wait(self, timeout: float) -> None:
        """Wait until everything that was saved is a checkpoint, or known never to be one.

        Raises:
            CheckpointError: the last save failed.
            AgreementTimeout: an outcome is still open.
        """
        deadline = time.monotonic() + timeout
        self._stager.settle(timeout)
        self._open.wait(remaining(deadline))

    def close(self, timeout: float) -> None:
        """Finish the snapshot under way, and let go of the memory. The keeper drains what is sealed without us."""
        if self._stager.close(timeout):
            self._arena.close()


def _position(step: int, total: int | None, data: dict[str, Any]) -> str:
    """What all ranks of a save must agree on, in short."""
    try:
        text = canonical({"step": step, "total": total, "data": data})
    except (ValueError, TypeError) as error:
        raise NotStorable(
            f"the data position can't be stored: {error}; return plain, finite values from the loader's state_dict()"
        ) from error
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _torn(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{shown}{more} changed outside an optimizer step while being copied; from the next save on that is copied "
        "at once"
    )
