"""The watchdog of a launcher's main thread. The file that hangs here is a pipe that nobody opens at its other end."""

from __future__ import annotations

import os
import re
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

# Other nodes go on without it after so many seconds, and don't answer when it says goodbye.
PROGRAM = """
import sys, threading, time
from pathlib import Path
from ftrun.data.filler.places import read_json
from ftrun.launch import main_thread
from ftrun.launch.main_thread import Watchdog

started = time.monotonic()
said = threading.Event()

class Others:
    def stands_still(self, where): print("others:", where or "it goes on", flush=True)
    def left_behind(self): return "they went on" if time.monotonic() - started > float(sys.argv[2]) else ""
    def end_workers(self): print("workers are ended", time.monotonic(), flush=True)
    def code(self): return 75
    def leave(self, where): print("goodbye", time.monotonic(), flush=True); said.set(); time.sleep(100)

def reported(code):  # asked for when the time for a goodbye is over, which may be before the first word of it
    said.wait(60)
    return code

def watch():  # from when it hangs: before that it may get no processor, and stand still anywhere
    while not main_thread.place().startswith("open, called by read_json"):
        time.sleep(0.01)
    watchdog.limit = 0.3

main_thread._SAY_SECONDS, main_thread._LEAVE_SECONDS = 60.0, 0.5
main_thread._LONGEST_LOOK = 0.05
with Watchdog(lambda text: print(text, flush=True), 0.0, reported) as watchdog:
    watchdog.company = Others()
    threading.Thread(target=watch, daemon=True).start()
    read_json(Path(sys.argv[1]))
"""


class Program:
    """The program, which waits at a pipe."""

    def __init__(self, directory: Path, left_after: float = 1000.0) -> None:
        self.pipe = directory / "n0002.json"
        os.mkfifo(self.pipe)
        self.out = directory / "out.txt"
        with self.out.open("w") as out:
            command = [sys.executable, "-c", PROGRAM, str(self.pipe), str(left_after)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def says(self, word: str) -> None:
        eventually(lambda: word in self.out.read_text(), what=f"{word!r}")

    def said(self, word: str) -> float:
        """When it did, by its own word: this process may have had no processor then."""
        whole = re.compile(rf"^{word} (\S+)\n", re.MULTILINE)
        return float(eventually(lambda: whole.search(self.out.read_text()), what=f"{word!r}")[1])


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made: list[Program] = []
    yield made
    for each in made:
        each.process.kill()
        each.process.wait(60)


def test_where_it_stands_is_said_and_that_it_goes_on(tmp_path: Path, programs: list[Program]) -> None:
    programs.append(program := Program(tmp_path))
    program.says("the launcher has stood still for")
    program.says("others: open, called by read_json (ftrun/data/filler/places.py:")
    program.says(f") on {program.pipe}")
    with program.pipe.open("wb"):
        program.says("the launcher goes on, after it stood still for")
    assert program.process.wait(60) == 0
    text = program.out.read_text()
    assert "others: it goes on" in text
    assert "ended" not in text


@pytest.mark.slow
def test_a_node_without_which_the_others_went_on_ends_its_workers_and_leaves(
    tmp_path: Path, programs: list[Program]
) -> None:
    programs.append(program := Program(tmp_path, 0.0))
    assert program.process.wait(60) == 75
    lines = program.out.read_text().splitlines()
    words = ["others: open, called by", "stood still for", "workers are ended", "they went on:", "goodbye"]
    found = [next(number for number, line in enumerate(lines) if word in line) for word in words]
    assert sorted(found) == found
    assert "it leaves with exit code 75" in lines[-1]


@pytest.mark.slow
def test_it_has_its_time_from_when_the_others_went_on(tmp_path: Path, programs: list[Program]) -> None:
    programs.append(program := Program(tmp_path, 2.0))  # most of them have stood still for long by then
    ended = program.said("workers are ended")
    assert program.said("goodbye") - ended >= 0.8  # four times the limit, but for how often it is looked here


def test_nobody_is_left_out_while_most_stand_still() -> None:
    desk = Desk(Terms(2, 4, last_call=0.2)).started("n1", "n2", "n3")
    desk.set(Phase.RUNNING, "n2", stuck=True, where="open on /mnt/events")
    assert desk.look(seconds=1.5) == []
    desk.set(Phase.RUNNING, "n3", stuck=True)
    assert desk.look(seconds=60) == []  # the storage that all share
    desk.set(Phase.RUNNING, "n3", stuck=False)
    (called,) = [each for each in desk.look(seconds=0.2) if isinstance(each, Called)]
    assert called.reason == "the launcher on host-n2 stands still in open on /mnt/events"


def test_nobody_joins_while_a_node_stands_still() -> None:
    desk = Desk(Terms(1, 4, last_call=0.2)).started("n1", "n2")
    desk.set(Phase.RUNNING, "n1", "n2", stuck=True)
    assert desk.look(who("n3"), seconds=30) == []  # their workers, which are well, would be killed for it
    desk.set(Phase.RUNNING, "n1", "n2", stuck=False)
    assert desk.look() == [Called(1, "host-n3 joins", growth=True)]


def test_a_lost_node_does_not_count_among_those_that_stand_still() -> None:
    desk = Desk(Terms(1, 4, last_call=0.2)).started("n1", "n2", "n3")
    desk.look(who("n4"))
    desk.set(Phase.RUNNING, "n2", stuck=True)
    desk.silent.add("n2")
    (called,) = [each for each in desk.look(seconds=1.2) if isinstance(each, Called)]
    assert "host-n2 is lost" in called.reason


def test_a_watchdog_that_sees_nothing_says_nothing() -> None:
    program = """
import resource, time
from ftrun.launch.main_thread import Watchdog

with Watchdog(print, 0.0) as watchdog:  # no limit yet: a first sleep may take longer than it should
    time.sleep(0.05)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # it can open nothing any more
    watchdog.limit = 0.2
    time.sleep(1.8)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == ""
