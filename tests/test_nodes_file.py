"""``nodes.json`` on real files: many writers, writers that die, damage, and a launcher that has it in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from filelock import FileLock

from ftrun.config.health import Nodes
from ftrun.health import policy
from ftrun.health.history import Admitted, Book, By, Excluded, Marked
from ftrun.health.marks import Mark, Sign
from ftrun.health.memory import About, NodeMemory
from ftrun.health.nodes_file import Busy, NodesFile, NodesFileError
from ftrun.launch.remembering import rules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RULES = rules(Nodes())
_WRITER = """\
import sys
from pathlib import Path
from ftrun.health.history import Admitted, By
from ftrun.health.nodes_file import NodesFile
file = NodesFile(Path(sys.argv[1]), print)
name = sys.argv[2]
number = 0
while number < int(sys.argv[3]):
    file.change(lambda book: book.add(name, Admitted(0.0, By.USER, str(number))), 30.0)
    number += 1
    print(number, flush=True)
"""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def file(tmp_path: Path, said: list[str]) -> NodesFile:
    return NodesFile(tmp_path / "nodes.json", said.append)


def writer(file: NodesFile, name: str, times: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, file.path, name, str(times)], stdout=subprocess.PIPE, text=True
    )


def exclude(file: NodesFile, name: str, seconds: float | None = None) -> None:
    file.change(lambda book: book.add(name, Excluded(time.time(), By.USER, "by hand", seconds)))


def admit(file: NodesFile, name: str) -> None:
    file.change(lambda book: book.add(name, Admitted(time.time(), By.USER, "")))


@pytest.mark.slow
def test_nothing_is_lost_between_writers_and_a_killed_one_holds_nobody_up(file: NodesFile) -> None:
    processes = {name: writer(file, name, 15) for name in ("a", "b")}
    victim = writer(file, "victim", 10**9)
    try:
        assert victim.stdout is not None
        reached = 0
        while reached < 5:
            reached = int(victim.stdout.readline())
        victim.send_signal(signal.SIGKILL)
        for process in processes.values():
            process.communicate(timeout=60)
            assert process.returncode == 0
    finally:
        for process in (victim, *processes.values()):
            process.kill()
            process.communicate(timeout=10)
    hosts = file.read().hosts
    for name in processes:
        assert [each.reason for each in hosts[name].entries] == [str(number) for number in range(15)]
    assert len(hosts["victim"].entries) >= reached
    exclude(file, "c")
    assert "c" in policy.excluded(file.read(), RULES, time.time())


DAMAGE = {
    "empty": b"",
    "torn": b'{"schema_version": 1, "hosts": {"a"',
    "zeros": bytes(4096),
    "a list": b"[1, 2]",
    "no hosts": b'{"schema_version": 1}',
    "nested": b"[" * 100_000,
    "another shape": b'{"schema_version": 1, "hosts": {"a": {"first_seen": 1, "last_seen": 1, "history": [3]}}}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_moved_aside_by_the_next_writer(name: str, file: NodesFile, said: list[str]) -> None:
    file.path.write_bytes(DAMAGE[name])
    with pytest.raises(NodesFileError, match=r"is damaged .*whoever writes it next moves it aside"):
        file.read()
    exclude(file, "a")
    assert set(file.read().hosts) == {"a"}
    (aside,) = file.path.parent.glob("nodes.json.damaged-*")
    assert aside.read_bytes() == DAMAGE[name]
    assert len(said) == 1
    assert aside.name in said[0]


def test_a_file_of_a_newer_ftrun_is_left_alone(file: NodesFile) -> None:
    text = json.dumps({"schema_version": 99, "hosts": "elsewhere"})
    file.path.write_text(text)
    for act in (file.read, lambda: exclude(file, "a")):
        with pytest.raises(NodesFileError, match="newer ftrun"):
            act()
    assert file.path.read_text() == text


def test_a_writer_that_hangs_is_named(file: NodesFile) -> None:
    with FileLock(file.path.with_name(".nodes.json.lock")), pytest.raises(Busy, match="locked by another process"):
        file.change(lambda book: book.add("a", Admitted(0.0, By.USER, "")), 0.1)
    assert not file.path.exists()


def test_what_changes_nothing_writes_nothing(file: NodesFile) -> None:
    assert file.change(lambda book: book) == Book()
    assert os.listdir(file.path.parent) == []


# A launcher that has it in use


class Launcher:
    """A memory, and what it has said."""

    def __init__(self, file: NodesFile, host: str = "a", min_nodes: int = 2) -> None:
        self.file = file
        self.told: list[dict[str, str]] = []
        self.reports: list[str] = []
        self.later = 0.0
        about = About(host, RULES, min_nodes, look_every=0.1)
        self.memory = NodeMemory(file, about, self.reports.append, clock=lambda: time.time() + self.later)
        self.memory.start(self.told.append)

    def out(self) -> set[str]:
        return set(self.told[-1]) if self.told else set()


@pytest.fixture
def launchers(file: NodesFile) -> Iterator[dict[str, Launcher]]:
    made = {host: Launcher(file, host) for host in ("a", "b")}
    yield made
    for each in made.values():
        each.memory.close()
    # A thread that gets no processor ends later than it is waited for.
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "ftrun-nodes"], what="their end")


def test_a_user_excludes_and_admits_beside_a_run(launchers: dict[str, Launcher], file: NodesFile) -> None:
    eventually(lambda: all(each.told == [{}] for each in launchers.values()), 60, "the first word")
    exclude(file, "c")
    eventually(lambda: all(each.out() == {"c"} for each in launchers.values()), 60, "the exclusion")
    assert "c is excluded by hand: by hand; `ftrun nodes admit c` lets it in" in launchers["a"].told[-1].values()
    admit(file, "c")
    eventually(lambda: all(not each.out() for each in launchers.values()), 60, "the admission")


def test_an_exclusion_ends_by_time(launchers: dict[str, Launcher], file: NodesFile) -> None:
    exclude(file, "c", 3600.0)
    assert "c" in launchers["a"].memory.excluded(within=60.0)
    launchers["a"].later = 3600.0
    eventually(lambda: not launchers["a"].memory.excluded(within=60.0), 60, "its end")
    eventually(lambda: not launchers["a"].out(), 60, "the word of it")


def test_what_one_launcher_notes_the_others_learn(launchers: dict[str, Launcher]) -> None:
    a, b = launchers["a"], launchers["b"]
    for each in (a, b):
        each.memory.seen(["a", "b", "c", "d"])
        each.memory.excluded(within=60.0)
    b.memory.mark("b", Mark(Sign.DEVICE, "Xid 79", 1, 3), within=60.0)
    assert "Xid 79" in b.memory.excluded()["b"]  # known at once where it happened
    eventually(lambda: a.out() == {"b"}, 60, "the exclusion")
    eventually(lambda: a.reports and b.reports, 60, "words")
    assert a.reports == b.reports
    assert a.reports[0].startswith("b is excluded for 4h: Xid 79")
    a.memory.mark("c", Mark(Sign.DEVICE, "Xid 48", 2), within=60.0)
    assert set(a.memory.excluded()) == {"b"}  # a second of four would be too many
    eventually(lambda: len(a.reports) == 2, 60, "words")
    assert "c stays: Xid 48; but 1 of 4 nodes are excluded" in a.reports[1]
    assert len(b.reports) == 1  # it is about neither of them, and a is the first


def test_the_same_thing_noted_by_all_counts_once(launchers: dict[str, Launcher], file: NodesFile) -> None:
    for each in launchers.values():
        each.memory.seen(["a", "b", "c", "d"])
        each.memory.mark("d", Mark(Sign.LOST, "gone", 4))
    for each in launchers.values():
        each.memory.excluded(within=60.0)
    assert [type(each) for each in file.read().hosts["d"].entries] == [Marked]


def test_what_cannot_be_written_now_is_written_later(launchers: dict[str, Launcher], file: NodesFile) -> None:
    a = launchers["a"]
    a.memory.excluded(within=60.0)
    lock = FileLock(file.path.with_name(".nodes.json.lock"))
    with lock:
        a.memory.mark("d", Mark(Sign.LOST, "gone", 4), within=0.3)
        assert "d" not in file.read().hosts  # and the caller goes on all the same
    eventually(lambda: "d" in file.read().hosts, 60, "the mark")


def test_a_directory_that_is_gone_is_told_once_and_keeps_nobody(tmp_path: Path) -> None:
    away = Launcher(NodesFile(tmp_path / "away" / "nodes.json", print))
    away.memory.mark("a", Mark(Sign.LOST, "gone", 1), within=60.0)
    away.memory.mark("a", Mark(Sign.LOST, "gone", 2), within=60.0)
    assert away.memory.excluded(within=60.0) == {}
    assert len(away.reports) == 1
    assert "the memory of nodes can't be used" in away.reports[0]
    (tmp_path / "away").mkdir()
    eventually(lambda: "a" in away.file.read().hosts, 60, "the marks")
    marks = [each for each in away.file.read().hosts["a"].entries if isinstance(each, Marked)]
    assert [each.attempt for each in marks] == [1, 2]
    away.memory.close()
    assert away.memory.excluded(within=60.0) == {}  # and no thread any more to ask
