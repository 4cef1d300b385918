"""Saving and restoring from a Session's side: what goes into a snapshot, and how it becomes a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.checkpoint import layout, reader, restore, state, writer
from ftrun.errors import CorruptCheckpoint
from ftrun.session.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.checkpoint.restore import RankState
    from ftrun.contract import WorkerContract
    from ftrun.session.place import Place

_log = logging.getLogger(__name__)


class Saver:
    """Takes snapshots and has them drained and committed in the background. Training thread only.

    Args:
        place: where this rank stands.
        contract: what the launcher told this worker; it has an epoch.
        log: where events go.
        committed: called on the background thread with each checkpoint that is known to be durable.
    """

    def __init__(
        self,
        place: Place,
        contract: WorkerContract,
        log: events.EventLog,
        committed: Callable[[Checkpoint], None],
    ) -> None:
        self._contract = contract
        self._rank = place.rank
        self._log = log
        self._committed = committed
        self._saves = 0
        self._reasons: dict[str, tuple[str, int | None]] = {}
        self._writer = writer.Writer(
            layout.Root.open(contract.root),
            writer.Place(place.rank, place.world_size, place.node, place.local_rank, place.local_world_size),
            writer.Owner(contract.run_id, contract.epoch or 0, contract.since, contract.resume),
            keep_last=contract.keep_last,
            on_event=self._on_event,
        )

    def save(
        self,
        step: int,
        total: int | None,
        reason: str,
        collect: Callable[[], dict[str, Any]],
        data: dict[str, Any],
    ) -> None:
        """Stage the state that ``collect`` returns and hand it to the background. Called on all ranks at one step.

        Returns as soon as the state is copied; waits first for the save before, if that is still being written.
        """
        started = time.monotonic()
        self._saves += 1
        suffix = self._suffix(step)
        encoded = state.encode(collect())
        tensors = writer.stage(encoded)
        name = str(layout.AttemptName(self._contract.epoch or 0, step, suffix))
        self._reasons[name] = (reason, total)
        self._writer.submit(
            writer.Snapshot(
                step=step,
                reason=reason,
                total=total,
                tree=encoded.tree,
                tensors=tensors,
                data=data,
                suffix=suffix,
            )
        )
        if self._rank == 0:
            size = sum(tensor.nbytes for tensor in tensors.values())
            seconds = time.monotonic() - started
            self._log.write(events.Saved(step=step, reason=reason, seconds=seconds, size=size))

    def _suffix(self, step: int) -> str:
        """The same on all ranks without a word between them, and new for each save: an epoch is never used twice."""
        text = f"{self._contract.run_id}/{self._contract.epoch}/{step}/{self._saves}"
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything that was saved is committed.

        Raises:
            CheckpointError: the last save failed.
            AgreementTimeout: it is not done in time.
        """
        failure = self._writer.wait(timeout)
        if failure is not None:
            raise failure

    def close(self, timeout: float) -> None:
        """Give what is under way its time, then let go of it."""
        self._writer.close(timeout)

    def _on_event(self, kind: str, fields: dict[str, Any]) -> None:
        name, step = str(fields["attempt"]), int(fields["step"])
        if kind in ("committed", "save_failed"):
            reason, total = self._reasons.pop(name, ("", None))
        if kind == "committed":
            self._committed(Checkpoint(step, name, self._contract.root, total, reason))
        if self._rank != 0:
            return
        if kind == "committed":
            self._log.write(
                events.Committed(
                    step=step, checkpoint=name, seconds=float(fields["seconds"]), size=int(fields["bytes"])
                )
            )
        elif kind == "save_failed":
            self._log.write(events.SaveFailed(step=step, checkpoint=name, error=str(fields["error"])))
            _log.warning("ftrun: %s; training goes on", fields["error"])
        elif kind == "save_warning":
            _log.warning("ftrun: checkpoint %s is committed, but %s", name, fields["message"])


def load(contract: WorkerContract, place: Place) -> RankState | None:
    """This rank's state in the commit that the attempt resumes from; None for a fresh start.

    Raises:
        CorruptCheckpoint: bytes differ from what was committed; it is marked, and not chosen again.
        CheckpointError: they can't be read.
    """
    if contract.resume is None:
        return None
    root = layout.Root.open(contract.root)
    try:
        return restore.load(root, contract.resume, place.rank, place.world_size)
    except CorruptCheckpoint as error:
        # Without a launcher nobody else would, and the next start would choose it again.
        with contextlib.suppress(OSError):
            reader.mark_bad(root, error.attempt, error.detail)
        raise
