"""CRC32C of files: for each 16 MiB, and as a whole, computed while writing and verified while reading.

Every byte is summed up once: the checksum of the whole follows from those of the chunks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from ftrun.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.checkpoint.storage.base import Bytes

CHUNK = 16 * 2**20
"""Bytes under one chunk checksum. Part of the format."""

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its lowest power in the highest bit
_HEX = re.compile(r"[0-9a-f]{8}(?:,[0-9a-f]{8})*")


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
        whole_crc, *chunk_crcs = _all_from_hex([document["crc32c"], *chunks])
        return cls(size, whole_crc, tuple(chunk_crcs))


class Checksums:
    """Sums up a stream of bytes. One thread uses it."""

    def __init__(self) -> None:
        self._size = 0
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
            self._size += len(piece)
            view = view[len(piece) :]

    def record(self) -> FileRecord:
        """The record of everything added so far."""
        return FileRecord(self._size, whole(self._chunks, self._size), tuple(self._chunks))


def whole(chunks: Iterable[int], size: int) -> int:
    """The CRC32C of a file of ``size`` bytes, from those of its chunks."""
    crc = 0
    for chunk in chunks:
        length = min(CHUNK, size)
        crc, size = combine(crc, chunk, length), size - length
    return crc


def combine(first: int, second: int, length: int) -> int:
    """The CRC32C of two runs of bytes, one after the other, from that of each and the length of the second.

    A checksum is a remainder: bytes that follow multiply the first one by a power of x, modulo the polynomial.
    """
    return _product(_shift(length), first) ^ second


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """The power of x by which ``length`` further bytes multiply a remainder."""
    power, square = 1 << 31, 1 << 23  # x to the 0, and to the 8: one byte
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the checksum's own."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


def record_of(data: bytes) -> FileRecord:
    """The record of a small file's bytes."""
    sums = Checksums()
    sums.update(data)
    return sums.record()


def read_verified_into(
    source: Bytes, record: FileRecord, first: int, view: memoryview, *, attempt: str, name: str
) -> None:
    """Read whole chunks of a file, each one verified as it arrives. Several threads may read one file at once.

    Args:
        source: the open file.
        record: what the file must be.
        first: number of the first chunk.
        view: where the bytes go; it ends where a chunk or the file does.
        attempt: name of the checkpoint, for the message.
        name: name of the file, for the message.

    Raises:
        CorruptCheckpoint: the bytes are not those that were written. Some of them may be in ``view``.
        OSError: reading failed.
        ValueError: the view has another length than whole chunks.
    """
    end = first * CHUNK + len(view)
    if end > record.size or (end % CHUNK and end != record.size):
        raise ValueError(f"bytes {first * CHUNK} to {end} of {name} are no whole chunks")
    for number in range(first, first + -(-len(view) // CHUNK)):
        start = (number - first) * CHUNK
        piece = view[start : start + CHUNK]
        try:
            crc = _read_summed(source, number * CHUNK, piece)
        except EOFError as error:
            raise _corrupt(attempt, name, f"ends before its {record.size} bytes") from error
        if crc != record.chunks[number]:
            span = f"bytes {number * CHUNK} to {number * CHUNK + len(piece) - 1}"
            raise _corrupt(attempt, name, f"chunk {number} ({span}) fails its checksum")


def _read_summed(source: Bytes, offset: int, view: memoryview) -> int:
    crc = 0
    for start in range(0, len(view), source.granule):
        piece = view[start : start + source.granule]
        source.read_into(offset + start, piece)
        crc = crc32c(piece, crc)
    return crc


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
    if not isinstance(text, str) or len(text) != 8 or _HEX.fullmatch(text) is None:
        raise ValueError(f"{text!r:.80} is no checksum")
    return int(text, 16)


def _all_from_hex(texts: list[Any]) -> list[int]:
    """As :func:`from_hex`, with one look at all of them: a large manifest has hundreds of thousands."""
    try:
        joined = ",".join(texts)
    except TypeError:
        joined = ""
    if len(joined) != 9 * len(texts) - 1 or _HEX.fullmatch(joined) is None:
        return [from_hex(text) for text in texts]
    return [int(text, 16) for text in texts]
