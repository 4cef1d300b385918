"""``nodes.json`` in the run directory: one writer at a time, whole or as it was before, whoever dies.

All nodes of a run may share it. A file that can't be read is moved aside by the next writer, so that a run is never
kept from starting by what is only its memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import TYPE_CHECKING, Any

from ftrun import durable
from ftrun.errors import FtrunError, UsageError
from ftrun.health import history
from ftrun.health.history import SCHEMA_VERSION, Book

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOCK_SECONDS = 5.0

_LARGEST = 64 << 20
"""Bytes. What is larger is nothing that this program has written."""


class NodesFileError(UsageError):
    """``nodes.json`` is of a newer ftrun, or isn't what it should be."""


class Busy(FtrunError, TimeoutError):
    """Another process has been writing to ``nodes.json`` for too long."""


class NodesFile:
    """The file of one run. Any thread, any number of processes on any number of nodes.

    Args:
        path: of ``nodes.json``.
        warn: is told in words of a damaged file that was moved aside.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn

    def read(self) -> Book:
        """What it holds; nothing where there is no file.

        Raises:
            NodesFileError: it is damaged, or of a newer ftrun.
            OSError: it can't be read.
        """
        # Opened each time: over NFS that is what shows what another node has written.
        try:
            with self.path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        except FileNotFoundError:
            return Book()
        return self._decode(data)

    def _decode(self, data: bytes) -> Book:
        document, problem = _parse(data)
        version = document.get("schema_version") if isinstance(document, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise NodesFileError(f"{self.path} was written by a newer ftrun (version {version}). Use that one.")
        if not problem:
            try:
                return history.from_json(document)
            except ValueError as error:
                problem = str(error)
        raise _DamagedError(f"{self.path} is damaged ({problem}); whoever writes it next moves it aside")

    def change(self, how: Callable[[Book], Book], within: float = LOCK_SECONDS) -> Book:
        """Change what it holds; nobody else writes meanwhile. Where nothing changes, nobody's turn is waited for.

        Args:
            how: from what it holds to what it is to hold; may be called several times.
            within: seconds to wait for other writers.

        Returns:
            What it holds now.

        Raises:
            Busy: others have been writing for too long.
            NodesFileError: it is of a newer ftrun.
            OSError: it can't be read or written.
        """
        with contextlib.suppress(_DamagedError):
            book = self.read()
            if how(book) == book:
                return book
        # Imported by those who write: most of the time there is nothing to.
        from filelock import FileLock, Timeout

        if not self.path.parent.is_dir():  # which the lock would make anew
            raise FileNotFoundError(errno.ENOENT, "the run directory is gone", str(self.path.parent))
        lock = self.path.with_name(f".{self.path.name}.lock")
        try:
            with FileLock(lock, timeout=within, poll_interval=0.02):
                return self._changed(how)
        except Timeout:
            raise Busy(
                f"{self.path} has been locked by another process for {within:g} s. Try again; a launcher that hangs "
                "may hold it."
            ) from None

    def _changed(self, how: Callable[[Book], Book]) -> Book:
        try:
            book = self.read()
        except _DamagedError as error:
            aside = self._set_aside()
            self._warn(f"{error.args[0].partition(';')[0]}: it is kept as {aside.name}, and what it said is forgotten")
            book = Book()
        changed = how(book)
        if changed != book:
            durable.write(self.path, json.dumps(history.to_json(changed), indent=1).encode() + b"\n")
        return changed

    def _set_aside(self) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{os.getpid()}")
        self.path.rename(aside)
        return aside


class _DamagedError(NodesFileError):
    """It is not what this program has written; the next writer moves it aside."""


def _parse(data: bytes) -> tuple[Any, str]:
    """A document, and what is wrong with it."""
    if len(data) > _LARGEST:
        return None, "it is far too large"
    try:
        return json.loads(data), ""
    except (ValueError, RecursionError) as error:
        return None, f"it is no JSON ({error})"
