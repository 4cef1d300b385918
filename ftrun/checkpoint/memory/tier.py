"""Where a node's snapshots lie in shared memory, and who may do what with them. No torch: the keeper uses it too.

::

    /dev/shm/ftrun-0/6f1c09ab22d4/          one directory for each run directory and node
        keeper.json  keeper.lock  keeper.sock
        epoch.json                          the epoch that runs now, and this node's number in it
        peers.json                          whose memory gets copies of what is sealed here, where that is wanted
        outcomes/e…-s….json                 what became of each save
        r00003/0.safetensors                slot 0 of rank 3: its tensors, a whole safetensors file
        r00003/0.json                       ... its record
        r00003/0.seal                       ... both are whole; absent while they are filled
        r00003/0.draining                   ... the keeper reads them now
        r00003/0.drained                    ... they are safe elsewhere: the slot may be filled again
    /dev/shm/ftrun-0/6f1c09ab22d4-copies/   the same for copies of another node's snapshots

The worker fills a slot: it removes ``seal``, writes, and puts a new ``seal``, last and in one step.
The keeper puts ``draining`` before it reads, looks at the seal once more, and puts ``drained`` when the bytes are
safe elsewhere. Each marker holds the name of the attempt that it speaks of: one of another attempt means nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.memory.files import drop_elsewhere, make_directory, own, put, read, remove
from ftrun.checkpoint.records import Seal
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NUM_SLOTS", "SHARED_MEMORY", "Slot", "Tier", "put", "remove"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the directory in it belongs to one user, and nobody else may read it)
NUM_SLOTS = 2
_COPIES = "-copies"


@dataclass(frozen=True)
class Slot:
    """The files of one slot of one rank.

    Attributes:
        directory: the rank's directory in the tier.
        number: 0 or 1.
    """

    directory: Path
    number: int

    @functools.cached_property
    def payload(self) -> Path:
        """The tensors, as a safetensors file."""
        return self.directory / f"{self.number}.safetensors"

    @functools.cached_property
    def record(self) -> Path:
        """The rank's record."""
        return self.directory / f"{self.number}.json"

    @functools.cached_property
    def seal(self) -> Path:
        """There while both are whole."""
        return self.directory / f"{self.number}.seal"

    @functools.cached_property
    def draining(self) -> Path:
        """There while the keeper reads them."""
        return self.directory / f"{self.number}.draining"

    @functools.cached_property
    def drained(self) -> Path:
        """There when they are safe elsewhere."""
        return self.directory / f"{self.number}.drained"

    @property
    def stand_in(self) -> Path | None:
        """The file on a disk that a link in the payload's place leads to, where shared memory was too small."""
        try:
            target = Path(os.readlink(self.payload))
        except OSError:
            return None
        # Of a directory that is named after the tier and the rank; what else a link leads to is somebody else's.
        ours = target.name == self.payload.name and target.parent.name.endswith(f"-{self.directory.name}")
        return target if ours else None

    def read_seal(self) -> Seal | None:
        """The seal; None where there is none, or where it is damaged."""
        try:
            return Seal.from_bytes(read(self.seal))
        except (OSError, ValueError):
            return None

    def problem(self) -> str:
        """Why the seal can't be read, though there is one; else empty."""
        try:
            Seal.from_bytes(read(self.seal))
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"can't be read: {error.strerror or error}"
        except ValueError as error:
            return str(error)
        return ""

    def is_marked(self, marker: Path, attempt: str) -> bool:
        """Whether ``draining`` or ``drained`` is set for an attempt."""
        try:
            return read(marker) == attempt.encode()
        except OSError:
            return False

    def mark(self, marker: Path, attempt: str) -> None:
        """Set ``draining`` or ``drained``."""
        put(marker, attempt.encode())


@dataclass(frozen=True)
class Tier:
    """The memory tier of one run on one node.

    Attributes:
        path: its directory.
    """

    path: Path

    @classmethod
    def of(cls, run_dir: Path, node: int | str, where: Path = SHARED_MEMORY) -> Tier:
        """The tier of a run directory. ``node`` tells apart launchers of one run on one machine.

        Where there is no shared memory, it lies among the system's temporary files.
        """
        if not os.access(where, os.W_OK | os.X_OK):
            where = Path(tempfile.gettempdir())
        digest = hashlib.blake2b(f"{os.path.realpath(run_dir)}\n{node}".encode(), digest_size=6).hexdigest()
        return cls(where / f"ftrun-{os.getuid()}" / digest)

    @property
    def socket(self) -> Path:
        """Datagrams to it wake the keeper; what they say is of no importance."""
        return self.path / "keeper.sock"

    @property
    def outcomes(self) -> Path:
        """Directory of what became of each save."""
        return self.path / "outcomes"

    @property
    def copies(self) -> Tier:
        """The tier beside it for copies of another node's snapshots; see :mod:`ftrun.checkpoint.keeper.peers`."""
        return Tier(self.path.with_name(f"{self.path.name}{_COPIES}"))

    @property
    def holds_copies(self) -> bool:
        """Whether it is such a one."""
        return self.path.name.endswith(_COPIES)

    def create(self) -> None:
        """Make the directories, for this user only.

        Raises:
            PermissionError: one of them is another user's.
            OSError: they can't be made.
        """
        for directory in (self.path.parent, self.path):
            own(directory)
        make_directory(self.outcomes)

    def require(self) -> None:
        """:meth:`create`, where the user is to be told why that can't be.

        Raises:
            UsageError: the directories can't be made, or are another user's.
        """
        try:
            self.create()
        except OSError as error:
            where, reason = error.filename or self.path, error.strerror or error
            raise UsageError(f"the memory for snapshots, {where}, can't be used: {reason}") from error

    def remove(self) -> None:
        """Remove it, and the files elsewhere that stand in for shared memory where there was too little."""
        _drop_stand_ins(self._all_slots())
        drop_elsewhere(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        if not self.holds_copies and not (self.copies.path / "keeper.json").exists():  # else a keeper is at them
            shutil.rmtree(self.copies.path, ignore_errors=True)

    def drop(self, rank: int) -> None:
        """Give the memory of a rank back that isn't on this node any more."""
        slots = self.slots(rank)
        _drop_stand_ins(slots)
        drop_elsewhere(slots[0].directory)
        shutil.rmtree(slots[0].directory, ignore_errors=True)

    def ranks(self) -> list[int]:
        """Those that have slots here."""
        names = (path.name[1:] for path in self.path.glob("r[0-9]*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def slots(self, rank: int) -> tuple[Slot, ...]:
        """The slots of one rank."""
        return tuple(Slot(self.path / f"r{rank:05d}", number) for number in range(NUM_SLOTS))

    def sealed(self) -> list[tuple[Slot, Seal]]:
        """All sealed slots of all ranks."""
        read_seals = ((slot, slot.read_seal()) for slot in self._all_slots())
        return [(slot, seal) for slot, seal in read_seals if seal is not None]

    def damaged(self) -> list[tuple[Slot, str]]:
        """Slots with a seal that can't be read, and why, fit to follow the seal's path."""
        problems = ((slot, slot.problem()) for slot in self._all_slots())
        return [(slot, problem) for slot, problem in problems if problem]

    def _all_slots(self) -> list[Slot]:
        directories = sorted(self.path.glob("r[0-9]*"))
        return [Slot(directory, number) for directory in directories for number in range(NUM_SLOTS)]


def _drop_stand_ins(slots: Iterable[Slot]) -> None:
    """Remove the files elsewhere that stand in for shared memory."""
    for slot in slots:
        elsewhere = slot.stand_in
        if elsewhere is not None:
            with contextlib.suppress(OSError):
                elsewhere.unlink(missing_ok=True)
                elsewhere.parent.rmdir()
