"""Names of what lies in a checkpoint root, and the one class through which it is read and written.

::

    epochs/00000007.json
    ckpt/e00000007-s0000001200-5f1c09ab/
        r00003.0.safetensors
        r00003.json
        done/n0001.json
        MANIFEST.json
    bad/e00000007-s0000001200-5f1c09ab.json
    pins/e00000007-s0000001200-5f1c09ab.json
    LATEST
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.names import (
    ATTEMPTS,
    BAD,
    EPOCHS,
    LATEST,
    MANIFEST,
    NOTE,
    PINS,
    AttemptName,
    attempt_key,
    bad_key,
    done_failed_json,
    done_json,
    epoch_key,
    epoch_number,
    is_done,
    is_given_up,
    is_rank_file,
    pin_key,
    rank_failure,
    rank_json,
    rank_shard,
)
from ftrun.checkpoint.storage.base import why
from ftrun.checkpoint.storage.drivers import local_path
from ftrun.checkpoint.storage.posix import PosixStorage
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from contextlib import AbstractContextManager

    from ftrun.checkpoint.storage.base import Bytes, Source, Storage
    from ftrun.checkpoint.storage.retry import Patience

__all__ = [
    "LATEST",
    "MANIFEST",
    "AttemptName",
    "Root",
    "attempt_key",
    "bad_key",
    "done_failed_json",
    "done_json",
    "epoch_key",
    "is_done",
    "is_given_up",
    "is_rank_file",
    "pin_key",
    "rank_failure",
    "rank_json",
    "rank_shard",
]


@dataclass(frozen=True)
class Root:
    """A checkpoint root: all storage access goes through here. Keys are relative paths with ``/``.

    Methods raise OSError: the filesystem's own, or CheckpointError where a remote storage could not be had. Any
    thread of any process may call them.

    Attributes:
        place: where it is; a path is short for the storage in that directory.
    """

    place: Storage | Path

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> Root:
        """Name a root. Nothing is asked of it or created.

        Args:
            where: a path, or a URL that fsspec reads.
            options: what the driver is given besides the URL.
            patience: how long each operation on a URL is tried; about two minutes if left out.

        Raises:
            UsageError: an empty path, or a URL that no driver reads or whose driver isn't installed.
        """
        path = local_path(os.fspath(where))
        if path is not None:
            return cls(path)
        from ftrun.checkpoint.storage.remote import RemoteStorage
        from ftrun.checkpoint.storage.retry import Patience

        return cls(RemoteStorage(os.fspath(where), options or {}, patience or Patience()))

    @property
    def storage(self) -> Storage:
        """What keeps the bytes."""
        return PosixStorage(self.place) if isinstance(self.place, Path) else self.place

    @property
    def url(self) -> str:
        """Path or URL, for messages and for other processes."""
        return self.storage.url

    @property
    def remote(self) -> bool:
        """Whether each operation is a request over a network."""
        return self.storage.remote

    @property
    def path(self) -> Path:
        """The directory.

        Raises:
            UsageError: it is a URL.
        """
        path = self.storage.local("")
        if path is None:
            raise UsageError(f"checkpoint root {self.url} is no directory of this machine; this needs a path")
        return path

    def epochs(self) -> list[int]:
        """Numbers of all epochs that were ever claimed, ascending, readable or not."""
        return sorted(number for number in map(epoch_number, self._names(EPOCHS)) if number is not None)

    def attempts(self) -> list[AttemptName]:
        """Every attempt's name, newest first by (epoch, step). What can't be parsed is left out."""
        return _parsed(self._names(ATTEMPTS))

    def bad(self) -> list[AttemptName]:
        """Names of the attempts that are marked as bad, newest first."""
        return _parsed(name.removesuffix(NOTE) for name in self._names(BAD) if name.endswith(NOTE))

    def pins(self) -> list[AttemptName]:
        """Names of the checkpoints to keep whatever comes, newest first."""
        return _parsed(name.removesuffix(NOTE) for name in self._names(PINS) if name.endswith(NOTE))

    def pin(self, name: AttemptName, reason: str = "") -> None:
        """Keep a checkpoint whatever comes. Again is no error."""
        self.write(pin_key(name), json.dumps({"attempt": str(name), "reason": reason}).encode() + b"\n")

    def unpin(self, name: AttemptName) -> None:
        """Take a pin back. Again is no error."""
        self.delete(pin_key(name))

    def files(self, name: AttemptName) -> dict[str, int]:
        """Regular files of an attempt with their sizes, by their names within it; temporary ones included."""
        return self.storage.tree(f"{ATTEMPTS}/{name}")

    def sizes(self, name: AttemptName, files: Collection[str]) -> dict[str, int | None]:
        """Sizes of some files of an attempt, as they are now: one request of a remote storage."""
        if self.remote:
            listed = self.files(name)
            return {file: listed.get(file) for file in files}
        return {file: self.size(attempt_key(name, file)) for file in files}

    def read(self, key: str) -> bytes:
        """All bytes of a small file."""
        return self.storage.read(key)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of a file from ``offset`` on.

        Raises:
            EOFError: the file ends before.
        """
        with self.opened(key) as file:
            file.read_into(offset, view)

    def opened(self, key: str) -> AbstractContextManager[Bytes]:
        """Open a file for reading many ranges of it, by several threads if need be."""
        return self.storage.opened(key)

    def open_local(self, key: str) -> Path | None:
        """The plain path of a key, where there is one."""
        return self.storage.local(key)

    def size(self, key: str) -> int | None:
        """Size of a regular file in bytes, None where there is none."""
        return self.storage.size(key)

    def create(self, key: str, data: bytes) -> None:
        """Create a small file, whole and durable, that must not exist yet.

        Raises:
            FileExistsError: somebody else was first.
        """
        self.storage.create(key, data)

    def write(self, key: str, data: bytes) -> None:
        """Write or replace a small file, whole or not at all."""
        self.storage.write(key, data)

    def put(self, key: str, source: Source, size: int) -> None:
        """Create a large file, whole and durable on return. A URL is tried again from the start when it fails.

        Args:
            key: where; its directory is made.
            source: gives its bytes in order; called again for each try. It may be left behind half way.
            size: how many bytes they are.

        Raises:
            FileExistsError: the file is there already, and whole: files are never written twice.
            ValueError: the source gave another number of bytes.
        """
        self.storage.put(key, source, size)

    def make_attempt(self, name: AttemptName) -> None:
        """Make an attempt's directory. All its ranks call this, in any order."""
        self.storage.make_directory(f"{ATTEMPTS}/{name}")

    def sync_attempts(self) -> None:
        """Make the names of all attempts durable."""
        self.storage.sync_directory(ATTEMPTS)

    def sync_attempt(self, name: AttemptName) -> None:
        """Make the names of an attempt's files durable."""
        self.storage.sync_directory(f"{ATTEMPTS}/{name}")

    def delete(self, key: str) -> None:
        """Delete a file if it is there."""
        self.storage.delete([key])

    def delete_files(self, name: AttemptName, files: Collection[str]) -> None:
        """Delete files of an attempt; few requests of a remote storage."""
        self.storage.delete([attempt_key(name, file) for file in files])

    def remove_attempt(self, name: AttemptName) -> bool:
        """Remove an attempt's directory if nothing is left in it; whether it is gone."""
        top = f"{ATTEMPTS}/{name}"
        self.storage.remove_directories([f"{top}/done", top])
        return str(name) not in self.storage.names(ATTEMPTS)

    def abort_uploads(self, name: AttemptName) -> None:
        """Drop what unfinished uploads of an attempt hold, where the storage can say cheaply which they are."""
        self.storage.abort_uploads(f"{ATTEMPTS}/{name}")

    def _names(self, directory: str) -> list[str]:
        try:
            return self.storage.names(directory)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"can't list {self.url}/{directory}: {why(error)}; check checkpoint.root and permissions"
            ) from error


def _parsed(names: Iterable[str]) -> list[AttemptName]:
    parsed = map(AttemptName.parse, names)
    return sorted((name for name in parsed if name is not None), reverse=True)
