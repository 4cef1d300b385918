"""Where fill plans lie. One class owns every path of a run's directory, one more those that runs share.

::

    CACHE/fill-uid-1000/                  beside the cache's own directory of that user
        urls/<digest>                     lists of URLs, each once
        runs/<digest>/                    one for each run directory and node
            lock  log  shown.json  baseline.json
            spare                     where the node waits for a seat; locked by its launcher as long as that lives
            resume.json                   where the next attempt begins, and with which ranks
            plans/<digest>.json           one for each loader
            plans/<digest>.<attempt>.page
            plans/<digest>.<epoch>.order  orders that can't be computed here; .ends of batches beside them

    RUN/data/n0000.json                   says where the node's directory is
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun import durable
from ftrun.flock import try_lock

_KEPT = 14 * 86400.0
"""Seconds after which plans that nobody has used are removed: their runs were given up."""
_JUST_MADE = 3600.0


def short(text: str) -> str:
    """A digest that is a file's name."""
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """A file's object; None where there is none, or it is damaged."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def put_json(path: Path, document: dict[str, Any]) -> None:
    """Write or replace a file, whole or not at all; after a crash of the machine too.

    Raises:
        OSError: the disk doesn't take it.
    """
    durable.write(path, json.dumps(document).encode())


@dataclass(frozen=True)
class Pool:
    """What the runs of one user share.

    Attributes:
        path: its directory.
    """

    path: Path

    @classmethod
    def of(cls, cache_root: Path) -> Pool:
        """The one of a cache."""
        return cls(cache_root / f"fill-uid-{os.geteuid()}")

    def urls(self, digest: str) -> Path:
        """A list of URLs."""
        return self.path / "urls" / digest

    def run(self, run_dir: Path, node: int | str) -> FillDir:
        """A run's directory, for a node by its number; by its name, while it has none."""
        name = short(f"{os.path.realpath(run_dir)}\n{node}\n{os.uname().nodename}")
        return FillDir(self.path / "runs" / name)

    def sweep(self, besides: Path) -> None:
        """Remove what dead spares and runs that were given up have left, and lists of URLs that no plan names."""
        now = time.time()
        for run in self._entries("runs"):
            given_up = _age(run / "shown.json", now) > _KEPT and _age(run, now) > _KEPT
            if run != besides and not FillDir(run).remove_dead_spare() and given_up:
                shutil.rmtree(run, ignore_errors=True)
        named = {plan.get("urls") for path in self.path.glob("runs/*/plans/*.json") if (plan := read_json(path))}
        for urls in self._entries("urls"):
            if urls.name not in named and _age(urls, now) > _JUST_MADE:
                with contextlib.suppress(OSError):
                    urls.unlink()

    def _entries(self, room: str) -> list[Path]:
        try:
            return sorted((self.path / room).iterdir())
        except OSError:
            return []


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return float("inf")


@dataclass(frozen=True)
class FillDir:
    """One run's directory on one node.

    Attributes:
        path: where it is.
    """

    path: Path

    @property
    def pool(self) -> Pool:
        """What it shares with others."""
        return Pool(self.path.parent.parent)

    @property
    def lock(self) -> Path:
        """Held by the filler."""
        return self.path / "lock"

    @property
    def log(self) -> Path:
        """What the filler says."""
        return self.path / "log"

    @property
    def shown(self) -> Path:
        """How the filler is doing; its time of change is the run's last sign of life."""
        return self.path / "shown.json"

    @property
    def baseline(self) -> Path:
        """The node's counters when the run began."""
        return self.path / "baseline.json"

    @property
    def resume(self) -> Path:
        """Where the next attempt begins."""
        return self.path / "resume.json"

    @property
    def spare(self) -> Path:
        """There where it is a spare's, which nobody has a use for once that is dead."""
        return self.path / "spare"

    @property
    def plans(self) -> Path:
        """Plans, pages and orders."""
        return self.path / "plans"

    def plan(self, loader: str) -> Path:
        """A loader's plan."""
        return self.plans / f"{short(loader)}.json"

    def page(self, loader: str, attempt: int) -> Path:
        """A loader's page."""
        return self.plans / f"{short(loader)}.{attempt}.page"

    def order(self, loader: str, epoch: int) -> Path:
        """A loader's written order."""
        return self.plans / f"{short(loader)}.{epoch}.order"

    def make(self) -> None:
        """Make the directories, for this user only.

        Raises:
            OSError: the disk doesn't take them.
        """
        self.pool.path.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.pool.path, self.pool.path / "urls", self.path.parent, self.path, self.plans):
            directory.mkdir(mode=0o700, exist_ok=True)

    def hold_for_spare(self) -> int:
        """Say that it is this process's, a spare's. Returns a descriptor, which is open as long as that holds.

        Raises:
            OSError: the disk doesn't take it.
        """
        new = self.path / f".spare.{os.getpid()}"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try_lock(descriptor)  # before anybody else finds it
            new.replace(self.spare)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def remove_dead_spare(self) -> bool:
        """Remove it if it is that of a spare that is dead, killed for example. Whether it was."""
        try:
            descriptor = os.open(self.spare, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            dead = try_lock(descriptor)
            if dead:
                self.remove()
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return dead

    def withdraw(self, loader: str) -> None:
        """Remove all that was written for one loader.

        Raises:
            OSError: the disk doesn't let it go.
        """
        self.plan(loader).unlink(missing_ok=True)
        for path in self.plans.glob(f"{short(loader)}.*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class Pointer:
    """A run's word on where the directory of one of its nodes is.

    Attributes:
        path: the file.
    """

    path: Path

    @classmethod
    def of(cls, run_dir: Path, node: int) -> Pointer:
        """The one of a node."""
        return cls(run_dir / "data" / f"n{node:04d}.json")

    def read(self) -> FillDir | None:
        """The directory, if there is one and it is there on this machine."""
        where = (read_json(self.path) or {}).get("directory")
        if not isinstance(where, str) or not where:
            return None
        found = FillDir(Path(where))
        return found if found.plans.is_dir() else None

    def last(self) -> dict[str, Any] | None:
        """What was shown last, once there is no directory any more."""
        last = (read_json(self.path) or {}).get("last")
        return last if isinstance(last, dict) else None

    def point(self, directory: FillDir | None, last: dict[str, Any] | None = None) -> None:
        """Say where it is, or that it is over.

        Raises:
            OSError: the run's disk doesn't take it.
        """
        self.path.parent.mkdir(exist_ok=True)
        put_json(self.path, {"directory": str(directory.path) if directory else "", "last": last})
