"""What a slow reader hasn't taken yet."""

from __future__ import annotations

import collections
import contextlib
import tempfile
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_IN_MEMORY = 4 * 1024 * 1024
_PIECE = 16 * 1024


class Backlog:
    """Bytes in the order in which they came: some in memory, the rest in a temporary file. Not thread-safe.

    Args:
        directory: where the temporary file would be.
        in_memory: bytes that are kept in memory before there is one.
    """

    def __init__(self, directory: Path, in_memory: int = _IN_MEMORY) -> None:
        self._directory = directory
        self._limit = in_memory
        self._pieces: collections.deque[bytes] = collections.deque()
        self._in_memory = 0
        self._file: IO[bytes] | None = None
        self._read = 0
        self._written = 0
        self._dropped = 0

    def __len__(self) -> int:
        return self._in_memory + self._written - self._read + self._dropped

    def put(self, data: bytes) -> None:
        """Append; where neither memory nor disk has room the bytes are dropped, and that is said in their place."""
        if self._written == self._read and self._in_memory < self._limit:
            self._remember(data)
        elif not self._spill(data):
            self._dropped += len(data)

    def _remember(self, data: bytes) -> None:
        data = self._gap() + data
        self._pieces.append(data)
        self._in_memory += len(data)

    def _gap(self) -> bytes:
        dropped, self._dropped = self._dropped, 0
        return f"\n[ftrun: {dropped:,} bytes are not shown here]\n".encode() if dropped else b""

    def _spill(self, data: bytes) -> bool:
        if self._dropped:
            return False  # a gap has begun: it ends when memory has room again
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - lives as long as this
            self._file.seek(self._written)
            self._file.write(data)
            self._file.flush()
        except OSError:
            return False
        self._written += len(data)
        return True

    def take(self) -> bytes:
        """The next bytes; empty when there are none."""
        if self._pieces:
            data = self._pieces.popleft()
            if len(data) > _PIECE:
                self._pieces.appendleft(data[_PIECE:])
                data = data[:_PIECE]
            self._in_memory -= len(data)
            return data
        return self._unspill() or self._gap()

    def _unspill(self) -> bytes:
        if self._file is None or self._read == self._written:
            return b""
        try:
            self._file.seek(self._read)
            data = self._file.read(min(_PIECE, self._written - self._read))
        except OSError:
            data = b""
        if not data:
            self._dropped += self._written - self._read
            self._read = self._written
        self._read += len(data)
        if self._read == self._written:
            self._read = self._written = 0
            with contextlib.suppress(OSError):
                self._file.truncate(0)
        return data

    def close(self) -> None:
        """Forget everything."""
        self._pieces.clear()
        self._in_memory = self._read = self._written = self._dropped = 0
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
