"""Writing: a ``StorageWriter`` whose saves are committed as a whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ftrun.checkpoint import epochs, retention
from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.dcp import arguments, records
from ftrun.checkpoint.dcp.payload import Payload, holders
from ftrun.checkpoint.dcp.records import Order, Part
from ftrun.checkpoint.keeper.commit import give_up, manifest_of
from ftrun.checkpoint.layout import (
    LATEST,
    MANIFEST,
    AttemptName,
    Root,
    attempt_key,
    done_json,
    rank_json,
    rank_shard,
)
from ftrun.checkpoint.records import About, DoneRecord
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ftrun.checkpoint.checksums import FileRecord

_log = logging.getLogger(__name__)


class Writer(StorageWriter):
    """Storage for ``dcp.save`` and ``dcp.async_save`` with ftrun's guarantee: a save is whole, or it isn't there.

    Each save goes to a directory of its own under ``root``, whose name never comes twice; nothing is overwritten.
    What makes it a checkpoint is its manifest, which is written last, and names every file with its checksums. A rank
    that fails leaves an attempt without a manifest, which no reader looks at. No value is pickled: what is no tensor
    is stored as JSON, and refused by its name where that can't be done. One writer serves any number of saves, one
    at a time, and so does a new one for each::

        dcp.save(state, storage_writer=ftrun.dcp.Writer("s3://bucket/llama"))
        dcp.save(state, checkpoint_id="1200", storage_writer=writer)       # after 1200 finished steps

        group = dist.new_group(backend="gloo")                             # never the training's own group
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
        future.result()                                                    # committed when this returns

    The newest save wins, whatever its step. ``metadata.storage_meta.checkpoint_id`` of what ``dcp.save`` returns is
    the checkpoint's name. Options of DCP's planners, process groups, ``no_dist=True`` and both kinds of asynchronous
    checkpointers work as with DCP's own writer; ``use_collectives=False`` doesn't, for then nobody could commit.

    Args:
        root: the checkpoint root: a path or a URL. It belongs to this run alone.
        run_id: identity of the run. A root that holds another one is refused.
        keep_last: how many checkpoints stay, at least 2; all if left out.
        storage_options: for the driver of a URL.

    Raises:
        UsageError: the root can't be a root, ``run_id`` is no text, or ``keep_last`` no number from 2 on.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        run_id: str = "dcp",
        keep_last: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._where, self._storage_options = root, dict(storage_options or {})
        self._root = Root.open(root, self._storage_options)
        self._run_id = run_id
        self._keep_last = keep_last
        self._step: int | None = None
        self._plans: list[SavePlan] = []
        arguments.check(self._root, run_id, keep_last)

    def __getstate__(self) -> dict[str, Any]:
        # For the process of an asynchronous save, which makes its own connection.
        return {name: value for name, value in self.__dict__.items() if name != "_root"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._root = Root.open(self._where, self._storage_options)

    @property
    def checkpoint_id(self) -> str:
        """The root: DCP puts it into its logs."""
        return self._root.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        try:
            records.step_of(checkpoint_id)
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the number of finished steps of the next save, on each rank.

        Raises:
            UsageError: it is no number.
        """
        self._step = records.step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, on each rank.

        Raises:
            UsageError: the ranks don't talk to each other.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "ftrun.dcp.Writer commits one checkpoint for all ranks; use_collectives=False would make one of each "
                "rank: leave it out, or save with no_dist=True to a root for each rank"
            )

    def storage_meta(self) -> StorageMeta | None:
        """What planners may know of the storage."""
        return StorageMeta(checkpoint_id=self._root.url)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing of a rank's plan needs to change."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the attempt and tell it to all ranks, on the coordinator.

        Raises:
            UsageError: the root can't be written or holds another run, or a planner reuses what a writer doesn't know.
        """
        plans = self._remembered(plans)
        step, self._step = self._step, None
        claimed = epochs.claim(self._root, self._run_id, fresh=False, parent=None)
        # Without a step the number of the save stands for it.
        name = AttemptName(claimed.epoch, claimed.epoch if step is None else step, uuid.uuid4().hex[:8])
        about = About(
            run_id=self._run_id,
            world_size=len(plans),
            step=name.step,
            total=None,
            reason="dcp",
            data=None,
            parent=None,
            torch=str(torch.__version__),
        )
        held = holders([plan.items for plan in plans])
        return [
            replace(plan, storage_data=Order(str(name), rank, held[rank], about)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write a rank's part and vouch for it, on each rank.

        Raises:
            NotStorable: a value can't be stored without pickle.
            CheckpointError: storage failed; so did this save.
        """
        order = plan.storage_data
        if not isinstance(order, Order):
            raise UsageError(f"{type(planner).__name__} drops what a storage writer adds to its plans")
        try:
            part = self._write(order, plan, planner)
        except BaseException as error:
            self._give_up(order, error)
            raise
        size = sum(record.size for record in part.files.values())
        future: Future[list[WriteResult]] = Future()
        # One answer for the rank: DCP hands it to finish(), and looks at nothing in it.
        future.set_result([WriteResult(MetadataIndex(rank_shard(order.rank)), size, (order, part))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator, when every rank has answered.

        Raises:
            CheckpointError: storage failed, or the ranks' answers don't make up the plan; nothing is committed then.
        """
        answers: list[tuple[Order, Part]] = [result.storage_data for rank in results for result in rank]
        answers.sort(key=lambda answer: answer[0].rank)
        orders, parts = [order for order, _ in answers], [part for _, part in answers]
        name = AttemptName.of(orders[0].attempt)
        try:
            self._commit(name, orders[0], parts, metadata)
        except BaseException as error:
            self._give_up(orders[0], error)
            raise
        metadata.storage_meta = StorageMeta(checkpoint_id=str(name))
        self._tidy(name)

    def _remembered(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plans in full: a planner that caches sends those that didn't change without their items."""
        if not all(plan.usable for plan in plans):
            if len(self._plans) != len(plans):
                raise UsageError(
                    "this planner reuses the plan of an earlier save (enable_plan_caching=True), which this writer "
                    "has not seen: use one ftrun.dcp.Writer for all saves, or a planner without caching"
                )
            plans = [plan if plan.usable else self._plans[rank] for rank, plan in enumerate(plans)]
        self._plans = plans
        return plans

    def _write(self, order: Order, plan: SavePlan, planner: SavePlanner) -> Part:
        name = AttemptName.of(order.attempt)
        payload = Payload.of(order, plan.items, planner)
        self._root.make_attempt(name)
        files: dict[str, FileRecord] = {}
        if payload.size:
            file = rank_shard(order.rank)
            self._root.put(attempt_key(name, file), payload.source, payload.size)
            files[file] = payload.record()
        part = Part(order.attempt, order.rank, payload.entries, payload.pieces, payload.values, files)
        if order.rank:
            content = records.rank_record(part, name.step).to_bytes()
            files[rank_json(order.rank)] = self._vouch(name, part, content, order.about)
        return part

    def _vouch(self, name: AttemptName, part: Part, content: bytes, about: About) -> FileRecord:
        """Write a rank's record, and its node's word for all of its files: storage has looked at each of them."""
        file = rank_json(part.rank)
        self._root.create(attempt_key(name, file), content)
        done = records.done_record(part, file, record_of(content), about)
        self._root.create(attempt_key(name, done_json(part.rank)), done.to_bytes())
        return done.files[file]

    def _commit(self, name: AttemptName, order: Order, parts: list[Part], metadata: Metadata) -> None:
        wanted = {key: _offsets(value) for key, value in metadata.state_dict_metadata.items()}
        records.check_whole(parts, str(name), wanted)
        paths = records.plain_paths(metadata.planner_data, wanted)
        content = records.index_record(parts, name.step, paths or wanted, paths).to_bytes()
        parts[0].files[rank_json(0)] = self._vouch(name, parts[0], content, order.about)
        done = [DoneRecord(part.rank, part.files, {}) for part in parts]
        manifest = manifest_of(name, order.about, done)
        self._check_sizes(name, manifest.files)
        # The directory's own name must be durable before anything in it counts as committed.
        self._root.sync_attempts()
        self._root.create(attempt_key(name, MANIFEST), manifest.to_bytes())

    def _check_sizes(self, name: AttemptName, files: Mapping[str, FileRecord]) -> None:
        for file, size in self._root.sizes(name, files.keys()).items():
            if size != files[file].size:
                raise CheckpointError(
                    f"{file} has {size or 'no'} bytes instead of the {files[file].size} written: "
                    f"check the storage under {self._root.url}"
                )

    def _give_up(self, order: Order, error: BaseException) -> None:
        """Remove what this rank wrote, where that can't hurt a commit, and promise that nothing will come of it."""
        name = AttemptName.of(order.attempt)
        mine = [done_json(order.rank), rank_json(order.rank), rank_shard(order.rank)]
        with contextlib.suppress(OSError):
            if self._root.size(attempt_key(name, MANIFEST)) is None:
                # What vouches for a file never outlives it.
                for file in mine:
                    self._root.delete(attempt_key(name, file))
                give_up(self._root, name, order.rank, f"{type(error).__name__}: {error}")

    def _tidy(self, name: AttemptName) -> None:
        """After a commit: the hint for people, and retention, unless a newer save began meanwhile."""
        try:
            if epochs.newest(self._root) > name.epoch:
                return
            self._root.write(LATEST, f"{name}\n".encode("ascii"))
            if self._keep_last is not None:
                policy = retention.KeepPolicy(self._keep_last)
                retention.apply(self._root, policy, run_id=self._run_id, since=1, parent=None)
        except (OSError, ValueError) as error:
            _log.warning("checkpoint %s stands, but what follows a commit failed: %s", name, error)


def _offsets(stored: Any) -> set[records.Offset] | None:
    if isinstance(stored, BytesStorageMetadata):
        return None
    return {tuple(chunk.offsets) for chunk in stored.chunks}
