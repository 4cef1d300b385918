"""The copies of a checkpoint's files, nearest first: sealed memory, the node's local directory, the root.

In memory there may be copies of another node's part, too, which that one has sent here; see
:mod:`ftrun.checkpoint.keeper.peers`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Literal, Protocol

from ftrun.checkpoint.layout import attempt_key
from ftrun.checkpoint.loading.chunks import Damaged
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftrun.checkpoint.checksums import FileRecord
    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.checkpoint.loading.chunks import Chunk
    from ftrun.checkpoint.loading.node_cache import NodeCache
    from ftrun.checkpoint.memory.tier import Slot, Tier
    from ftrun.checkpoint.records import Seal

TierName = Literal["memory", "peer", "local", "root"]
"""The tiers from the nearest one on; ``peer`` is another node's part, copied to this one's memory."""


class Copies(Protocol):
    """One tier's copies of a checkpoint's files. Several threads read them."""

    @property
    def where(self) -> str:
        """The tier, for messages."""

    @property
    def tier(self) -> TierName:
        """The tier, for counts of what was read from it."""

    def opened(self, chunk: Chunk) -> contextlib.AbstractContextManager[int]:
        """A descriptor to read a chunk from, in a block.

        Raises:
            FileNotFoundError: this tier has no such file.
            Damaged: it has another size, or what the block raised of it.
            OSError: it can't be read.
        """


class Replaced(Damaged):
    """A slot holds another snapshot now: the bytes that were sealed are gone, and none of them is damaged."""


class SealedCopies:
    """Files in sealed slots of the memory tier. What each is to be, the seal of its rank says.

    Args:
        tier: the node's memory tier, or that of its copies of another node's part.
        name: of the checkpoint.

    Attributes:
        seals: the seals of the attempt by rank.
    """

    def __init__(self, tier: Tier, name: AttemptName) -> None:
        self.where = "this node's copy of another one's memory" if tier.holds_copies else "memory"
        self.tier: TierName = "peer" if tier.holds_copies else "memory"
        self._files: dict[str, tuple[str, Slot, Seal]] = {}
        self.seals: dict[int, Seal] = {}
        for slot, seal in tier.sealed():
            if seal.attempt == str(name):
                self.seals[seal.rank] = seal
                self._files |= {file: (path, slot, seal) for file, (path, _) in seal.files.items()}

    def record(self, file: str) -> FileRecord | None:
        """What a file is as its seal says it; None where no seal names it."""
        found = self._files.get(file)
        return None if found is None else found[2].files[file][1]

    @contextlib.contextmanager
    def opened(self, chunk: Chunk) -> Iterator[int]:
        """See :class:`Copies`."""
        if chunk.file not in self._files:
            raise FileNotFoundError(chunk.file)
        path, slot, seal = self._files[chunk.file]
        try:
            with _opened(path, chunk.size) as descriptor:
                yield descriptor
        except (Damaged, OSError) as error:
            # The slot may have been filled anew: then its seal is gone, or another.
            if slot.read_seal() != seal:
                raise Replaced("was replaced by a later snapshot") from error
            if isinstance(error, FileNotFoundError):
                raise Damaged("is missing") from error
            raise


class LocalCopies:
    """Files in the node's local tier."""

    where = "the local tier"
    tier: TierName = "local"

    def __init__(self, directory: Path, name: AttemptName) -> None:
        self._directory = directory / str(name)

    @contextlib.contextmanager
    def opened(self, chunk: Chunk) -> Iterator[int]:
        """See :class:`Copies`."""
        with _opened(self._directory / chunk.file, chunk.size) as descriptor:
            yield descriptor


class RootCopies:
    """Files in the root: read from their path, or else downloaded once for all ranks of the node."""

    where = "the root"
    tier: TierName = "root"

    def __init__(self, root: Root, name: AttemptName, cache: NodeCache) -> None:
        self._root, self._name, self._cache = root, name, cache

    @contextlib.contextmanager
    def opened(self, chunk: Chunk) -> Iterator[int]:
        """See :class:`Copies`."""
        key = attempt_key(self._name, chunk.file)
        path = self._root.open_local(key)
        try:
            if path is not None:
                with _opened(path, chunk.size) as descriptor:
                    yield descriptor
                return
            descriptor = self._cache.open(chunk)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Damaged("is missing") from error
        except CheckpointError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{self._root.url}/{key} can't be read: {reason}; check the storage") from error


def before_root(name: AttemptName, tier: Tier | None, local: Path | None, memory: SealedCopies | None) -> list[Copies]:
    """The tiers before the root, nearest first: memory, then what another node has sent there, then the disk.

    Args:
        name: of the checkpoint.
        tier: the node's memory tier.
        local: the node's local tier.
        memory: what lies in the memory tier, where that is to be read.
    """
    found: list[Copies] = [] if memory is None else [memory]
    copied = SealedCopies(tier.copies, name) if tier is not None else None
    if copied is not None and copied.seals:
        found.append(copied)
    if local is not None:
        found.append(LocalCopies(local, name))
    return found


@contextlib.contextmanager
def _opened(path: str | Path, size: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("is no regular file")
        if status.st_size < size:
            raise Damaged(f"ends before its {size} bytes")
        if status.st_size > size:
            raise Damaged(f"is longer than its {size} bytes")
        yield descriptor
    finally:
        os.close(descriptor)
