"""Names of what lies in a checkpoint root, and the one class through which it is read and written.

::

    epochs/00000007.json
    ckpt/e00000007-s0000001200-5f1c09ab/
        r00003.0.safetensors
        r00003.json
        done/n0001.json
        MANIFEST.json
    bad/e00000007-s0000001200-5f1c09ab.json
    LATEST
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import durable
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

MANIFEST = "MANIFEST.json"
LATEST = "LATEST"
_EPOCHS, _ATTEMPTS, _BAD = "epochs", "ckpt", "bad"

_ATTEMPT = re.compile(r"e(\d{8,})-s(\d{10,})-([0-9a-f]{8})", re.ASCII)
_EPOCH = re.compile(r"(\d{8,})\.json", re.ASCII)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


@dataclass(frozen=True, order=True)
class AttemptName:
    """Name of an attempt to save: ``e00000007-s0000001200-5f1c09ab``. Its order is that of (epoch, step).

    Attributes:
        epoch: fencing epoch of the writers.
        step: number of finished steps in the state.
        suffix: eight hexadecimal digits, the same on all ranks, that make the name unique.
    """

    epoch: int
    step: int
    suffix: str

    def __str__(self) -> str:
        return f"e{self.epoch:08d}-s{self.step:010d}-{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> AttemptName | None:
        """Read a name back; None for anything that this class would not have written."""
        match = _ATTEMPT.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match[1]), int(match[2]), match[3])
        return name if str(name) == text else None

    @classmethod
    def of(cls, name: str | AttemptName) -> AttemptName:
        """The name as a value.

        Raises:
            UsageError: the text is no name of a checkpoint.
        """
        parsed = cls.parse(name) if isinstance(name, str) else name
        if parsed is None:
            raise UsageError(f"{name!r} is no name of a checkpoint; `ftrun ckpt ls` lists them")
        return parsed


def rank_json(rank: int) -> str:
    """File, within an attempt, of one rank's non-tensor state."""
    return f"r{rank:05d}.json"


def rank_shard(rank: int, part: int = 0) -> str:
    """File, within an attempt, of one rank's tensors."""
    return f"r{rank:05d}.{part}.safetensors"


def rank_failure(rank: int) -> str:
    """File, within an attempt, by which a rank promises that the attempt will never be committed."""
    return f"r{rank:05d}.failed.json"


def done_json(node: int) -> str:
    """File, within an attempt, by which a node says that its files are written and verified."""
    return f"done/n{node:04d}.json"


def epoch_key(epoch: int) -> str:
    """Key of an epoch's record."""
    return f"{_EPOCHS}/{epoch:08d}.json"


def attempt_key(name: AttemptName, file: str) -> str:
    """Key of a file of an attempt."""
    return f"{_ATTEMPTS}/{name}/{file}"


def bad_key(name: AttemptName) -> str:
    """Key of the note that an attempt's bytes are known to be damaged."""
    return f"{_BAD}/{name}.json"


@dataclass(frozen=True)
class Root:
    """A checkpoint root: all storage access goes through here. Keys are relative paths with ``/``.

    Methods raise the filesystem's OSError unless they say otherwise. Any thread of any process may call them.
    """

    path: Path

    @classmethod
    def open(cls, where: str | os.PathLike[str]) -> Root:
        """Name a root. Nothing is read or created.

        Raises:
            UsageError: a URL, or an empty path.
        """
        text = os.fspath(where)
        if _URL.match(text):
            raise UsageError(
                f"checkpoint root {text!r}: only paths work in this version; set a path as checkpoint.root"
            )
        if not text:
            raise UsageError("the checkpoint root is empty; set checkpoint.root to a path")
        return cls(Path(text).absolute())

    def epochs(self) -> list[int]:
        """Numbers of all epochs that were ever claimed, ascending, readable or not."""
        return sorted(int(match[1]) for match in map(_EPOCH.fullmatch, self._names(_EPOCHS)) if match)

    def attempts(self) -> list[AttemptName]:
        """Every attempt's name, newest first by (epoch, step). What can't be parsed is left out."""
        parsed = map(AttemptName.parse, self._names(_ATTEMPTS))
        return sorted((name for name in parsed if name is not None), reverse=True)

    def files(self, name: AttemptName) -> dict[str, int]:
        """Regular files of an attempt with their sizes, by their names within it; temporary ones included."""
        top = self.path / _ATTEMPTS / str(name)
        found = {}
        for directory, prefix in ((top, ""), (top / "done", "done/")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[prefix + entry.name] = status.st_size
        return found

    def read(self, key: str) -> bytes:
        """All bytes of a small file."""
        return (self.path / key).read_bytes()

    def size(self, key: str) -> int | None:
        """Size of a regular file in bytes, None where there is none."""
        # Through a new handle: network filesystems answer stat from a cache, but ask the server on open.
        try:
            descriptor = os.open(self.path / key, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def create(self, key: str, data: bytes) -> None:
        """Create a small file, whole and durable, that must not exist yet.

        Raises:
            FileExistsError: somebody else was first.
        """
        path = self.path / key
        durable.make_dirs(path.parent)
        durable.create(path, data)
        # Not every filesystem keeps its word about exclusive creation; what lies there now says who won.
        if path.read_bytes() != data:
            raise FileExistsError(f"{path} was written by somebody else at the same time")

    def write(self, key: str, data: bytes) -> None:
        """Write or replace a small file, whole or not at all."""
        durable.make_dirs((self.path / key).parent)
        durable.write(self.path / key, data)

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """A stream into a large new file, which appears, whole and durable, when the block ends well.

        Raises:
            FileExistsError: the file is there already.
        """
        path = self.path / key
        if path.exists():
            raise FileExistsError(f"{path} exists; a checkpoint's files are never written twice")
        with durable.replacing(path) as file:
            yield file

    def reading(self, key: str) -> BinaryIO:
        """Open a file for reading; the caller closes it."""
        return (self.path / key).open("rb")

    def make_attempt(self, name: AttemptName) -> None:
        """Make an attempt's directory. All its ranks call this, in any order."""
        durable.make_dirs(self.path / _ATTEMPTS / str(name))

    def sync_attempts(self) -> None:
        """Make the names of all attempts durable."""
        durable.fsync_dir(self.path / _ATTEMPTS)

    def sync_attempt(self, name: AttemptName) -> None:
        """Make the names of an attempt's files durable."""
        durable.fsync_dir(self.path / _ATTEMPTS / str(name))

    def delete(self, key: str) -> None:
        """Delete a file if it is there."""
        (self.path / key).unlink(missing_ok=True)

    def remove_attempt(self, name: AttemptName) -> bool:
        """Remove an attempt's directory if nothing is left in it; whether it is gone."""
        top = self.path / _ATTEMPTS / str(name)
        for directory in (top / "done", top):
            with contextlib.suppress(OSError):
                directory.rmdir()
        return not top.exists()

    def _names(self, directory: str) -> list[str]:
        try:
            return os.listdir(self.path / directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"can't list {self.path / directory}: {error.strerror}; check checkpoint.root and permissions"
            ) from error
