"""The watchdog of a launcher's main thread. The file that hangs here is a pipe that nobody opens at its other end."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from test_rendezvous_leader import Desk, who

from ftrun.rendezvous.actions import Called
from ftrun.rendezvous.model import Phase, Terms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Other nodes go on without it at once, if it is told so.
PROGRAM = """
import sys
from pathlib import Path
from ftrun.data.filler.places import read_json
from ftrun.launch.main_thread import Watchdog

class Others:
    def stands_still(self, where): print("others:", where or "it goes on", flush=True)
    def left_behind(self): return "they went on" if len(sys.argv) > 2 else ""
    def end_workers(self): print("workers are ended", flush=True)
    def leave(self, where): return 75

with Watchdog(lambda text: print(text, flush=True), 0.3) as watchdog:
    watchdog.company = Others()
    read_json(Path(sys.argv[1]))
"""


class Program:
    """The program, which waits at a pipe."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.pipe = directory / "n0002.json"
        os.mkfifo(self.pipe)
        self.out = directory / "out.txt"
        with self.out.open("w") as out:
            command = [sys.executable, "-c", PROGRAM, str(self.pipe), *more]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def says(self, word: str) -> None:
        eventually(lambda: word in self.out.read_text(), 20, f"{word!r}")


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made: list[Program] = []
    yield made
    for each in made:
        each.process.kill()
        each.process.wait(10)


def test_where_it_stands_is_said_and_that_it_goes_on(tmp_path: Path, programs: list[Program]) -> None:
    programs.append(program := Program(tmp_path))
    program.says("the launcher has stood still for")
    program.says("others: open, called by read_json (ftrun/data/filler/places.py:")
    program.says(f") on {program.pipe}")
    with program.pipe.open("wb"):
        program.says("the launcher goes on, after it stood still for")
    assert program.process.wait(20) == 0
    text = program.out.read_text()
    assert "others: it goes on" in text
    assert "ended" not in text


def test_a_node_without_which_the_others_went_on_ends_its_workers_and_leaves(
    tmp_path: Path, programs: list[Program]
) -> None:
    programs.append(program := Program(tmp_path, "they go on"))
    assert program.process.wait(20) == 75
    lines = program.out.read_text().splitlines()
    words = ["others: open, called by", "stood still for", "workers are ended", "they went on: the workers here are"]
    found = [next(number for number, line in enumerate(lines) if word in line) for word in words]
    assert sorted(found) == found
    assert "it leaves with exit code 75" in lines[-1]


def test_nobody_is_left_out_while_most_stand_still() -> None:
    desk = Desk(Terms(2, 4, last_call=0.2)).started("n1", "n2", "n3")
    desk.set(Phase.RUNNING, "n2", stuck=True, where="open on /mnt/events")
    assert desk.look(seconds=1.5) == []
    desk.set(Phase.RUNNING, "n3", stuck=True)
    assert desk.look(seconds=60) == []  # the storage that all share
    desk.set(Phase.RUNNING, "n3", stuck=False)
    (called,) = [each for each in desk.look(seconds=0.2) if isinstance(each, Called)]
    assert called.reason == "the launcher on host-n2 stands still in open on /mnt/events"


def test_a_lost_node_does_not_count_among_those_that_stand_still() -> None:
    desk = Desk(Terms(1, 4, last_call=0.2)).started("n1", "n2", "n3")
    desk.look(who("n4"))
    desk.set(Phase.RUNNING, "n2", stuck=True)
    desk.silent.add("n2")
    (called,) = [each for each in desk.look(seconds=1.2) if isinstance(each, Called)]
    assert "host-n2 is lost" in called.reason
