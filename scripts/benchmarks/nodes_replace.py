"""``detect.replace``: a node goes, and a spare that has waited takes its seat: until the first step of all ranks."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import VENV, say
from figures import Figure, Target, median, ratio
from nodes_bed import START, ftrun, job, last_word, settle, torchrun
from nodes_lost import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common import Settings
    from nodes_bed import Launcher

_PATIENCE = 60.0


@dataclass(frozen=True)
class Way:
    """One way for a node to go, and to come again.

    Attributes:
        name: for people.
        go: to a job, and a node's number.
        come: the same.
    """

    name: str
    go: Callable[[Any, int], None]
    come: Callable[[Any, int], None]


def _off(running: Any, number: int) -> None:
    running.net.node(number).power_off()


def _on(running: Any, number: int) -> None:
    running.net.node(number).power_on()
    running.start(number)


def _exclude(running: Any, number: int) -> None:
    _nodes(running, "exclude", number)


def _admit(running: Any, number: int) -> None:
    running.launchers[number].wait(_PATIENCE)
    _nodes(running, "admit", number)
    running.start(number)


def _nodes(running: Any, verb: str, number: int) -> None:
    command = [str(VENV / "ftrun"), "nodes", verb, f"node{number}"]
    subprocess.run(command, cwd=running.folder, check=True, capture_output=True, text=True, timeout=_PATIENCE)


LOST = Way("lost", _off, _on)
EXCLUDED = Way("excluded", _exclude, _admit)


def replace(settings: Settings) -> Iterator[Figure]:
    """``detect.replace``: two seats, three nodes; the worse of the two ways counts."""
    count = settings.count(5, 1)
    made = {("ftrun", LOST): _series(settings, ftrun(), LOST, count)}
    made["ftrun again", LOST] = _series(settings, ftrun("ftrun again"), LOST, settings.count(3, 1))
    made["ftrun", EXCLUDED] = _series(settings, ftrun(), EXCLUDED, count)
    made["torchrun", LOST] = _series(settings, torchrun(), LOST, count)
    medians = {key: median(each.seconds) for key, each in made.items()}
    ours = [each for key, each in made.items() if key[0] == "ftrun"]
    known = [median(each.seconds) or 0.0 for each in ours if len(each.seconds) == count]
    yield Figure(
        "detect.replace",
        max(known) if len(known) == len(ours) else None,
        Target("<=", 5.0),
        control=ratio(medians["ftrun again", LOST], medians["ftrun", LOST]),
        n=count,
        reference={"torchrun (s)": medians["torchrun", LOST]},
        notes=[f"{name}, {way.name}: {each}" for (name, way), each in made.items()],
    )


def _series(settings: Settings, launcher: Launcher, way: Way, count: int) -> Series:
    """One job in which a node goes several times, and is the spare afterwards."""
    made = Series()
    script = "nodes_session.py" if launcher.session else "nodes_plain.py"
    with job(settings, launcher, 3, "2:2", script) as running:
        running.start(1, 2)
        world, spare = running.whole(1, 2, seconds=START), 3
        running.start(spare)
        while len(made.seconds) < count:
            if world is None or running.trains(world) is None:
                made.problem = f"no world of two; {last_word(running.told())}"
                break
            settle()
            victim = world.numbers[-1]
            stays = world.numbers[0]
            began = time.monotonic()
            try:
                way.go(running, victim)
                world = running.whole(stays, spare, after=began, seconds=_PATIENCE)
                trains = running.trains(world) if world is not None else None
                if trains is None:
                    made.problem = f"the spare did not train; {last_word(running.told())}"
                    break
                way.come(running, victim)
            except (subprocess.SubprocessError, TimeoutError) as error:
                made.problem = last_word(getattr(error, "stderr", None) or str(error))
                break
            made.seconds.append(trains - began)
            spare = victim
    say(f"{launcher.name}, {way.name}: {made}")
    return made
