"""What became of each save: the keeper says it, the workers of the node hear it. No torch.

One small file for each attempt to save, in the tier: ``outcomes/e00000007-s0000001200-5f1c09ab.json``.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.files import make_directory, read
from ftrun.checkpoint.memory.tier import put, remove

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ftrun.checkpoint.memory.tier import Tier

_KEEP = 64
# A directory's time of change moves in ticks of a few milliseconds: two changes within one tick look like one.
_TICK_NS = 100_000_000


@dataclass(frozen=True)
class Outcome:
    """What became of a save.

    Attributes:
        attempt: name of the attempt to save.
        step: number of finished steps in the state.
        committed: it is a checkpoint now; otherwise it will never be one.
        reason: why it was not committed, fit to follow "was not committed: "; empty where it was.
        seconds: from the seal to now.
        size: bytes of all files of all ranks; 0 where it was not committed.
        differ: names of tensors whose content differs between ranks that should hold the same.
        heard: the keeper says it, or has heard it from a worker: then the run's events and the other nodes have it.
        final: another save of the same state would be refused for the same reason.
    """

    attempt: str
    step: int
    committed: bool
    reason: str
    seconds: float
    size: int
    differ: tuple[str, ...] = ()
    heard: bool = False
    final: bool = False

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Outcome:
        """Read it back.

        Raises:
            ValueError: it is no outcome.
        """
        try:
            document = json.loads(content)
            return cls(**(document | {"differ": tuple(document["differ"])}))
        except (KeyError, TypeError) as error:
            raise ValueError("is no outcome") from error


class Outcomes:
    """The outcomes of one tier. One thread uses an instance; any number of processes read."""

    def __init__(self, tier: Tier) -> None:
        self._directory = tier.outcomes
        self._seen: set[str] = set()
        self._unchanged_since = -1

    def put(self, outcome: Outcome) -> None:
        """Say what became of a save, and forget the oldest ones.

        The keeper calls this, and a worker whose snapshot will never be whole.

        Raises:
            OSError: the tier is gone or full.
        """
        try:
            put(self._path(outcome.attempt), outcome.to_bytes())
        except NotADirectoryError:
            make_directory(self._directory)
            put(self._path(outcome.attempt), outcome.to_bytes())
        for name in self._names()[:-_KEEP]:
            remove(self._directory / name)

    def poll(self) -> list[Outcome]:
        """Those that were not returned before, ascending by (epoch, step): at the first call, all that are there.

        A microsecond or two when nothing has changed; nothing when the tier is gone.
        """
        try:
            changed = os.stat(self._directory).st_mtime_ns
        except OSError:
            return []
        if changed == self._unchanged_since:
            return []
        settled = time.time_ns() - changed > _TICK_NS
        fresh = [name for name in self._names() if name not in self._seen]
        found = [(name, self._read(self._directory / name)) for name in fresh]
        self._seen.update(name for name, outcome in found if outcome is not None)
        self._unchanged_since = changed if settled else -1
        return [outcome for _, outcome in found if outcome is not None]

    def get(self, attempt: str) -> Outcome | None:
        """What became of one save; None while that is open."""
        return self._read(self._path(attempt))

    def _path(self, attempt: str) -> Path:
        return self._directory / f"{attempt}.json"

    def _names(self) -> list[str]:
        try:
            return _in_order(os.listdir(self._directory))
        except OSError:
            return []

    def _read(self, path: Path) -> Outcome | None:
        try:
            return Outcome.from_bytes(read(path))
        except (OSError, ValueError):
            return None


def _in_order(names: Iterable[str]) -> list[str]:
    """File names of outcomes, ascending by (epoch, step); anything else is left out."""
    parsed = ((AttemptName.parse(name.removesuffix(".json")), name) for name in names if name.endswith(".json"))
    return [name for attempt, name in sorted((a, n) for a, n in parsed if a is not None)]
