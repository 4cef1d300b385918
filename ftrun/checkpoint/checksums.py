"""CRC32C of files: as a whole and for each 16 MiB, computed while writing and verified while reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from ftrun.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from typing import BinaryIO

CHUNK = 16 * 2**20
"""Bytes under one chunk checksum. Part of the format."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be.

    Attributes:
        size: in bytes.
        crc32c: of the whole file.
        chunks: CRC32C of each 16 MiB, the last one of what remains.
    """

    size: int
    crc32c: int
    chunks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON, checksums as eight hexadecimal digits."""
        return {
            "size": self.size,
            "crc32c": to_hex(self.crc32c),
            "chunks": [to_hex(crc) for crc in self.chunks],
        }

    @classmethod
    def from_json(cls, document: object) -> FileRecord:
        """Read it back.

        Raises:
            ValueError: it isn't a file record; the text says why.
        """
        if not isinstance(document, dict) or set(document) != {"size", "crc32c", "chunks"}:
            raise ValueError("a file record needs size, crc32c and chunks")
        size, chunks = document["size"], document["chunks"]
        if type(size) is not int or size < 0:
            raise ValueError(f"a file's size is {size!r}")
        if not isinstance(chunks, list) or len(chunks) != -(-size // CHUNK):
            raise ValueError(f"a file of {size} bytes has the wrong number of chunk checksums")
        return cls(size, from_hex(document["crc32c"]), tuple(map(from_hex, chunks)))


class Checksums:
    """Sums up a stream of bytes. One thread uses it."""

    def __init__(self) -> None:
        self._size = 0
        self._whole = 0
        self._chunks: list[int] = []

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes (one-dimensional, contiguous)."""
        view = memoryview(data)
        while len(view):
            filled = self._size % CHUNK
            if filled == 0:
                self._chunks.append(0)
            piece = view[: CHUNK - filled]
            self._chunks[-1] = crc32c(piece, self._chunks[-1])
            self._whole = crc32c(piece, self._whole)
            self._size += len(piece)
            view = view[len(piece) :]

    def record(self) -> FileRecord:
        """The record of everything added so far."""
        return FileRecord(self._size, self._whole, tuple(self._chunks))


def record_of(data: bytes) -> FileRecord:
    """The record of a small file's bytes."""
    sums = Checksums()
    sums.update(data)
    return sums.record()


def read_verified(file: BinaryIO, record: FileRecord, *, attempt: str, name: str) -> bytearray:
    """Read a whole file, each chunk verified as it arrives.

    Raises:
        CorruptCheckpoint: the bytes are not those that were written.
        OSError: reading failed.
    """
    buffer = bytearray(record.size)
    view = memoryview(buffer)
    for number, expected in enumerate(record.chunks):
        piece = view[number * CHUNK : (number + 1) * CHUNK]
        if _fill(file, piece) < len(piece):
            raise _corrupt(attempt, name, f"ends before its {record.size} bytes")
        if crc32c(piece) != expected:
            first = number * CHUNK
            raise _corrupt(
                attempt,
                name,
                f"chunk {number} (bytes {first} to {first + len(piece) - 1}) fails its checksum",
            )
    if file.read(1):
        raise _corrupt(attempt, name, f"is longer than its {record.size} bytes")
    if crc32c(view) != record.crc32c:
        raise _corrupt(attempt, name, "fails the checksum of the whole file")
    return buffer


def _fill(file: BinaryIO, view: memoryview) -> int:
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            break
        filled += count
    return filled


def _corrupt(attempt: str, name: str, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{name} {what}", attempt)


def to_hex(crc: int) -> str:
    """A CRC32C as eight hexadecimal digits."""
    return f"{crc:08x}"


def from_hex(text: object) -> int:
    """Read it back.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(text, str) or len(text) != 8 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{text!r} is no checksum")
    return int(text, 16)
