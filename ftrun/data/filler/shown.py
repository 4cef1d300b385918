"""What the filler shows of itself and of the node's cache, for ``ftrun status`` and the launcher's events."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.data.cache import told
from ftrun.data.cache.records import Counters
from ftrun.data.filler.places import FillDir, Pointer, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Shown:
    """How a node's cache is doing for one run. Counters are those of the node since the run began.

    Attributes:
        root: of the cache; empty where only the counters are known.
        limit: bytes that it may take, or None.
        used: bytes that it takes; -1 where nobody has looked.
        hits: reads of files that were there.
        misses: reads of files that weren't.
        bytes: downloaded.
        bypasses: reads past the cache.
        waits: reads that waited for somebody else's download.
        wait_seconds: time that reads waited for files.
        errors: attempts of the filler that failed.
        missing: files that the filler found gone.
        steps_ahead: steps that everything is there for.
        waits_for: what keeps the filler from its work; empty where nothing does.
        pid: of the filler, 0 where none runs.
        at: seconds since 1970.
    """

    root: str
    limit: int | None = None
    used: int = -1
    hits: int = 0
    misses: int = 0
    bytes: int = 0
    bypasses: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    errors: int = 0
    missing: int = 0
    steps_ahead: float = 0.0
    waits_for: str = ""
    pid: int = 0
    at: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the reads whose file was there; None without reads."""
        reads = self.hits + self.misses + self.bypasses
        return self.hits / reads if reads else None

    def counted(self, now: Counters, before: Counters) -> Shown:
        """With the node's counters, less what they were when the run began."""
        names = ("hits", "misses", "bytes", "bypasses", "waits", "wait_seconds")
        return replace(self, **{name: max(0, getattr(now, name) - getattr(before, name)) for name in names})

    def event(self) -> events.DataRead:
        """What a run's events keep of it."""
        return events.DataRead(
            hits=self.hits,
            misses=self.misses,
            bytes=self.bytes,
            bypasses=self.bypasses,
            waits=self.waits,
            wait_seconds=self.wait_seconds,
            ahead=int(self.steps_ahead),
            errors=self.errors,
        )

    @classmethod
    def of_event(cls, told: events.DataRead) -> Shown:
        """Back from an event, for a run whose cache is gone, or on another machine."""
        return cls(
            root="",
            hits=told.hits,
            misses=told.misses,
            bytes=told.bytes,
            bypasses=told.bypasses,
            waits=told.waits,
            wait_seconds=told.wait_seconds,
            errors=told.errors,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> Shown | None:
        """Back; None where it is none."""
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in (document or {}).items() if name in known})
        except TypeError:
            return None

    def write(self, directory: FillDir) -> None:
        """Show it. Nothing durable: it is written every second.

        Raises:
            OSError: the disk doesn't take it.
        """
        new = directory.shown.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(self.to_json()))
        new.replace(directory.shown)


def baseline(directory: FillDir) -> Counters:
    """The node's counters when the run began."""
    try:
        return Counters(**(read_json(directory.baseline) or {}))
    except TypeError:
        return Counters()


def of_scripts(run_dir: Path, node: int = 0) -> Shown | None:
    """What the cache has done since the run's scripts began to use it, whether a loader is registered or not.

    None where they haven't, or did so on another machine. After the run it goes on to count what others do.
    """
    said = told.read(run_dir, node)
    now = said.now() if said is not None else None
    return None if said is None or now is None else Shown(root=said.root, limit=said.limit).counted(now, said.before)


def of_run(run_dir: Path, node: int = 0) -> Shown | None:
    """What is shown of a run on this machine, or was shown last; None where nothing was."""
    pointer = Pointer.of(run_dir, node)
    directory = pointer.read()
    return Shown.from_json(read_json(directory.shown) if directory is not None else pointer.last())
