"""Copying one remote file, checked: every byte that was announced and no more, or another attempt."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import crc32c

from ftrun.data.cache import patient
from ftrun.data.cache.refusals import OnTheDisk, Outdated
from ftrun.data.cache.remote import CHUNK, Changed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.cache.records import Listing, Patience
    from ftrun.data.cache.remote import Remote
    from ftrun.data.cache.threads import Threads


class Target(Protocol):
    """Where the bytes go.

    Attributes:
        descriptor: of a file open for writing.
    """

    @property
    def descriptor(self) -> int: ...  # noqa: D102 - above

    def beat(self) -> None:
        """Called about once a second."""

    def grow(self, size: int) -> None:
        """Called before the file grows beyond what was announced, or when nothing was.

        Raises:
            DiskTrouble: it may not.
        """


@dataclass(frozen=True)
class Copying:
    """Copies files from a remote.

    Attributes:
        remote: from where.
        threads: that ask it.
        patience: with it.
        failed: called for each attempt that failed.
    """

    remote: Remote
    threads: Threads
    patience: Patience
    failed: Callable[[], None]

    def look(self, url: str, beat: Callable[[], None] = lambda: None) -> Listing:
        """Size and version of a file, with every patience.

        Raises:
            RemoteError: there is none, or it isn't to be had.
        """
        return patient.persist(url, lambda: self._ask(url, beat), self.patience, beat, self.failed)

    def list(self, directory: str) -> dict[str, Listing]:
        """Size and version of every file in a driver's directory, by URL, with every patience.

        Raises:
            RemoteError: there is none, or it isn't to be had.
        """
        remote, timeout = self.remote, self.patience.timeout

        def ask() -> dict[str, Listing]:
            return patient.ask(self.threads, lambda: remote.list(directory), timeout)

        return patient.persist(directory, ask, self.patience, failed=self.failed)

    def copy(self, url: str, listing: Listing, target: Target) -> tuple[int, int]:
        """Copy a file. Returns its size and CRC32C.

        Raises:
            Outdated: it isn't the file of that listing any more.
            RemoteError: it isn't to be had.
            DiskTrouble: the target doesn't take it.
        """
        attempts = 0

        def attempt() -> tuple[int, int]:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and self._ask(url, target.beat) != listing:
                raise Outdated(url)
            return self._once(url, listing, target)

        return patient.persist(url, attempt, self.patience, target.beat, self.failed)

    def _ask(self, url: str, beat: Callable[[], None]) -> Listing:
        return patient.ask(self.threads, lambda: self.remote.stat(url), self.patience.timeout, beat)

    def _once(self, url: str, listing: Listing, target: Target) -> tuple[int, int]:
        if listing.size is not None and listing.size <= CHUNK:
            return self._at_once(url, listing.size, target)
        return self._in_pieces(url, listing, target)

    def _at_once(self, url: str, expected: int, target: Target) -> tuple[int, int]:
        remote, timeout = self.remote, self.patience.timeout
        data = patient.ask(self.threads, lambda: remote.read(url, expected), timeout, target.beat)
        _check(len(data), expected)
        with OnTheDisk():
            _write(target.descriptor, data, 0)
        return expected, crc32c.crc32c(data)

    def _in_pieces(self, url: str, listing: Listing, target: Target) -> tuple[int, int]:
        size = crc = 0
        expected = listing.size
        allowed = expected or 0
        remote, timeout = self.remote, self.patience.timeout
        pieces = patient.stream(self.threads, lambda: remote.chunks(url, listing), timeout, target.beat)
        with contextlib.closing(pieces):  # type: ignore[type-var] # a generator
            for data in pieces:
                if size + len(data) > allowed:
                    if expected is not None:
                        _check(size + len(data), expected)
                    allowed = size + max(len(data), 2 * CHUNK)
                    target.grow(allowed)
                with OnTheDisk():
                    _write(target.descriptor, data, size)
                crc = crc32c.crc32c(data, crc)
                size += len(data)
        if expected is not None:
            _check(size, expected)
        return size, crc


def _check(size: int, expected: int) -> None:
    if size > expected:
        raise Changed(f"it holds more than the {expected} bytes that were announced")
    if size < expected:
        raise Changed(f"it ended after {size} of the {expected} bytes that were announced")


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


@dataclass
class Memory:
    """A target in memory, or for big files in the directory for temporary files, that vanishes with its process."""

    descriptor: int

    def beat(self) -> None:
        """Nobody waits for it."""

    def grow(self, size: int) -> None:
        """It may."""
