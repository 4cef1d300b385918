"""``nodes.partition`` and ``nodes.join``: worlds that must not be there at once, and one that becomes larger."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import say
from figures import Figure, Target, median, ratio, spread
from nodes_bed import START, ftrun, job, last_word, settle, tests, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common import Settings
    from nodes_bed import Launcher

_APART = ((1, 2), (3, 4))
_APART_SECONDS = 8.0
_PATIENCE = 30.0


def partition(settings: Settings) -> Iterator[Figure]:
    """``nodes.partition``: silent workers, which would train on for ever on both sides."""
    count = settings.count(5, 1)
    ours = [_partition(settings, ftrun()) for _ in range(count)]
    again = [_partition(settings, ftrun("ftrun again")) for _ in range(settings.count(3, 1))]
    theirs = [_partition(settings, torchrun())]
    found = [each.at_once for each in ours if each.at_once and each.whole]
    control = [each.at_once for each in again if each.at_once and each.whole]
    yield Figure(
        "nodes.partition",
        float(max(found)) if len(found) == count else None,
        Target("<=", 1.0),
        control=float(max(control)) if len(control) == len(again) else None,
        n=len(found),
        reference={"torchrun": theirs[0].at_once, "its sides that trained to the end of the cut": theirs[0].sides},
        notes=[
            "the most worlds that trained at the same time, from the cut until all four were one world again",
            *(f"ftrun: {each.said}" for each in ours),
            *(f"ftrun again: {each.said}" for each in again),
            *(f"torchrun: {each.said}" for each in theirs),
        ],
    )


@dataclass(frozen=True)
class Parted:
    """What became of a world that was cut apart.

    Attributes:
        at_once: how many worlds trained at the same time; None if there was nothing to cut.
        sides: of how many sides somebody still trained at the end of the cut, be it as a part of the old world.
        whole: whether all were in one new world after the heal.
        said: what happened.
    """

    at_once: float | None
    sides: int
    whole: bool
    said: str


def _partition(settings: Settings, launcher: Launcher) -> Parted:
    all_nodes = [number for side in _APART for number in side]
    with job(settings, launcher, len(all_nodes), f"2:{len(all_nodes)}", "nodes_worker.py") as running:
        running.start(*all_nodes)
        world = running.whole(*all_nodes, seconds=START)
        if world is None or running.trains(world) is None:
            return Parted(None, sides=0, whole=False, said=f"no world of {len(all_nodes)}; {last_word(running.told())}")
        settle()
        began = time.monotonic()
        running.net.part(*_APART)
        time.sleep(_APART_SECONDS)
        running.diary.worlds()
        stopped = [_last_step(running, number) - began for number in all_nodes]
        new = next((each for each in running.diary.worlds() if each.whole and each.began > began), None)
        healed = time.monotonic()
        running.net.heal_all()
        whole = running.whole(*all_nodes, after=healed, seconds=_PATIENCE)
        if whole is not None:
            running.trains(whole)
        worlds = tests("diary").at_once(running.diary.worlds(), since=began)
    sides = sum(any(stopped[number - 1] > _APART_SECONDS - 1.0 for number in side) for side in _APART)
    said = f"{worlds} at once, {sides} of two sides trained to the end of the cut; "
    if new is not None:
        said += f"nodes {new.numbers} went on after {new.started - began:.2f} s"
        others = [seconds for number, seconds in zip(all_nodes, stopped, strict=True) if number not in new.numbers]
        said += f", the others' last step was at {max(others, default=0.0):.2f} s" if others else ""
    else:
        said += "no side went on in a world of its own"
    said += f"; whole {whole.started - healed:.2f} s after the heal" if whole else "; not whole again after the heal"
    say(f"{launcher.name}: {said}")
    return Parted(float(worlds), sides, whole is not None, said)


def _last_step(running: Any, number: int) -> float:
    return max(line.at for line in running.diary.lines if line.what == "step" and line.node == f"node{number}")


def join(settings: Settings) -> Iterator[Figure]:
    """``nodes.join``: from the start of a third node's launcher to the start of the last worker of three."""
    count = settings.count(5, 1)
    seconds = {each.name: _joins(settings, each, count) for each in (ftrun(), torchrun())}
    seconds["ftrun again"] = _joins(settings, ftrun("ftrun again"), settings.count(3, 1))
    medians = {name: median(values) for name, (values, _) in seconds.items()}
    ours, _ = seconds["ftrun"]
    yield Figure(
        "nodes.join",
        medians["ftrun"] if len(ours) == count else None,
        Target("<=", 2.0),
        control=ratio(medians["ftrun again"], medians["ftrun"]),
        n=len(ours),
        reference={"torchrun (s)": medians["torchrun"]},
        notes=[f"{name}: {spread(values)}{problem}" for name, (values, problem) in seconds.items()],
    )


def _joins(settings: Settings, launcher: Launcher, count: int) -> tuple[list[float], str]:
    """Seconds of each time that the third node joined, and what went wrong."""
    made: list[float] = []
    problem = ""
    with job(settings, launcher, 3, "2:3", "nodes_worker.py", "--talk") as running:
        running.start(1, 2)
        world = running.whole(1, 2, seconds=START)
        while len(made) < count:
            if world is None or running.trains(world) is None:
                problem = f"; no world of two: {last_word(running.told())}"
                break
            settle()
            began = time.monotonic()
            running.start(3)
            larger = running.whole(1, 2, 3, after=began, seconds=_PATIENCE)
            if larger is None or running.trains(larger) is None:
                problem = f"; no world of three: {last_word(running.told())}"
                break
            made.append(larger.started - began)
            off = time.monotonic()
            running.net.node(3).power_off()
            running.net.node(3).power_on()
            world = running.whole(1, 2, after=off, seconds=START)
    say(f"{launcher.name}: {spread(made)}{problem}")
    return made, problem
