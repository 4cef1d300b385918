"""What the workers of all nodes write into one file, and which worlds it tells of. Monotonic times, one clock for all.

A line is a JSON object with ``at``, ``what``, ``node``, ``rank``, ``size`` and ``world``, and more as a script likes;
``scripts/benchmarks/jobs/nodes_diary.py`` writes them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        at: when, in seconds of the machine's monotonic clock.
        what: ``start`` is a script's first; ``step`` stands for a bit of training.
        node: the worker's host.
        rank: its rank.
        size: of its world.
        world: where its world meets, which is another place in each round.
        more: what else it says.
    """

    at: float
    what: str
    node: str
    rank: int
    size: int
    world: str
    more: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> Line:
        fields = json.loads(text)
        known = [fields.pop(name) for name in ("at", "what", "node", "rank", "size", "world")]
        return cls(*known, more=fields)

    @property
    def step(self) -> int:
        """The step that it tells of."""
        return int(self.more["step"])


@dataclass
class World:
    """Workers that belong together: one round.

    Attributes:
        name: where they meet.
        size: how many there should be.
        lines: what each rank has written, in order.
    """

    name: str
    size: int
    lines: dict[int, list[Line]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all workers have started."""
        return len(self.lines) == self.size

    @property
    def began(self) -> float:
        """When the first worker started."""
        return min(each[0].at for each in self.lines.values())

    @property
    def started(self) -> float:
        """When the last worker started."""
        return max(each[0].at for each in self.lines.values())

    @property
    def hosts(self) -> list[str]:
        """The workers' hosts, by rank."""
        return [self.lines[rank][0].node for rank in sorted(self.lines)]

    @property
    def numbers(self) -> list[int]:
        """The nodes' numbers, by rank; each once."""
        return list(dict.fromkeys(int(each.removeprefix("node")) for each in self.hosts))

    def steps(self, node: str | None = None) -> list[Line]:
        """All steps, by time.

        Args:
            node: of this host's workers alone.
        """
        found = [each for lines in self.lines.values() for each in lines if each.what == "step"]
        return sorted((each for each in found if node in (None, each.node)), key=lambda each: each.at)

    @property
    def first_step(self) -> float | None:
        """When all workers had completed a step; None if they have not."""
        firsts = [next((each.at for each in lines if each.what == "step"), None) for lines in self.lines.values()]
        known = [each for each in firsts if each is not None]
        return max(known) if self.whole and len(known) == self.size else None


class Diary:
    """Reads the common file as it grows.

    Args:
        path: the file, which needn't be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self._read = 0
        self._worlds: dict[str, World] = {}

    def worlds(self) -> list[World]:
        """All worlds so far, by the start of their first worker."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for text in whole.decode().splitlines():
                self._add(Line.read(text))
        return sorted(self._worlds.values(), key=lambda each: each.began)

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        world = self._worlds.setdefault(line.world, World(line.world, line.size))
        world.lines.setdefault(line.rank, []).append(line)

    def whole(self, *, after: float = 0.0, nodes: Iterable[int] | None = None) -> World | None:
        """The first whole world of which all workers started after a moment.

        Args:
            after: the moment.
            nodes: numbers of its nodes, in any order; all worlds count where it is None.
        """
        wanted = None if nodes is None else sorted(nodes)
        for world in self.worlds():
            if world.whole and world.began > after and wanted in (None, sorted(world.numbers)):
                return world
        return None


def at_once(worlds: Iterable[World], *, since: float = 0.0) -> int:
    """How many worlds trained at the same time: from its first step to its last, a world trains.

    Args:
        worlds: all of them.
        since: what was before this moment doesn't count.
    """
    spans = _spans(worlds, since, math.inf)
    # Where one ends as another begins, they follow each other.
    return max((sum(first <= at < last or first == at for first, last in spans) for at, _ in spans), default=0)


def overlap(worlds: Iterable[World], *, since: float = 0.0, until: float = math.inf) -> float:
    """For how many seconds two worlds trained at the same time, at most.

    Args:
        worlds: all of them.
        since, until: what was before and after these moments doesn't count.
    """
    pairs = itertools.combinations(_spans(worlds, since, until), 2)
    return max((min(a[1], b[1]) - max(a[0], b[0]) for a, b in pairs), default=0.0)


def _spans(worlds: Iterable[World], since: float, until: float) -> list[tuple[float, float]]:
    """From when to when each world trained, of those that did."""
    times = [[step.at for step in world.steps() if since <= step.at <= until] for world in worlds]
    return [(each[0], each[-1]) for each in times if each]
