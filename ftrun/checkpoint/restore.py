"""Reading a checkpoint back into values: only the files that a rank needs, every byte verified."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint import shard
from ftrun.checkpoint.checksums import FileRecord, read_verified
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root, attempt_key, rank_json
from ftrun.checkpoint.manifest import BadManifestError, Manifest
from ftrun.checkpoint.rankfile import RankRecord
from ftrun.checkpoint.state import decode
from ftrun.checkpoint.words import dtype_of
from ftrun.errors import CheckpointError, CorruptCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    import torch


@dataclass(frozen=True)
class RankState:
    """What a rank gets back.

    Attributes:
        value: the value that was encoded, with CPU tensors. Tensors of one file share one buffer.
        data: data position.
        step: number of finished steps in the state.
        total: number of steps that the run asked for, where it did.
        manifest: the checkpoint's manifest.
        own: whether this rank wrote it. If not (more ranks than before) it is rank 0's: what must differ
            between ranks, like random states, has to be made anew.
    """

    value: Any
    data: dict[str, Any] | None
    step: int
    total: int | None
    manifest: Manifest
    own: bool


def load(root: Root, name: str | AttemptName, rank: int, world_size: int) -> RankState:
    """Read what a rank of ``world_size`` resumes from. Each rank calls this, with the name agreed on.

    Raises:
        CorruptCheckpoint: bytes are missing or differ from what was committed.
        CheckpointError: a file can't be read.
        UsageError: no name of a checkpoint, or one that a newer ftrun wrote.
        ValueError: the rank isn't below the world size.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    return _Load(root, AttemptName.of(name)).run(rank)


class _Load:
    """One rank's reading of one checkpoint."""

    def __init__(self, root: Root, name: AttemptName) -> None:
        self._root, self._name = root, name

    def run(self, rank: int) -> RankState:
        manifest = self._manifest()
        own = rank < manifest.world_size
        record = self._record(manifest, rank if own else 0)
        tensors = self._tensors(manifest, record)
        try:
            value = decode(record.tree, tensors)
        except ValueError as error:
            raise self._corrupt(rank_json(record.rank), str(error)) from error
        return RankState(value, record.data, record.step, record.total, manifest, own)

    def _manifest(self) -> Manifest:
        with self._open(MANIFEST) as file:
            content = file.read()
        try:
            return Manifest.from_bytes(content)
        except BadManifestError as error:
            raise self._corrupt(MANIFEST, str(error)) from error

    def _record(self, manifest: Manifest, rank: int) -> RankRecord:
        name = rank_json(rank)
        with self._open(name) as file:
            content = read_verified(file, self._file_record(manifest, name), attempt=str(self._name), name=name)
        try:
            record = RankRecord.from_bytes(bytes(content))
        except ValueError as error:
            raise self._corrupt(name, str(error)) from error
        if (record.attempt, record.rank) != (str(self._name), rank):
            raise self._corrupt(name, f"is that of rank {record.rank} of {record.attempt}")
        return record

    def _tensors(self, manifest: Manifest, record: RankRecord) -> dict[str, torch.Tensor]:
        shards = {name: self._shard(manifest, name) for name in {entry.file for entry in record.tensors.values()}}
        tensors = {}
        for name, entry in record.tensors.items():
            try:
                tensors[name] = shard.view_as(shards[entry.file][name], dtype_of(entry.dtype), entry.shape)
            except (KeyError, RuntimeError, ValueError) as error:
                raise self._corrupt(entry.file, f"has no proper tensor {name!r}: {error}") from error
        return tensors

    def _shard(self, manifest: Manifest, name: str) -> dict[str, torch.Tensor]:
        record = self._file_record(manifest, name)
        with self._open(name) as file:
            return shard.read(file, record, attempt=str(self._name), name=name)

    def _file_record(self, manifest: Manifest, name: str) -> FileRecord:
        record = manifest.files.get(name)
        if record is None:
            raise self._corrupt(MANIFEST, f"does not list {name}")
        return record

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        try:
            with self._root.reading(attempt_key(self._name, name)) as file:
                yield file
        except FileNotFoundError as error:
            raise self._corrupt(name, "is missing") from error
        except CheckpointError:
            raise
        except OSError as error:
            path = self._root.path / attempt_key(self._name, name)
            raise CheckpointError(f"{path} can't be read: {error.strerror}; check the storage") from error

    def _corrupt(self, name: str, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{name} {what}", str(self._name))
