"""What a checkpoint root asks of storage: a few verbs. Keys are relative paths with ``/``; no verb renames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    Source = Callable[[], Iterator[memoryview]]
    """Gives a file's bytes in order, from the start each time it is called. They stay as they are until it ends."""


class UnreachableError(CheckpointError):
    """A remote storage didn't answer properly in the time that it is given. What it holds is not known."""


class IrregularError(CheckpointError):
    """Where a file of a checkpoint should be stands something else: a directory, a pipe, a link that leads nowhere."""


class Bytes(Protocol):
    """A file that is open for reading ranges of it. Several threads may read at once."""

    @property
    def granule(self) -> int:
        """How many bytes to ask for at a time."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            EOFError: the file ends before.
            OSError: reading failed.
        """


class Storage(Protocol):
    """Where bytes are durable. Any thread of any process may call any verb at any time.

    Verbs raise OSError: FileNotFoundError and its like where they fit, PermissionError where access is denied,
    IrregularError where something else than a file is to be read, UnreachableError where the storage didn't answer
    properly in the time that it is given.
    """

    @property
    def url(self) -> str:
        """The place, for messages and for other processes; without secrets."""

    @property
    def remote(self) -> bool:
        """Whether each verb is a request over a network, so that few of them is better than fresh ones."""

    def local(self, key: str) -> Path | None:
        """The plain path of a key, where there is one."""

    def names(self, directory: str) -> list[str]:
        """Names directly within a directory, as they are now; none where it is missing."""

    def tree(self, directory: str) -> dict[str, int]:
        """Sizes of all regular files below a directory, by their path within it, as they are now."""

    def size(self, key: str) -> int | None:
        """Size of a regular file, as it is now; None where there is none."""

    def read(self, key: str) -> bytes:
        """All bytes of a small file."""

    def opened(self, key: str) -> AbstractContextManager[Bytes]:
        """Open a file for reading ranges of it."""

    def create(self, key: str, data: bytes) -> None:
        """Create a small file, whole and durable, that must not exist yet.

        Raises:
            FileExistsError: somebody else was first.
        """

    def write(self, key: str, data: bytes) -> None:
        """Write or replace a small file, whole or not at all."""

    def put(self, key: str, source: Source, size: int) -> None:
        """Create a large file that must not exist yet, whole and durable on return.

        Args:
            key: where.
            source: its bytes; called again for each try.
            size: how many bytes they are.

        Raises:
            FileExistsError: the file is there already.
            ValueError: the source gave another number of bytes.
        """

    def delete(self, keys: Collection[str]) -> None:
        """Delete files; those that aren't there are no error."""

    def make_directory(self, directory: str) -> None:
        """Make a directory where the storage has such things, with its parents, durably."""

    def sync_directory(self, directory: str) -> None:
        """Make the names within a directory durable where they aren't yet."""

    def remove_directories(self, directories: Iterable[str]) -> None:
        """Remove directories that are empty, in order, where the storage has such things. The others stay."""

    def abort_uploads(self, directory: str) -> None:
        """Drop what unfinished uploads below a directory hold, where the storage can say cheaply which they are."""


def why(error: BaseException) -> str:
    """What an error says, in short, for a message."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
