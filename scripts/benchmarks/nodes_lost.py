"""``nodes.lost`` and ``nodes.store_host``: how long the others stand still when a node goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common import say
from figures import Figure, Target, median, ratio, spread
from nodes_bed import START, ftrun, job, last_word, settle, torchrun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from common import Settings
    from nodes_bed import Launcher

NODES = 3
PATIENCE = 20.0
"""Seconds after which a fault counts as never noticed."""
TARGET = Target("<=", 2.0)


@dataclass(frozen=True)
class Fault:
    """One way to lose a node, and to have it again.

    Attributes:
        name: for people.
        talk: whether the workers talk with each other.
        do: to a net, and a node's number.
        undo: to a job, and the number.
        host: whether it is the node that hosts the store, which is the first rank's, or the last rank's.
    """

    name: str
    talk: bool
    do: Callable[[Any, int], None]
    undo: Callable[[Any, int], None]
    host: bool = False


def _off(net: Any, number: int) -> None:
    net.node(number).power_off()


def _on(job: Any, number: int) -> None:
    job.net.node(number).power_on()
    job.start(number)


def _cut(net: Any, number: int) -> None:
    net.cut(number)


def _heal(job: Any, number: int) -> None:
    job.net.heal(number)


_SILENT = Fault("killed, silent workers", False, _off, _on)
_TALKING = Fault("killed, talking workers", True, _off, _on)
_CUT = Fault("silent cut", True, _cut, _heal)
_HOST = Fault("store's host killed", False, _off, _on, host=True)
_HOST_TALKING = Fault("store's host killed, talking workers", True, _off, _on, host=True)


@dataclass
class Series:
    """What one launcher made of one fault, again and again.

    Attributes:
        seconds: from each fault to the start of the last new worker.
        problem: what went wrong, if anything did.
    """

    seconds: list[float] = field(default_factory=list)
    problem: str = ""

    def __str__(self) -> str:
        return f"{spread(self.seconds)}{'; ' if self.problem else ''}{self.problem}"


def lost(settings: Settings) -> Iterator[Figure]:
    """``nodes.lost``: the worst of three ways to lose a member."""
    yield _figure(settings, "nodes.lost", (_SILENT, _TALKING, _CUT), stock=(_TALKING,))


def store_host(settings: Settings) -> Iterator[Figure]:
    """``nodes.store_host``: the node is lost where the store is."""
    yield _figure(settings, "nodes.store_host", (_HOST, _HOST_TALKING), stock=())


def _figure(settings: Settings, name: str, faults: Sequence[Fault], stock: Sequence[Fault]) -> Figure:
    """One figure of several faults. What stock torchrun never gets over is tried once."""
    count, fewer = settings.count(5, 1), settings.count(3, 1)
    values, controls, beside, notes = [], [], {}, []
    for fault in faults:
        ours = series(settings, ftrun(), fault, count)
        again = series(settings, ftrun("ftrun again"), fault, fewer)
        theirs = series(settings, torchrun(), fault, count if fault in stock else 1)
        values.append(median(ours.seconds) if len(ours.seconds) == count else None)
        controls.append(ratio(median(again.seconds), median(ours.seconds)))
        beside[f"torchrun, {fault.name} (s)"] = median(theirs.seconds) or theirs.problem
        notes += [f"{fault.name}: {each}" for each in (f"ftrun {ours}", f"ftrun again {again}", f"torchrun {theirs}")]
    known = [each for each in values if each is not None]
    value = max(known) if len(known) == len(values) else None
    control = controls[values.index(value)] if value is not None else None
    return Figure(name, value, TARGET, control=control, n=count, reference=beside, notes=notes)


def series(settings: Settings, launcher: Launcher, fault: Fault, count: int) -> Series:
    """One job that loses a node several times, and has it again each time."""
    made = Series()
    with job(
        settings, launcher, NODES, f"2:{NODES}", "nodes_worker.py", *(["--talk"] if fault.talk else [])
    ) as running:
        running.start(*range(1, NODES + 1))
        world = running.whole(*range(1, NODES + 1), seconds=START)
        while len(made.seconds) < count:
            if world is None or running.trains(world, START) is None:
                made.problem = f"no world of {NODES} nodes; {last_word(running.told())}"
                break
            settle()
            taken, world = _once(running, world, fault)
            if taken is None:
                made.problem = _how_it_stands(running)
                break
            made.seconds.append(taken)
    say(f"{launcher.name}, {fault.name}: {made}")
    return made


def _once(running: Any, world: Any, fault: Fault) -> tuple[float | None, Any]:
    """Seconds that one fault took, and the whole world that came of its end."""
    victim = world.numbers[0 if fault.host else -1]
    others = [each for each in world.numbers if each != victim]
    began = time.monotonic()
    fault.do(running.net, victim)
    new = running.whole(*others, after=began, seconds=PATIENCE)
    if new is None:
        return None, None
    running.trains(new, START)
    undone = time.monotonic()
    fault.undo(running, victim)
    return new.started - began, running.whole(*world.numbers, after=undone, seconds=START)


def _how_it_stands(running: Any) -> str:
    codes = {f"node{number}": process.poll() for number, process in sorted(running.launchers.items())}
    ended = ", ".join(f"{name} with {code}" for name, code in codes.items() if code is not None)
    return f"not within {PATIENCE:g} s" + (f"; ended: {ended}" if ended else "")
