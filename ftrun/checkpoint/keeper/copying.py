"""Copies files into a storage root: read once, compared on the way with what they must be, and looked at from outside.

What was read wrong may have been written before that is known. Nobody vouches for it, and it is deleted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import CHUNK, Checksums
from ftrun.checkpoint.keeper.courtesy import Courtesy
from ftrun.checkpoint.keeper.mappings import Mappings
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ftrun.checkpoint.checksums import FileRecord
    from ftrun.checkpoint.keeper.faults import Faults
    from ftrun.checkpoint.keeper.rate import Limiter, Meter
    from ftrun.checkpoint.storage.base import Storage

NUM_THREADS = 4


class SourceError(ValueError):
    """The bytes to copy are gone or changed: no other try helps."""


class _Stopped(ValueError):
    """Another file has failed already."""


@dataclass(frozen=True)
class Source:
    """A file to copy.

    Attributes:
        path: where it lies.
        record: what its bytes must be; what may lie behind them doesn't count.
        slot: it is a slot's payload, whose file is the same at later saves.
    """

    path: str
    record: FileRecord
    slot: bool = False

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.record.size


@dataclass(frozen=True)
class Copier:
    """Copies several files at a time.

    Attributes:
        limiter: for all of them together.
        meter: counts their bytes.
        faults: scripted ones.
        stage: ``local`` or ``root``, for the names of the faults.
        mappings: of payloads, kept from save to save.
        courtesy: to training that computes meanwhile.
    """

    limiter: Limiter
    meter: Meter
    faults: Faults
    stage: str
    mappings: Mappings = field(default_factory=Mappings)
    courtesy: Courtesy = field(default_factory=Courtesy)

    def copy(
        self, storage: Storage, directory: str, sources: Mapping[str, Source], copied: dict[str, FileRecord]
    ) -> None:
        """Copy files.

        Args:
            storage: where to.
            directory: where in it.
            sources: the files, by their names there.
            copied: what each one is. Those that it has already are not copied again; it keeps what was copied when
                this fails.

        Raises:
            SourceError: one can't be read, or isn't what it must be.
            OSError: the storage failed.
        """
        todo = sources.keys() - copied.keys()
        # What a keeper before this one has left may be whole, but nobody has vouched for it.
        leftover = [file for file in storage.tree(directory) if file in todo or _is_part(file, todo)]
        storage.delete([f"{directory}/{file}" for file in sorted(leftover)])
        self._copy_all(storage, directory, {file: sources[file] for file in todo}, copied)
        sizes = storage.tree(directory)
        for file, source in sources.items():
            if sizes.get(file) != source.size:
                copied.clear()
                raise CheckpointError(
                    f"{storage.url}/{directory}/{file} has {sizes.get(file, 'no')} bytes instead of the {source.size} "
                    "written: check the storage"
                )

    def _copy_all(
        self, storage: Storage, directory: str, sources: Mapping[str, Source], copied: dict[str, FileRecord]
    ) -> None:
        stop = threading.Event()

        def one(file: str) -> None:
            if stop.is_set():
                raise _Stopped
            copied[file] = self._one(storage, f"{directory}/{file}", sources[file], stop)

        # The large ones first: the last thread to end should have little left.
        order = sorted(sources, key=lambda file: (-sources[file].size, file))
        with ThreadPoolExecutor(NUM_THREADS, "ftrun-copy") as pool:
            futures = [pool.submit(one, file) for file in order]
            wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.done() and future.exception() for future in futures):
                stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, _Stopped))

    def _one(self, storage: Storage, key: str, source: Source, stop: threading.Event) -> FileRecord:
        self.faults.hit(f"{self.stage}.file")
        passage = Passage(source, self, stop)
        storage.put(key, passage, source.size)
        record = passage.record()
        if record != source.record:
            raise SourceError(f"{source.path} has changed since it was written: {_difference(source.record, record)}")
        self.faults.hit(f"{self.stage}.filed")
        return record


def _difference(wanted: FileRecord, found: FileRecord) -> str:
    """Where bytes are not what they must be; there are as many of them."""
    number = next(at for at, (one, other) in enumerate(zip(wanted.chunks, found.chunks, strict=True)) if one != other)
    last = min((number + 1) * CHUNK, wanted.size) - 1
    where = f"chunk {number} (bytes {number * CHUNK} to {last})"
    return f"{where} fails its checksum; is this machine's memory or disk faulty?"


def _is_part(file: str, files: Collection[str]) -> bool:
    """Whether it is what a writer of one of these files has left half way."""
    return file.endswith(".tmp") and file.startswith(".") and file[1:].rsplit(".", 2)[0] in files


class Passage:
    """The bytes of a file, summed up as they pass; called again, it begins anew.

    Args:
        source: the file.
        copier: on whose behalf.
        stop: set when another file has failed.
    """

    def __init__(self, source: Source, copier: Copier, stop: threading.Event) -> None:
        self._source, self._copier, self._stop = source, copier, stop
        self._sums = Checksums()

    def __call__(self) -> Iterator[memoryview]:
        """The bytes, in pieces that fit into the processor's cache: there the sum and the write find them.

        Raises:
            SourceError: the file can't be read, or is too short.
        """
        self._sums = sums = Checksums()
        if self._source.size == 0:
            return
        copier, size = self._copier, self._source.size
        step, middle = copier.limiter.slice, size // 2
        with _mapped(self._source, copier.mappings) as view:
            for start in range(0, size, step):
                if self._stop.is_set():
                    raise _Stopped
                piece = view[start : start + step]
                if start <= middle < start + step:
                    copier.faults.hit(f"{copier.stage}.middle")
                copier.limiter.take(len(piece))
                copier.courtesy.pause()
                sums.update(piece)
                yield piece
                copier.meter.add(len(piece))

    def record(self) -> FileRecord:
        """What the bytes were that passed last."""
        return self._sums.record()


@contextlib.contextmanager
def _mapped(source: Source, mappings: Mappings) -> Iterator[memoryview]:
    try:
        descriptor = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{source.path} can't be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{source.path} can't be read: it is no regular file")
        if status.st_size < source.size:
            raise SourceError(f"{source.path} has {status.st_size} bytes instead of {source.size}")
        mapping = None if source.slot else mmap.mmap(descriptor, source.size, prot=mmap.PROT_READ)
        view = mappings.of(source.path, descriptor, source.size) if mapping is None else memoryview(mapping)
    except OSError as error:
        raise SourceError(f"{source.path} can't be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    try:
        yield view
    finally:
        view.release()
        if mapping is not None:
            # A piece that somebody still holds keeps the mapping; it goes with the last of them.
            with contextlib.suppress(BufferError):
                mapping.close()
