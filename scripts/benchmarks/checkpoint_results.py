"""What the checkpoint jobs wrote down, and the ratios made of it. Pure, but for reading the files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from figures import Figure, median, ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from figures import Target


@dataclass(frozen=True)
class Results:
    """Numbers that the ranks of one job wrote.

    Attributes:
        ranks: for each rank, its lines ``{"name", "cycle", "value"}``.
        problem: why there may be less than was asked for; empty where all went well.
    """

    ranks: Sequence[Sequence[Mapping[str, Any]]] = ()
    problem: str = ""

    def worst(self, name: str) -> list[float]:
        """For each cycle the largest value of all ranks, since they wait for the last; only cycles that all have."""
        by_rank = [
            {line["cycle"]: float(line["value"]) for line in lines if line["name"] == name} for lines in self.ranks
        ]
        common = set.intersection(*(set(each) for each in by_rank)) if by_rank else set()
        return [max(each[cycle] for each in by_rank) for cycle in sorted(common)]

    def all(self, name: str, rank: int = 0) -> dict[int, list[float]]:
        """Everything that one rank has under a name, by cycle."""
        found: dict[int, list[float]] = {}
        for line in self.ranks[rank] if rank < len(self.ranks) else ():
            if line["name"] == name:
                found.setdefault(line["cycle"], []).append(float(line["value"]))
        return found

    def spans(self, start: str, end: str) -> list[float]:
        """For each cycle the time from the last rank's start to the end that rank 0 saw."""
        begun, ended = self.worst(start), self.all(end)
        return [max(0.0, ended[cycle][0] - at) for cycle, at in enumerate(begun) if cycle in ended]

    def sum(self, name: str) -> float:
        """The first value of each rank, all together."""
        return sum(next(iter(self.all(name, rank).values()), [0.0])[0] for rank in range(len(self.ranks)))


def read_results(folder: Path, ranks: int, problem: str = "") -> Results:
    """Read what all ranks wrote; a line that is torn is left out."""
    files = (folder / f"results-{rank}.jsonl" for rank in range(ranks))
    return Results([list(_lines(each)) for each in files], problem)


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


@dataclass(frozen=True)
class Case:
    """One of several measurements that make up a figure.

    Attributes:
        name: such as ``DDP, 4 tensors``.
        value: the ratio; None where it could not be measured.
        control: the same thing twice.
        n: number of measurements.
        notes: for people.
    """

    name: str
    value: float | None
    control: float | None = None
    n: int = 0
    notes: tuple[str, ...] = field(default=())


def hardest(cases: Sequence[Case], *, largest: bool = True) -> Case:
    """The case that decides a figure: the worst one, or one that could not be measured."""
    missing = [each for each in cases if each.value is None]
    if missing or not cases:
        return missing[0] if missing else Case("nothing", None)
    return (max if largest else min)(cases, key=lambda each: each.value or 0.0)


def over(results: Results, name: str, base: str) -> float | None:
    """Median of something over the median of its baseline, the slowest rank of each cycle counting."""
    return ratio(median(results.worst(name)), median(results.worst(base)))


def paired(above: Mapping[int, Sequence[float]], below: Mapping[int, Sequence[float]]) -> list[float]:
    """For each cycle that both have, the median of one over the median of the other."""
    quotients = (ratio(median(above[cycle]), median(below[cycle])) for cycle in sorted(set(above) & set(below)))
    return [each for each in quotients if each is not None]


def figure(
    name: str,
    cases: Sequence[Case],
    target: Target,
    beside: Mapping[str, float | str | None],
    notes: Sequence[str] = (),
    *,
    largest: bool = True,
) -> Figure:
    """A figure whose value is that of its hardest case; the others and what is beside it are its reference."""
    worst = hardest(cases, largest=largest)
    reference = {each.name: each.value for each in cases} | dict(beside)
    told = [f"{each.name}: {note}" for each in cases for note in each.notes]
    return Figure(name, worst.value, target, worst.control, worst.n, reference, [*told, *notes])
