"""Reads every byte of a checkpoint and compares it with what was committed. No torch, and little memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import CHUNK, read_verified_into, whole
from ftrun.checkpoint.layout import MANIFEST, attempt_key
from ftrun.checkpoint.manifest import BadManifestError, Manifest, NewerFormatError
from ftrun.checkpoint.storage.base import why
from ftrun.errors import CheckpointError, CorruptCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun.checkpoint.checksums import FileRecord
    from ftrun.checkpoint.layout import AttemptName, Root

_CHUNKS = 16  # under one task, so that threads share one large file
_THREADS = 4


@dataclass(frozen=True)
class Damage:
    """Something in a checkpoint that isn't as it was committed.

    Attributes:
        file: name within the checkpoint.
        chunk: number of the chunk; None where the whole file is meant.
        first: first byte of the chunk; None where the whole file is meant.
        last: last byte of the chunk; None where the whole file is meant.
        problem: what is wrong.
        certain: the bytes are damaged or missing; otherwise they could not be read this time.
    """

    file: str
    chunk: int | None
    first: int | None
    last: int | None
    problem: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


def verify(
    root: Root, name: AttemptName, manifest: Manifest, seen: Callable[[int], None] = lambda size: None
) -> list[Damage]:
    """Read all files that a manifest lists; what is damaged, in the order of files and chunks.

    Args:
        root: the checkpoint root.
        name: the checkpoint.
        manifest: its manifest.
        seen: called with the number of bytes that were read, by any thread, now and then.
    """
    sizes = _sizes(root, name, manifest)
    damages = [each for each in map(_suspect, sizes.items(), manifest.files.values()) if each is not None]
    sound = {file: record for file, record in manifest.files.items() if sizes[file] == record.size}
    buffers = threading.local()

    def check(task: tuple[str, int]) -> list[Damage]:
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(CHUNK))
        return list(_check(root, name, task, sound[task[0]], buffers.view, seen))

    with ThreadPoolExecutor(_THREADS, "ftrun-verify") as pool:
        tasks = ((file, first) for file, record in sound.items() for first in range(0, len(record.chunks), _CHUNKS))
        for found in pool.map(check, tasks):
            damages += found
    return sorted(damages, key=lambda each: (each.file, each.chunk or 0))


def of_manifest(root: Root, name: AttemptName, reason: str) -> Damage:
    """The damage of a checkpoint that is invalid although its files are whole, or without a manifest to tell.

    Args:
        root: the checkpoint root.
        name: the checkpoint.
        reason: why it is invalid, as the reader says it.
    """
    certain = True
    try:
        Manifest.from_bytes(root.read(attempt_key(name, MANIFEST)))
    except BadManifestError:
        pass
    except NewerFormatError:
        certain = False
    except OSError as error:
        certain = isinstance(error, FileNotFoundError)
    return Damage(MANIFEST, None, None, None, reason.removeprefix(f"{MANIFEST} "), certain)


def _sizes(root: Root, name: AttemptName, manifest: Manifest) -> dict[str, int | OSError | None]:
    if root.remote:
        listed = root.files(name)
        return {file: listed.get(file) for file in manifest.files}
    return {file: _size(root, attempt_key(name, file)) for file in manifest.files}


def _size(root: Root, key: str) -> int | OSError | None:
    try:
        return root.size(key)
    except OSError as error:
        return error


def _suspect(found: tuple[str, int | OSError | None], record: FileRecord) -> Damage | None:
    file, size = found
    if isinstance(size, OSError):
        return Damage(file, None, None, None, f"can't be read: {why(size)}", certain=False)
    if size is None:
        return Damage(file, None, None, None, "is missing")
    if size != record.size:
        return Damage(file, None, None, None, f"has {size} bytes instead of {record.size}")
    if whole(record.chunks, record.size) != record.crc32c:
        return Damage(MANIFEST, None, None, None, f"contradicts itself about the checksums of {file}")
    return None


def _check(
    root: Root,
    name: AttemptName,
    task: tuple[str, int],
    record: FileRecord,
    buffer: memoryview,
    seen: Callable[[int], None],
) -> Iterator[Damage]:
    file, start = task
    try:
        with root.opened(attempt_key(name, file)) as source:
            for number in range(start, min(start + _CHUNKS, len(record.chunks))):
                first = number * CHUNK
                view = buffer[: min(CHUNK, record.size - first)]
                try:
                    read_verified_into(source, record, number, view, attempt=str(name), name=file)
                except CorruptCheckpoint as error:
                    problem = error.detail.removeprefix(f"{file} ")
                    yield Damage(file, number, first, first + len(view) - 1, problem)
                seen(len(view))
    except OSError as error:
        yield Damage(file, None, None, None, f"can't be read: {why(error)}", isinstance(error, FileNotFoundError))


def marking(damages: list[Damage]) -> str:
    """The reason with which a checkpoint is marked as bad.

    Raises:
        CheckpointError: nothing is certainly damaged.
    """
    certain = [each for each in damages if each.certain]
    if not certain:
        raise CheckpointError("nothing is known to be damaged: the storage could not be read. Try again")
    more = f", and {len(certain) - 1} more" if len(certain) > 1 else ""
    return f"{certain[0]}{more}"
