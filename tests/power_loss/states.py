"""All states that a power loss may leave at any moment of a log, each one once."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from power_loss import log
from power_loss.disk import Disk, fillings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from power_loss.disk import Tree

LIMIT = 20_000
"""States of one moment up to which all are made."""

SAMPLE = 2_000
"""States that are drawn of a moment that has more."""

START = "start"
"""The mark before which everything counts as durable."""


def mark_of(op: log.Op) -> str | None:
    """The mark that an operation sets, if it does: the programs that are recorded make directories in ``marks``."""
    above, _, name = op.path.rpartition("/")
    return name if op.kind == log.MKDIR and above == "marks" else None


@dataclass(frozen=True)
class State:
    """What a power loss may leave.

    Attributes:
        files: bytes of each file by its path; None for a directory.
        since: the marks that had been set last at the moments that may leave this state; empty before the first.
        moment: the operation before which it may first be left.
    """

    files: dict[str, bytes | None]
    since: frozenset[str]
    moment: str

    def __str__(self) -> str:
        lines = [f"before {self.moment!r}, after the mark {' or '.join(sorted(self.since)) or 'none'}:"]
        lines += [f"  {path} {'/' if data is None else _look(data)}" for path, data in sorted(self.files.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class Survey:
    """All states of a log.

    Attributes:
        states: each one once, in an order in which neighbours are alike.
        moments: at how many moments states were made.
        made: how many were made, before equal ones were put together.
        exhaustive: whether some moment had more than could be made, and was sampled.
    """

    states: tuple[State, ...]
    moments: int
    made: int
    exhaustive: bool

    def __str__(self) -> str:
        how = "all" if self.exhaustive else "a sample of"
        return f"{how} states: {len(self.states)} different ones of {self.made} at {self.moments} moments"


def survey(
    ops: Sequence[log.Op],
    within: Sequence[str] = ("root",),
    *,
    mark: Callable[[log.Op], str | None] = mark_of,
    lose_names: bool = True,
) -> Survey:
    """Make all states.

    What isn't synced only grows from one sync to the next, and so do the states: it is enough to look before each
    sync and each mark, and at the end.

    Args:
        ops: of one recording.
        within: directories at the top that survive a power loss; everything else is memory.
        mark: which operations set a mark, and which one.
        lose_names: whether names have to be synced. False is kinder than POSIX: it looks at bytes alone.
    """
    disk, collector = Disk(), _Collector(tuple(within), lose_names)
    dirty, since = True, ""
    for op in ops:
        name = mark(op)
        if name is not None or (dirty and op.kind in (log.FSYNC, log.SYNC)):
            collector.look(disk, since, str(op))
            dirty = False
        disk.do(op)
        dirty = dirty or op.kind not in (log.FSYNC, log.SYNC)
        if name is not None:
            since, dirty = name, True
        if name == START:
            disk.sync()
            collector = _Collector(tuple(within), lose_names)
    collector.look(disk, since, "the end")
    return collector.survey()


class _Collector:
    def __init__(self, within: tuple[str, ...], lose_names: bool) -> None:
        self._within, self._lose_names = within, lose_names
        self._found: dict[tuple[tuple[str, bytes | None], ...], tuple[set[str], str]] = {}
        self._moments, self._made, self._exhaustive = 0, 0, True

    def look(self, disk: Disk, since: str, moment: str) -> None:
        self._moments += 1
        states = list(itertools.islice(self._all(disk), LIMIT + 1))
        if len(states) > LIMIT:
            self._exhaustive = False
            states = list(itertools.islice(self._drawn(disk), SAMPLE))
        self._made += len(states)
        for files in states:
            key = tuple(sorted(files.items(), key=lambda item: item[0]))
            self._found.setdefault(key, (set(), moment))[0].add(since)

    def survey(self) -> Survey:
        ordered = sorted(self._found.items(), key=lambda item: [(path, data or b"") for path, data in item[0]])
        states = tuple(State(dict(key), frozenset(since), moment) for key, (since, moment) in ordered)
        return Survey(states, self._moments, self._made, self._exhaustive)

    def _all(self, disk: Disk) -> Iterator[dict[str, bytes | None]]:
        trees = disk.trees(self._within, lambda options: options if self._lose_names else options[-1:])
        return itertools.chain.from_iterable(map(fillings, trees))

    def _drawn(self, disk: Disk) -> Iterator[dict[str, bytes | None]]:
        """The latest names with all bytes, then names and bytes by lot: always the same ones."""
        yield from itertools.islice(_latest(disk, self._within), SAMPLE // 2)
        lot = random.Random(self._moments)
        while True:
            for tree in disk.trees(self._within, lambda options: [lot.choice(options)]):
                yield _drawn_filling(tree, lot)


def _latest(disk: Disk, within: tuple[str, ...]) -> Iterator[dict[str, bytes | None]]:
    return itertools.chain.from_iterable(map(fillings, disk.trees(within, lambda options: options[-1:])))


def _drawn_filling(tree: Tree, lot: random.Random) -> dict[str, bytes | None]:
    drawn = {id(file): lot.choice(file.contents()) for file in tree.values() if file is not None}
    return {path: None if file is None else drawn[id(file)] for path, file in tree.items()}


def _look(data: bytes) -> str:
    if data and not data.strip(b"\0"):
        return f"{len(data)} zero bytes"
    return f"{len(data)} bytes"
