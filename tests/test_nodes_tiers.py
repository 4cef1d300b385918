"""Several nodes restore one checkpoint, each from the nearest place that has its bytes, and say which that was."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import slow_mount
import torch
from conftest import eventually
from hung_mount import HungMount
from loading_kit import flip
from nodes_kit import run_fixture, snapshot  # noqa: F401 - a fixture

from ftrun import events
from ftrun.checkpoint.keeper.faults import VARIABLE
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.cli import status_memory
from ftrun.launch import copies
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

    from loading_kit import Written
    from nodes_kit import Launcher, Run

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
COPIES = ("--set", "checkpoint.peer_copies=1")


def named(epoch: int, step: int) -> AttemptName:
    return AttemptName(epoch, step, f"{step:08x}")


def pair(run: Run) -> tuple[Launcher, Launcher]:
    one, two = run.launcher(*COPIES), run.launcher(*COPIES)
    run.meet(one, two)
    return one, two


def copied(launcher: Launcher, made: Written) -> list[int]:
    """Ranks whose part of a snapshot a node has a copy of."""
    return [seal.rank for _, seal in launcher.tier.copies.sealed() if seal.attempt == str(made.name)]


def save(one: Launcher, two: Launcher, made: Written, slot: int = 0) -> None:
    """What workers and keepers do: each node has its own part, and a copy of the other one's."""
    for rank, each in enumerate((one, two)):
        each.keep()
        each.seal(made, [rank], slot)
        each.keeping._keeper.wake()
    eventually(lambda: copied(one, made) == [1], 60, "the copy on the first node")
    eventually(lambda: copied(two, made) == [0], 60, "the copy on the second node")


@dataclass
class Read:
    """What a rank got."""

    sizes: dict[str, int]
    notes: tuple[str, ...]


def restore(run: Run, launcher: Launcher, made: Written, rank: int = 0, local: Path | None = None) -> Read:
    """Do what a worker on that node does, and see that it has everything."""
    stored = open_stored(run.made[0].rounds._root, made.name, rank, 2, tier=launcher.tier, local=local)
    assert torch.equal(stored.value("tracked")["w"], torch.arange(100_000.0) + made.name.step)
    assert stored.value("extra") == {"rank": rank}
    found = Read({str(tier): size for tier, size in stored.read_bytes.items()}, stored.notes)
    stored.close()
    return found


def size_of(made: Written, *ranks: int) -> int:
    """Bytes of what some ranks stored."""
    return sum(len(content) for file, content in made.files.items() if int(file[1:6]) in ranks)


def test_each_piece_comes_from_the_nearest_place_that_has_it(run: Run) -> None:
    one, two = pair(run)
    made = snapshot(named(1, 10))
    save(one, two, made)
    begun = run.meet(one, two)
    assert [each.resume for each in begun] == [str(made.name)] * 2
    mine, other = size_of(made, 0), size_of(made, 1)
    assert restore(run, one, made) == Read({"memory": mine, "peer": other}, ())
    assert restore(run, two, made, rank=1) == Read({"memory": other, "peer": mine}, ())
    # A node that was switched off and on has nothing, and reads the same attempt.
    for tier in (two.tier, two.tier.copies):
        for rank in tier.ranks():
            tier.drop(rank)
    assert restore(run, two, made, rank=1) == Read({"root": mine + other}, ())
    assert restore(run, one, made) == Read({"memory": mine, "peer": other}, ())


def changed(path: Path) -> None:
    flip(path, 1000)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1000)


def test_what_is_damaged_near_is_read_farther_away_and_said(run: Run, tmp_path: Path) -> None:
    one, two = pair(run)
    made = snapshot(named(1, 10))
    save(one, two, made)
    run.meet(one, two)
    record, payload = (len(made.files[f"r00001.{kind}"]) for kind in ("json", "0.safetensors"))
    mine = size_of(made, 0)
    (own,) = [slot for slot, seal in one.tier.sealed() if seal.attempt == str(made.name)]
    (copy,) = [slot for slot, seal in one.tier.copies.sealed() if seal.attempt == str(made.name)]
    keep_in(tmp_path / "disk", made, 0)
    damages: dict[Callable[[Path], None], str] = {
        changed: "fails its checksum",
        cut: "ends before its",
        Path.unlink: "is missing",
    }
    for damage, what in damages.items():
        damage(copy.payload)
        found = restore(run, one, made)
        assert found.sizes == {"memory": mine, "peer": record, "root": payload}
        assert [what in note for note in found.notes] == [True]
        assert "r00001.0.safetensors in this node's copy of another one's memory" in found.notes[0]
    for damage, what in damages.items():
        damage(own.payload)
        found = restore(run, one, made, local=tmp_path / "disk")
        assert found.sizes["local"] == len(made.files["r00000.0.safetensors"]), "the disk is nearer than the root"
        assert found.sizes["root"] == payload
        assert sorted(what in note for note in found.notes) == sorted([True, what == "is missing"])
        assert sum(found.sizes.values()) == mine + record + payload


def keep_in(local: Path, made: Written, rank: int) -> None:
    """What a keeper puts into its node's local tier."""
    directory = local / str(made.name)
    directory.mkdir(parents=True)
    for file, content in made.files.items():
        if int(file[1:6]) == rank:
            (directory / file).write_bytes(content)


def test_a_lost_nodes_part_is_read_from_its_copy_and_later_copies_are_taken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_LEAVE_SECONDS", 0.3)
    one, two = pair(run)
    made = snapshot(named(1, 10))
    two.keep()
    one.keep("root.file:hang")
    for rank, each in enumerate((one, two)):
        each.seal(made, [rank])
        each.keeping._keeper.wake()
    eventually(lambda: copied(two, made) == [0], 60, "the copy")
    one.kill_keeper()
    one.tier.remove()
    # Its part is committed from the copy; then the keeper that brought it there hangs in what comes afterwards.
    monkeypatch.setenv(VARIABLE, "retention:hang")
    (begun,) = run.meet(two)
    monkeypatch.delenv(VARIABLE)
    assert begun.resume == str(made.name)
    near = {"peer": size_of(made, 0), "memory": size_of(made, 1)}
    assert restore(run, two, made).sizes == near
    adopted = two.keeping._copies
    assert adopted is not None

    def ended() -> bool:
        two.keep()
        return not adopted.pids()

    eventually(ended, 60, "the end of that keeper")
    assert restore(run, two, made).sizes == near, "until another copy comes"
    three = run.launcher(*COPIES)
    run.meet(two, three)
    save(two, three, snapshot(named(3, 20)), 1)  # its number is another one now
    eventually(lambda: two.tier.ranks() == [0], 60, "the memory of the rank that it had")
    assert two.keeping.finish(60)
    assert three.keeping.finish(60)
    assert not two.tier.copies.path.exists()


def test_a_copy_that_a_lost_node_never_takes_keeps_no_later_one_waiting(run: Run) -> None:
    one, two = pair(run)
    two.keep()
    two.seal(snapshot(named(1, 10)), [1])
    two.keeping._keeper.wake()
    gone = one.keeping._copies
    assert gone is not None
    gone._socket.settimeout(60)
    connection, _ = gone._socket.accept()
    with connection:  # and not a word
        three = run.launcher(*COPIES)
        run.meet(two, three)
        save(two, three, snapshot(named(2, 20)), 1)


def test_what_a_dead_launcher_had_adopted_keeps_no_new_copies_out(run: Run) -> None:
    one, two = pair(run)
    one.tier.copies.create()
    one.keeping._config.write(one.tier.copies)
    run.meet(one, two)
    save(one, two, snapshot(named(2, 10)))


def test_status_shows_what_is_in_each_nodes_memory(run: Run) -> None:
    one, two = pair(run)
    run_dir = one.rounds._plan.run_dir
    log = events.EventLog(run_dir.events(), attempt=1)
    log.write(events.Met(1, "", [HOST, HOST], 0, HOST, 1))
    log.write(events.AttemptStarted(1, 2, None, 0, {"0": 1}))
    made = snapshot(named(1, 10))
    save(one, two, made)
    shown = eventually(lambda: of_both(run_dir, made), 60, "both nodes' memories in the status")
    for node, own in enumerate(shown):
        assert (own["node"], own["host"], own["snapshot"]["step"]) == (node, HOST, 10)
        assert own["snapshot"]["size"] == size_of(made, node)
        (copy,) = own["copies"]
        assert (copy["of"], copy["name"], copy["size"]) == (HOST, str(made.name), size_of(made, 1 - node))
    for each in (one, two):
        assert each.keeping.finish(60)
    assert [each["snapshot"] for each in document(run_dir)["nodes"]] == [None, None], "the memory is given back"


def document(run_dir: RunDir) -> dict[str, Any]:
    return status_memory.memory(run_dir, list(events.read(run_dir.events())))


def of_both(run_dir: RunDir, made: Written) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = document(run_dir)["nodes"]
    there = [each["snapshot"] and each["copies"] and each["snapshot"]["name"] == str(made.name) for each in nodes]
    return nodes if all(there) else []


_TOLD = """
import os, sys
from pathlib import Path
from ftrun.checkpoint.keeper import inventory as module
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.inventory import Inventory
from ftrun.checkpoint.memory.tier import Tier

module._LAST_SECONDS = float(sys.argv[3])
config = KeeperConfig(sys.argv[1], "run", "root", {}, "", 0, 1, None, None, os.getpid(), shared=True)
inventory = Inventory(Tier(Path(sys.argv[2])), config)
inventory.look({}, 0)
print("looked", flush=True)
inventory.close(0)
os._exit(0)
"""


@pytest.mark.skipif(bool(slow_mount.why_not()), reason=slow_mount.why_not())
def test_a_run_directory_that_hangs_keeps_no_keeper_from_its_work(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "events").mkdir(parents=True)
    with HungMount(real, tmp_path / "mount") as mount:
        command = [sys.executable, "-c", _TOLD, str(mount.path), str(tmp_path / "tier")]
        mount.hang()
        assert subprocess.run([*command, "2"], capture_output=True, text=True, timeout=60).stdout == "looked\n"
        mount.go_on()
        subprocess.run([*command, "60"], check=True, timeout=90)  # it ends once that is written
        (told,) = [each.event for each in events.read(RunDir(real).events())]
        assert isinstance(told, events.InMemory)


def test_status_in_words(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.events().parent.mkdir()
    write(run_dir, 0, events.Met(1, "", ["n1", "n2", "n3"], 0, "n1", 1))
    write(run_dir, 0, events.AttemptStarted(4, 3, "older", 5, {"0": 1}))
    write(run_dir, 0, events.Restored(5, "older", 0.25, {"memory": 1_200_000, "root": 300}))
    write(run_dir, 1, events.Restored(5, "older", 1.5, {"root": 1_200_300}))
    older, newer = str(named(4, 10)), str(named(4, 1200))
    write(run_dir, 1, events.InMemory("n2", older, 7, 80.0))  # it was n3's number once
    copy = {"checkpoint": newer, "node": 1, "size": 7, "sealed_at": 97.5}
    write(run_dir, 0, events.InMemory("n1", newer, 7, 98.0, [copy, copy | {"checkpoint": older}, {"odd": 1}]))
    found = status_memory.memory(run_dir, list(events.read(run_dir.events())), now=100.0)
    assert status_memory.memory_text(found, running=True) == [
        "  memory     n1: step 1,200, 2 s old   a copy of n2's step 1,200, 2.5 s old",
        "             n2: step 10, 20 s old",
        "             n3: it hasn't said yet",
        "  restored   step 5 in 0.25 s",
        "             n1: 1.2 MB from memory, 300 B from the checkpoint root",
        "             n2: 1.2 MB from the checkpoint root",
    ]
    assert len(status_memory.memory_text(found, running=False)) == 3


def test_status_says_nothing_of_nodes_from_which_nothing_can_come(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create({"run_id": "run", "shared_run_dir": False})
    write(run_dir, 1, events.Met(1, "", ["n1", "n2"], 1, "n2", 1))
    found = status_memory.memory(run_dir, list(events.read(run_dir.events(1))))
    assert status_memory.memory_text(found, running=True) == [], "no script that takes checkpoints"
    write(run_dir, 1, events.InMemory("n2", str(named(4, 10)), 7, 80.0))
    found = status_memory.memory(run_dir, list(events.read(run_dir.events(1))), now=100.0)
    assert status_memory.memory_text(found, running=True) == ["  memory     n2: step 10, 20 s old"]


def test_status_takes_what_a_node_said_under_another_number_but_not_what_its_neighbour_says(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.events().parent.mkdir()
    name = str(named(4, 10))
    write(run_dir, 0, events.Met(1, "", ["n1", "n2", "n2#2"], 0, "n1", 1))
    write(run_dir, 3, events.InMemory("n1", name, 7, 80.0))
    write(run_dir, 2, events.InMemory("n2", name, 7, 90.0))
    found = status_memory.memory(run_dir, list(events.read(run_dir.events())), now=100.0)
    assert status_memory.memory_text(found, running=True) == [
        "  memory     n1: step 10, 20 s old",
        "             n2: it hasn't said yet",
        "             n2#2: step 10, 10 s old",
    ]


def write(run_dir: RunDir, node: int, event: events.Event) -> None:
    events.EventLog(run_dir.events(node), attempt=2).write(event)
