"""What a run's first node tells spares of what is read: copies of its plans, in the run directory that all share.

::

    RUN/data/spares/<name>.json           a spare asks, with a count that goes up as long as it waits
    RUN/data/offers/<digest>.json         a plan, and how far the training is; for each loader
    RUN/data/offers/<digest>.<epoch>.order    orders that can't be computed; .ends of batches beside them
    RUN/data/offers/urls/<digest>         lists of URLs

Nothing is written where nobody asks. Options of drivers may be secrets: only the user may read it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from ftrun.data.filler.places import read_json, short
from ftrun.data.filler.plans import FillPlan
from ftrun.data.position import Position

if TYPE_CHECKING:
    from pathlib import Path

_PIECE = 1 << 20


@dataclass(frozen=True)
class Offer:
    """A loader, for spares.

    Attributes:
        plan: of the run's first node.
        position: where the training is.
        steps_left: of the run; None where nobody knows.
        mean: samples of a shard, on the average, where lengths aren't known.
        usual: the cache is where it is for want of another word, which may be elsewhere on another node.
    """

    plan: FillPlan
    position: Position
    steps_left: int | None
    mean: float
    usual: bool

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.__dict__, "plan": self.plan.to_json(), "position": list(self.position)}

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """An offer's file; None where it can't be read."""
        document = read_json(path)
        try:
            if document is None:
                return None
            plan = FillPlan.from_json(document.pop("plan"))
            position = Position(*map(int, document.pop("position")))
            return None if plan is None else cls(plan=plan, position=position, **document)
        except (TypeError, ValueError, KeyError):
            return None


@dataclass(frozen=True)
class OfferDir:
    """Where offers lie, and who asks for them.

    Attributes:
        run_dir: of the run.
    """

    run_dir: Path

    @property
    def asking(self) -> Path:
        """A file for each spare that asks."""
        return self.run_dir / "data" / "spares"

    @property
    def path(self) -> Path:
        """The offers."""
        return self.run_dir / "data" / "offers"

    def offer(self, loader: str) -> Path:
        """That of a loader."""
        return self.path / f"{short(loader)}.json"

    def urls(self, digest: str) -> Path:
        """A list of URLs."""
        return self.path / "urls" / digest

    def orders(self, loader: str) -> list[Path]:
        """Orders of a loader, and ends of batches."""
        return sorted(each for each in self.path.glob(f"{short(loader)}.*") if each.suffix in (".order", ".ends"))

    def make(self) -> None:
        """Make the directories, for this user only.

        Raises:
            OSError: the disk doesn't take them.
        """
        self.asking.parent.mkdir(exist_ok=True)
        for directory in (self.path, self.path / "urls"):
            directory.mkdir(mode=0o700, exist_ok=True)

    def asked(self) -> dict[str, bytes]:
        """What spares have written, by name."""
        found = {}
        with contextlib.suppress(OSError):
            for each in self.asking.iterdir():
                if each.suffix == ".json":
                    found[each.name] = each.read_bytes()
        return found

    def ask(self, name: str, count: int) -> None:
        """Ask for offers.

        Raises:
            OSError: the disk doesn't take it.
        """
        self.asking.mkdir(parents=True, exist_ok=True)
        put(self.asking / f"{name}.json", str(count).encode())

    def stop_asking(self, name: str) -> None:
        """Ask no longer; the last one takes the offers away."""
        with contextlib.suppress(OSError):
            (self.asking / f"{name}.json").unlink(missing_ok=True)
        if not self.asked():
            shutil.rmtree(self.path, ignore_errors=True)


def put(path: Path, data: bytes) -> None:
    """Write or replace a file that only this user may read, whole or not at all; it needn't outlast the machine.

    Raises:
        OSError: the disk doesn't take it.
    """
    _put(path, io.BytesIO(data))


def _put(path: Path, source: BinaryIO) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, _PIECE)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def copy_new(source: Path, target: Path) -> None:
    """Copy a file that never changes, unless it is there. Lists and orders may be large: in pieces.

    Raises:
        OSError: it can't be read, or not be written.
    """
    if not target.is_file() or target.stat().st_size != source.stat().st_size:
        with source.open("rb") as file:
            _put(target, file)


def put_offer(path: Path, offer: Offer) -> None:
    """Write an offer.

    Raises:
        OSError: the disk doesn't take it.
    """
    put(path, json.dumps(offer.to_json()).encode())
