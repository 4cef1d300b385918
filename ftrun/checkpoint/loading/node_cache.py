"""What the ranks of a node download from a remote root, they download once: chunks in files that all of them read.

::

    <base>/lock                             held for an instant by who comes or goes
    <base>/e…-s…-…/users/3f…                one for each process that reads; locked while it lives
    <base>/e…-s…-…/r00003.0.safetensors     sparse: what has been downloaded lies where it lies in the file
                   r00003.0.safetensors.done        a byte for each chunk that is there, verified
                   r00003.0.safetensors.17.claim    locked by who downloads chunk 17 now

Locks are the kernel's, so a process that dies lets go of them, and another takes over what it was downloading. The
last one who leaves removes the directory; who comes removes what dead processes have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from crc32c import crc32c

from ftrun.checkpoint.loading.chunks import Damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftrun.checkpoint.loading.chunks import Chunk

_POLL = 0.005
_TRIES = 2  # of a download that fails its checksum: it may have been damaged on the way


def roomy(places: Sequence[Path], need: int) -> Path:
    """The first of some places that has room for ``need`` bytes; the one with the most room where none has."""
    free = [_free(place) for place in places]
    enough = [place for place, room in zip(places, free, strict=True) if room >= need]
    return enough[0] if enough else places[free.index(max(free))]


def _free(place: Path) -> int:
    try:
        return shutil.disk_usage(next(each for each in (place, *place.parents) if each.is_dir())).free
    except OSError:
        return 0


class NodeCache:
    """One process's access to what its node has downloaded of one checkpoint. Several threads use it.

    Args:
        base: says in which directory such caches are; asked once, before the first download. The directory is made, and
            removed again.
        name: of the checkpoint.
        read_into: downloads: file, first byte, memory to fill.
        timeout: seconds to wait for another process that downloads a chunk, before this one does it itself.
    """

    def __init__(
        self,
        base: Callable[[], Path],
        name: str,
        read_into: Callable[[str, int, memoryview], None],
        timeout: float = 300.0,
    ) -> None:
        self._where, self._name = base, name
        self._base = self._directory = Path()
        self._read_into = read_into
        self._timeout = timeout
        self._entering = threading.Lock()
        self._membership: int | None = None
        self._usable = True

    def open(self, chunk: Chunk) -> int:
        """A file, open for reading, that holds the chunk where the checkpoint's file has it. The caller closes it.

        Raises:
            Damaged: what is downloaded is not what it must be.
            OSError: it can't be downloaded.
        """
        with contextlib.ExitStack() as stack:
            entry = self._entry(chunk, stack)
            kept = entry.open() if entry is not None and entry.done else None
            if kept is not None:
                return kept
            data = self._download(chunk)
            kept = entry.open() if entry is not None and entry.put(data) else None
            return kept if kept is not None else _in_memory(chunk, data)

    def _entry(self, chunk: Chunk, stack: contextlib.ExitStack) -> _Entry | None:
        """The chunk's place in the cache, which is done, or claimed; None where this process must do without."""
        try:
            if not self._enter():
                return None
            entry = _Entry(self._directory, chunk)
            return entry if entry.done or entry.claim(stack, time.monotonic() + self._timeout) else None
        except OSError:  # no room, no locks, or somebody cleans up: a download of one's own always works
            return None

    def _download(self, chunk: Chunk) -> memoryview:
        view = memoryview(bytearray(chunk.stop - chunk.start))
        for _ in range(_TRIES):
            try:
                self._read_into(chunk.file, chunk.start, view)
            except EOFError as error:
                raise Damaged(f"ends before its {chunk.size} bytes") from error
            if crc32c(view) == chunk.crc:
                return view
        raise Damaged(f"chunk {chunk.number} (bytes {chunk.start} to {chunk.stop - 1}) fails its checksum")

    def _enter(self) -> bool:
        with self._entering:
            if self._membership is None and self._usable:
                try:
                    self._membership = self._register()
                except OSError:
                    self._usable = False
            return self._usable

    def _register(self) -> int:
        self._base = self._where()
        self._directory = self._base / self._name
        with _guard(self._base):
            for other in self._base.iterdir():
                if other.is_dir() and not _is_used(other):
                    shutil.rmtree(other, ignore_errors=True)
            users = self._directory / "users"
            users.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(users / uuid.uuid4().hex, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return descriptor

    def close(self) -> None:
        """Leave. The last one removes what was downloaded."""
        with self._entering:
            membership, self._membership, self._usable = self._membership, None, False
        if membership is None:
            return
        with contextlib.suppress(OSError), _guard(self._base):
            os.close(membership)
            if not _is_used(self._directory):
                shutil.rmtree(self._directory, ignore_errors=True)
            if not any(each.is_dir() for each in self._base.iterdir()):
                (self._base / "lock").unlink(missing_ok=True)
                self._base.rmdir()


class _Entry:
    """A chunk's place in the cache."""

    def __init__(self, directory: Path, chunk: Chunk) -> None:
        self._chunk = chunk
        self._data = directory / chunk.file
        self._marks = directory / f"{chunk.file}.done"
        self._claim = directory / f"{chunk.file}.{chunk.number}.claim"

    @property
    def done(self) -> bool:
        """Whether it is there."""
        try:
            descriptor = os.open(self._marks, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.pread(descriptor, 1, self._chunk.number) == b"\1"
        finally:
            os.close(descriptor)

    def claim(self, stack: contextlib.ExitStack, deadline: float) -> bool:
        """Claim it until the stack is left, or wait until it is done; False at the deadline."""
        self._claim.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        while not _locked(descriptor):
            if self.done:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True

    def put(self, data: memoryview) -> bool:
        """Store it, and say so; False where there is no room."""
        try:
            _write(self._data, self._chunk.start, data)
            _write(self._marks, self._chunk.number, memoryview(b"\1"))
        except OSError:
            return False
        return True

    def open(self) -> int | None:
        """The file, open for reading; None where somebody has removed it: that says nothing about the checkpoint."""
        try:
            return os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None


def _write(path: Path, offset: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while data:
            count = os.pwrite(descriptor, data, offset)
            offset, data = offset + count, data[count:]
    finally:
        os.close(descriptor)


def _in_memory(chunk: Chunk, data: memoryview) -> int:
    descriptor = os.memfd_create("ftrun-chunk", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, data, chunk.start)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_used(directory: Path) -> bool:
    """Whether a living process reads there."""
    try:
        users = list((directory / "users").iterdir())
    except FileNotFoundError:
        return False
    for user in users:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(user, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _locked(descriptor):
                    return True
            finally:
                os.close(descriptor)
    return False


def _locked(descriptor: int) -> bool:
    """Whether a lock could be had at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _guard(base: Path) -> Iterator[None]:
    """Hold the lock of those who come and go. It may vanish together with the directory: then it is made anew."""
    while True:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = base / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_still(path, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
