"""A checkpoint's files: what each must be, and its bytes from the nearest tier that holds them whole."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import CHUNK
from ftrun.checkpoint.layout import MANIFEST, attempt_key
from ftrun.checkpoint.loading.chunks import SCRATCH, Chunk, Damaged, Into, read_chunk
from ftrun.checkpoint.loading.threads import in_threads, num_threads
from ftrun.checkpoint.loading.tiers import Replaced
from ftrun.checkpoint.manifest import BadManifestError, Manifest
from ftrun.errors import CheckpointError, CorruptCheckpoint, LostSnapshot, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftrun.checkpoint.checksums import FileRecord
    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.checkpoint.loading.chunks import Use
    from ftrun.checkpoint.loading.tiers import Copies, SealedCopies, TierName

_log = logging.getLogger(__name__)

_OLDEST_FORMAT = 2


class Files:
    """The files of one checkpoint. Any thread may call its methods.

    Args:
        root: the checkpoint root.
        name: of the checkpoint.
        nearer: tiers to try before the root, nearest first.
        last: the root's own copies.
        sealed: the snapshot in memory that is to be read, before anybody has committed it; else the manifest is read.

    Attributes:
        notes: what was found damaged on the way and read elsewhere instead.

    Raises:
        CorruptCheckpoint: the manifest is damaged or missing.
        CheckpointError: it can't be read; or the snapshot isn't whole, nor committed.
        UsageError: another version of ftrun wrote it.
    """

    def __init__(
        self,
        root: Root,
        name: AttemptName,
        nearer: Sequence[Copies],
        last: Copies,
        sealed: SealedCopies | None = None,
    ) -> None:
        self.name = name
        self.notes: list[str] = []
        self._root, self._nearer, self._last = root, nearer, last
        self._threads = num_threads(1)
        self._sealed = sealed
        self._lock = threading.Lock()
        self._scratch = _Scratch()
        self._read_bytes: dict[TierName, int] = {}
        self._manifest = None if sealed is not None else self._read_manifest()
        if sealed is not None and not _is_whole(sealed):
            self._require_commit("not all of its ranks have sealed it")

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None for a snapshot in memory that isn't known to be committed."""
        return self._manifest

    @property
    def read_bytes(self) -> dict[TierName, int]:
        """How many bytes were read so far, and found right, by the tier that they came from."""
        with self._lock:
            return dict(self._read_bytes)

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        if self._manifest is not None:
            return self._manifest.world_size
        assert self._sealed is not None
        return next(iter(self._sealed.seals.values())).world_size

    @property
    def reason(self) -> str:
        """Why it was taken."""
        if self._manifest is not None:
            return self._manifest.reason
        assert self._sealed is not None
        return next(iter(self._sealed.seals.values())).reason

    def share_processors(self, ranks: int) -> None:
        """Read with no more threads than are this process's share, where so many of this machine's read at once."""
        # A network is waited for; a disk's bytes are copied, for which more threads than cores only get in the way.
        self._threads = num_threads(1 if self._root.storage.remote else ranks)

    def record(self, file: str) -> FileRecord:
        """What a file must be, by the manifest, or else by the seal of its rank.

        Raises:
            CorruptCheckpoint: the checkpoint has no such file.
        """
        if self._manifest is not None:
            record = self._manifest.files.get(file)
            if record is None:
                raise self.corrupt(MANIFEST, f"does not list {file}")
            return record
        assert self._sealed is not None
        record = self._sealed.record(file)
        if record is None:
            raise self.corrupt(file, "is named by no seal")
        return record

    def size(self, file: str) -> int:
        """What a file's size must be.

        Raises:
            CorruptCheckpoint: the checkpoint has no such file.
        """
        return self.record(file).size

    def content(self, file: str) -> bytes:
        """All of a small file.

        Raises:
            CorruptCheckpoint: the root's own bytes are not those that were committed.
            CheckpointError: they can't be read.
        """
        content = bytearray(self.size(file))
        if content:
            self.read({file: [Into(0, memoryview(content))]})
        return bytes(content)

    def read(self, uses: Mapping[str, Sequence[Use]], first: float = 0.0) -> None:
        """Read what the uses of each file want, each byte once, by several threads.

        Args:
            uses: by file.
            first: where among all the chunks to begin, from 0 to 1: ranks of a node that begin at places of their own
                download different chunks first, and find the others there later.

        Raises:
            CorruptCheckpoint: the root's own bytes are not those that were committed.
            CheckpointError: they can't be read.
        """
        work = [(file, number, each) for file in sorted(uses) for number, each in _by_chunk(uses[file])]
        middle = int(first * len(work))
        in_threads([partial(self._read, *each) for each in work[middle:] + work[:middle]], self._threads)

    def _require_commit(self, problem: str, *, damaged: bool = False) -> None:
        """Go on with what the root holds, for a snapshot in memory that turned out to be unusable.

        Args:
            problem: what is wrong with it.
            damaged: its bytes are not those that were sealed, and never will be; no keeper can commit it.

        Raises:
            CorruptCheckpoint: it was never committed, and is damaged: an older one must do.
            LostSnapshot: it was never committed, as far as can be told: an older one must do now.
        """
        with self._lock:
            if self._manifest is not None:
                return
            try:
                self._manifest = self._read_manifest()
            except CheckpointError as error:
                if damaged and isinstance(error, CorruptCheckpoint):
                    what = f"{problem} in this node's memory, and it isn't committed: {error.detail}"
                    raise CorruptCheckpoint(what, str(self.name)) from error
                raise LostSnapshot(
                    f"snapshot {self.name} in this node's memory can't be used: {problem}; it isn't committed either "
                    f"({getattr(error, 'detail', error)}), so only an older checkpoint is left to resume from"
                ) from error
            self._note(f"snapshot {self.name} in memory can't be used: {problem}; its commit is read instead")

    def corrupt(self, file: str, what: str) -> CorruptCheckpoint:
        """The error for a file that is not what was committed."""
        return CorruptCheckpoint(f"{file} {what}", str(self.name))

    def _read(self, file: str, number: int, uses: Sequence[Use]) -> None:
        """Read a chunk from the nearest tier that has it whole."""
        problems: list[tuple[str, str]] = []  # tiers, and what is wrong with their copies
        lost = False  # the snapshot made way for another one
        for copies in self._copies():
            if self._manifest is None and copies is self._last:
                what = problems[0][1] if problems else "is missing"
                self._require_commit(f"{file} {what}", damaged=not lost)
                problems.clear()
            chunk = self._chunk(file, number)
            try:
                with copies.opened(chunk) as descriptor:
                    read_chunk(descriptor, chunk, uses, self._scratch.view)
            except FileNotFoundError:
                continue
            except Damaged as error:
                if copies is self._last:
                    raise self.corrupt(file, str(error)) from error
                problems.append((copies.where, str(error)))
                lost = lost or isinstance(error, Replaced)
            except OSError as error:
                if copies is self._last:
                    raise
                problems.append((copies.where, f"can't be read: {error.strerror or error}"))
            else:
                self._count(copies.tier, chunk)
                for where, what in problems:
                    self._note(f"checkpoint {self.name}: {file} in {where} {what}; another copy is read")
                return
        raise AssertionError("the root's copies answer, or raise")

    def _count(self, tier: TierName, chunk: Chunk) -> None:
        with self._lock:
            self._read_bytes[tier] = self._read_bytes.get(tier, 0) + chunk.stop - chunk.start

    def _copies(self) -> Iterator[Copies]:
        yield from self._nearer
        yield self._last

    def _chunk(self, file: str, number: int) -> Chunk:
        record = self.record(file)
        return Chunk(file, record.size, number, record.chunks[number])

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _log.warning("ftrun: %s", text)

    def _read_manifest(self) -> Manifest:
        key = attempt_key(self.name, MANIFEST)
        try:
            manifest = Manifest.from_bytes(self._root.read(key))
        except BadManifestError as error:
            raise self.corrupt(MANIFEST, str(error)) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            if self._sealed is None:
                self._require_root()
            raise self.corrupt(MANIFEST, "is missing") from error
        except CheckpointError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{self._root.url}/{key} can't be read: {reason}; check the storage") from error
        if (manifest.attempt, manifest.step) != (str(self.name), self.name.step):
            raise self.corrupt(MANIFEST, f"is that of {manifest.attempt}")
        if manifest.format < _OLDEST_FORMAT:
            raise UsageError(
                f"checkpoint {self.name} was written by an early ftrun ({manifest.ftrun}, format {manifest.format}), "
                "whose checkpoints this version can't read: resume it with that version, or start over with --fresh"
            )
        return manifest

    def _require_root(self) -> None:
        """A root that is away says nothing about the checkpoint: it must not count as damaged.

        Raises:
            CheckpointError: it doesn't show the checkpoint at all.
        """
        if self.name not in self._root.attempts():
            raise CheckpointError(
                f"{self._root.url} doesn't show {self.name} any more, from which this run is to resume: is it mounted, "
                "or was that deleted?"
            )


class _Scratch(threading.local):
    """Memory of each thread's own."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(SCRATCH))


def _is_whole(sealed: SealedCopies) -> bool:
    seals = sealed.seals
    return bool(seals) and all(sorted(seals) == list(range(seal.world_size)) for seal in seals.values())


def _by_chunk(uses: Sequence[Use]) -> Iterator[tuple[int, list[Use]]]:
    """Uses of a file by the chunks that they touch."""
    found: defaultdict[int, list[Use]] = defaultdict(list)
    for use in uses:
        for number in range(use.start // CHUNK, -(-use.stop // CHUNK)):
            found[number].append(use)
    yield from sorted(found.items())
