"""The writing side of a rank: copy state into memory on the training thread, drain and commit on another."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.commit import Save
from ftrun.checkpoint.retention import MIN_KEEP
from ftrun.checkpoint.snapshot import Owner, Place, Snapshot
from ftrun.errors import AgreementTimeout, CheckpointError, FtrunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.state import Encoded

__all__ = ["Owner", "Place", "Snapshot", "Writer", "stage"]

_log = logging.getLogger(__name__)


def stage(encoded: Encoded) -> dict[str, torch.Tensor]:
    """Copy every tensor to fresh contiguous CPU memory. The training thread calls this between steps.

    When it returns, the copies are complete and training may change the originals.
    """
    staged = {}
    devices = set()
    with torch.no_grad():
        for name, tensor in encoded.tensors.items():
            source = tensor.resolve_conj().resolve_neg()
            pinned = source.is_cuda
            staged[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            staged[name].copy_(source, non_blocking=pinned)
            if pinned:
                devices.add(source.device)
    for device in devices:
        torch.cuda.synchronize(device)
    return staged


@dataclass(frozen=True)
class _Job:
    snapshot: Snapshot
    submitted: float  # time.monotonic()


class Writer:
    """Drains and commits snapshots, one after the other, on one background thread of a rank.

    Nothing that goes wrong there reaches the training thread: it shows in ``save_failed`` events, in
    :attr:`last_failure` and in what :meth:`wait` returns, and the next save tries again.

    Args:
        root: the checkpoint root.
        place: where this rank stands.
        owner: run and epoch on whose behalf it writes.
        keep_last: how many commits are kept, at least 2.
        on_event: called on the background thread with a kind and its fields: ``drained`` (attempt, step,
            bytes of this rank, seconds), ``committed`` (attempt, step, seconds since submit, bytes of all
            ranks), ``save_failed`` (attempt, step, error), ``save_warning`` (attempt, step, message).
        timeout: seconds after which a save gives up waiting for other ranks.

    Raises:
        UsageError: ``keep_last`` is below 2.
    """

    def __init__(
        self,
        root: Root,
        place: Place,
        owner: Owner,
        *,
        keep_last: int = 3,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        timeout: float = 600.0,
    ) -> None:
        if keep_last < MIN_KEEP:
            raise UsageError(
                f"keep {keep_last} checkpoints: the bytes of a single one may turn out damaged; "
                f"set checkpoint.keep.last to {MIN_KEEP} or more"
            )
        self._root, self._place, self._owner = root, place, owner
        self._keep_last, self._timeout, self._on_event = keep_last, timeout, on_event
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._failure: FtrunError | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def last_failure(self) -> FtrunError | None:
        """Why the most recently finished save failed; None where it did not."""
        with self._changed:
            return self._failure

    @property
    def busy(self) -> bool:
        """Whether a save is under way, so that :meth:`submit` would wait."""
        with self._changed:
            return self._job is not None

    def submit(self, snapshot: Snapshot) -> None:
        """Hand a snapshot over. Waits, as long as it takes, until the one before is committed or has failed.

        All ranks submit the same steps with the same suffixes. Called on the training thread.

        Raises:
            RuntimeError: the writer is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._job is None)
            if self._closed:
                raise RuntimeError("this checkpoint writer is closed")
            self._job = _Job(snapshot, time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftrun-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> FtrunError | None:
        """Wait until everything submitted is committed or has failed; the failure of the last save, or None.

        Raises:
            AgreementTimeout: it is still under way after ``timeout`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._job is None, timeout):
                raise AgreementTimeout(f"the checkpoint is still not committed after {timeout:g} s")
            return self._failure

    def close(self, timeout: float | None = None) -> None:
        """Finish what was submitted and end the thread. Again is no error.

        Raises:
            AgreementTimeout: it is still under way after ``timeout`` seconds.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.wait(timeout)
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                job = self._job
            if job is None:
                return
            failure = self._perform(job)
            with self._changed:
                self._failure, self._job = failure, None
                self._changed.notify_all()
            del job  # the snapshot's memory is free while the thread idles

    def _perform(self, job: _Job) -> FtrunError | None:
        save = Save(self._root, self._place, self._owner, job.snapshot, self._timeout)
        about = {"attempt": str(save.name), "step": job.snapshot.step}
        try:
            self._save(save, job, about)
        except Exception as error:  # storage, state and memory fail in any way; training goes on, so this thread must
            failure = _explain(save, error)
            save.give_up(str(error))
            self._emit("save_failed", about | {"error": str(failure)})
            return failure
        for problem in save.tidy(self._keep_last):
            self._emit("save_warning", about | {"message": problem})
        return None

    def _save(self, save: Save, job: _Job, about: dict[str, Any]) -> None:
        started = time.monotonic()
        size = save.drain()
        self._emit("drained", about | {"bytes": size, "seconds": time.monotonic() - started})
        manifest = save.commit()
        self._emit("committed", about | {"seconds": time.monotonic() - job.submitted, "bytes": manifest.size})

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(kind, fields)
        except Exception:  # an observer's mistake must not cost a checkpoint
            _log.exception("the observer of %s events failed", kind)


def _explain(save: Save, error: Exception) -> FtrunError:
    what = f"checkpoint {save.name} was not committed: {error}"
    kind = AgreementTimeout if isinstance(error, AgreementTimeout) else CheckpointError
    # Not chained: the traceback's frames would keep the whole snapshot in memory until the next save.
    _log.debug("%s", what, exc_info=error)
    return kind(f"{what}")
