"""A state as real files, for a reader to read."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from power_loss import scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from power_loss.states import State


class Folder:
    """A directory that takes one state after the other. Only what differs is written.

    Args:
        path: an empty directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, bytes | None] = {}

    def put(self, state: State) -> Path:
        """Lay a state out; its directory."""
        wanted = state.files
        for path in sorted(self._files, reverse=True):  # what is in a directory goes before it
            if path not in wanted or (wanted[path] is None) != (self._files[path] is None):
                self._remove(path)
        for path in sorted(wanted):
            if path not in self._files:
                self._add(path, wanted[path])
            elif wanted[path] != self._files[path]:
                (self._path / path).write_bytes(wanted[path] or b"")
        self._files = dict(wanted)
        return self._path

    def forget(self) -> None:
        """After somebody changed the files: start from nothing."""
        for entry in self._path.iterdir():
            shutil.rmtree(entry)
        self._files = {}

    def _remove(self, path: str) -> None:
        target = self._path / path
        if self._files.pop(path) is None:
            target.rmdir()
        else:
            target.unlink()

    def _add(self, path: str, content: bytes | None) -> None:
        if content is None:
            (self._path / path).mkdir()
        else:
            (self._path / path).write_bytes(content)


@contextlib.contextmanager
def folder() -> Iterator[Folder]:
    """A folder in memory, gone afterwards."""
    with scratch.directory() as path:
        yield Folder(path)
