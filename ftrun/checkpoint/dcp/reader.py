"""Reading: a ``StorageReader`` over whole checkpoints, every byte verified, nothing of them unpickled."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.futures import Future

from ftrun.checkpoint import offline, reader
from ftrun.checkpoint.dcp.found import Found
from ftrun.checkpoint.dcp.records import step_of
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.opened import Opened
from ftrun.errors import CheckpointError, CorruptCheckpoint, FtrunError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_log = logging.getLogger(__name__)


class Reader(StorageReader):
    """Storage for ``dcp.load``: the newest whole checkpoint under a root, into any number of ranks and any sharding.

    Every byte is verified against the checkpoint's checksums while it is read, and nothing in the checkpoint is
    unpickled. A newer checkpoint that isn't whole is skipped with a warning. One whose bytes turn out damaged while
    they are read fails this load on all ranks and is marked as bad, so that the next load takes an older one::

        dcp.load(state, storage_reader=ftrun.dcp.Reader("s3://bucket/llama"))
        dcp.load(state, checkpoint_id="1200", storage_reader=ftrun.dcp.Reader(root))    # the one after 1200 steps

    It also reads what a :class:`ftrun.Session` stored: the tracked objects are the keys of the state::

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=ftrun.dcp.Reader("runs/llama"))

    Args:
        root: a checkpoint root, a run directory, one checkpoint's own directory, or a URL of a root or checkpoint.
        checkpoint: one checkpoint by its name, as ``ftrun ckpt ls`` shows it.
        prefix: the part of the checkpoint that is the state, as a path of keys: ``tracked/model`` where the state
            is ``model.state_dict()`` itself. By default all of what ``dcp.save`` stored, and ``tracked`` otherwise.
        storage_options: for the driver of a URL.

    Raises:
        UsageError: the root can't be a root.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        checkpoint: str | None = None,
        prefix: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._root, inside = offline.open_root(root, storage_options)
        self._checkpoint = checkpoint or inside
        self._step: int | None = None
        self._prefix = prefix
        self._found: Found | None = None

    @property
    def checkpoint_id(self) -> str:
        """The root: DCP puts it into its logs."""
        return self._root.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a checkpoint or a step."""
        try:
            return AttemptName.parse(str(checkpoint_id)) is not None or step_of(checkpoint_id) is not None
        except UsageError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, on each rank; with the name of a checkpoint, or its number of finished steps.

        Raises:
            UsageError: it is neither.
        """
        self._close()
        if checkpoint_id is not None and AttemptName.parse(str(checkpoint_id)):
            self._checkpoint, self._step = str(checkpoint_id), None
        elif checkpoint_id is not None:
            self._checkpoint, self._step = None, step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Choose the checkpoint and say what is in it, on each rank.

        Where that fails, whoever looks into what is returned gets the error. DCP would take an error from here for a
        checkpoint that its ranks wrote without agreement, look for one of those, and lose the reason on the way.
        """
        self._close()
        try:
            self._found = self._find()
            return self._found.metadata()
        except (FtrunError, OSError) as error:
            return _Unreadable(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See whether there is something to read, on each rank.

        Raises:
            UsageError: there is no such checkpoint, or it has no such part.
            NoValidCheckpoint: there are checkpoints, and none of them is whole.
            CheckpointError: storage can't be read.
        """
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in a rank's plan which checkpoint it is about."""
        return replace(plan, storage_data=str(self._ready().opened.name))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all ranks read the same checkpoint, on the coordinator.

        Raises:
            CheckpointError: one was committed, or went away, while the ranks were choosing.
        """
        names = {str(plan.storage_data): rank for rank, plan in enumerate(plans) if plan.storage_data is not None}
        if len(names) > 1:
            said = ", ".join(f"rank {rank} would read {name}" for name, rank in names.items())
            raise CheckpointError(
                f"the newest checkpoint in {self._root.url} changed while the ranks were looking ({said}): load again, "
                "or name one with Reader(root, checkpoint=...)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read a rank's part of the state, on each rank.

        Raises:
            CorruptCheckpoint: bytes aren't those that were written.
            CheckpointError: storage can't be read.
        """
        found = self._ready()
        try:
            found.read(plan.items, planner)
        except CorruptCheckpoint as error:
            _log.error("%s", error)
            with contextlib.suppress(OSError):  # a root that can only be read has no room for the note
                reader.mark_bad(self._root, error.attempt, error.detail)
            raise
        finally:
            found.opened.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _close(self) -> None:
        if self._found is not None:
            self._found.opened.close()
        self._found = None

    def _ready(self) -> Found:
        if self._found is None:
            raise CheckpointError("a storage reader is asked for its metadata first")
        return self._found

    def _find(self) -> Found:
        """The newest checkpoint whose records are whole; payloads are verified when they are read."""
        damaged: list[str] = []
        while True:
            commit = offline.choose(self._root, step=self._step, name=self._checkpoint, exclude=damaged)
            try:
                opened = Opened(self._root, commit.name)
                with contextlib.ExitStack() as stack:
                    stack.callback(opened.close)
                    found = Found.of(opened, self._prefix)
                    stack.pop_all()
                    return found
            except CorruptCheckpoint as error:
                if self._checkpoint is not None:
                    raise
                _log.warning("checkpoint %s is skipped: %s", error.attempt, error.detail)
                damaged.append(str(commit.name))


class _Unreadable(Metadata):
    """Metadata that could not be had. To look into it raises the reason."""

    def __init__(self, error: FtrunError | OSError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self.error
