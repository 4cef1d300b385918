"""Payloads in shared memory, mapped once for all saves.

A slot's file is the same one save after save. To enter its pages into this process's page table anew for each of them
takes the processor longer than summing them up, while training wants it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class _Mapped:
    """A mapping.

    Attributes:
        identity: of the file, and how much of it is mapped. While this is there the file's number isn't given again.
        memory: the mapping.
    """

    identity: tuple[int, int, int]
    memory: mmap.mmap


class Mappings:
    """Mappings by the paths of files. Any thread uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, _Mapped] = {}

    def of(self, path: str, descriptor: int, size: int) -> memoryview:
        """The first bytes of a file, to be read. It stays mapped as long as the file has its path.

        Args:
            path: of the file.
            descriptor: of the file, open; it has at least that many bytes.
            size: how many to map.

        Raises:
            OSError: it can't be mapped.
        """
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino, size)
        with self._lock:
            self._let_go_of_others(path, identity)
            if path not in self._mapped:
                self._mapped[path] = _Mapped(identity, mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
            # A view before the lock is let go of: another thread that finds the file gone closes what nobody looks at.
            return memoryview(self._mapped[path].memory)

    def __len__(self) -> int:
        return len(self._mapped)

    def _let_go_of_others(self, path: str, identity: tuple[int, int, int]) -> None:
        """Of files that are gone, whose memory would be kept, and of another file that had this path."""
        for each, mapped in [*self._mapped.items()]:
            if mapped.identity != (identity if each == path else (*_numbers(each), mapped.identity[2])):
                del self._mapped[each]
                # Where somebody reads it still, it goes with the last of them.
                with contextlib.suppress(BufferError):
                    mapped.memory.close()


def _numbers(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino
