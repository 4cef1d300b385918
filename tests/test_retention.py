"""Which checkpoints stay, and which leftovers go."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from storage_kit import write_attempt

from ftrun.checkpoint import epochs, reader, retention
from ftrun.checkpoint.layout import LATEST, MANIFEST, AttemptName, Root, epoch_key
from ftrun.checkpoint.leftovers import Leftovers
from ftrun.checkpoint.manifest import Manifest
from ftrun.checkpoint.reader import AttemptInfo
from ftrun.checkpoint.retention import KeepPolicy
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.open(tmp_path / "root with space % and ü")


def path_of(root: Root, name: AttemptName, file: str = "") -> Path:
    return root.path / "ckpt" / str(name) / file


# --- the choice, purely -------------------------------------------------------------------------------------


def info(epoch: int, step: int, parent: tuple[int, int] | None = None, **fields: Any) -> AttemptInfo:
    name = AttemptName(epoch, step, "00000000")
    up = str(AttemptName(*parent, "00000000")) if parent else None
    manifest = Manifest(1, "0", "2", "3", "run", epoch, str(name), up, step, None, 1, 1, "", None, {}, "now")
    return replace(AttemptInfo(name, "committed", "", manifest, 0), **fields)


def chosen(infos: list[AttemptInfo], policy: KeepPolicy, **options: Any) -> list[tuple[int, int]]:
    options = {"run_id": "run", "since": 0, **options}
    ordered = sorted(infos, key=lambda each: each.name, reverse=True)
    return [(each.name.epoch, each.name.step) for each in retention.doomed(ordered, policy, **options)]


@pytest.mark.parametrize(
    ("steps", "policy", "gone"),
    [
        ([1, 2, 3], KeepPolicy(3), []),
        ([1, 2, 3, 4], KeepPolicy(2), [1, 2]),
        ([1, 2, 3, 4], KeepPolicy(1), [1, 2]),
        ([], KeepPolicy(2), []),
        ([100, 200, 300, 400, 500, 600], KeepPolicy(2, 200), [300]),
        # The first of each span, wherever in it, and never another one later.
        ([90, 190, 210, 290, 310, 390, 410, 420], KeepPolicy(2, 100), [290, 390]),
        ([90, 190, 210, 290, 310, 390, 410, 420, 430], KeepPolicy(2, 100), [290, 390]),
        ([90, 190, 210, 290, 310, 390, 410, 420, 430, 440], KeepPolicy(2, 100), [290, 390, 420]),
        ([1, 2, 3, 4, 5], KeepPolicy(2, 1), []),
        ([1, 2, 3, 4, 5], KeepPolicy(2, 1000), [2, 3]),
    ],
)
def test_the_last_and_one_in_a_while_are_kept(steps: list[int], policy: KeepPolicy, gone: list[int]) -> None:
    assert chosen([info(5, step) for step in steps], policy) == [(5, step) for step in gone]


def test_what_is_kept_for_good_stays_kept() -> None:
    """Deleting again and again, with every commit, leaves the same milestones as deciding once."""
    kept: list[AttemptInfo] = []
    for step in range(7, 2000, 7):
        kept.append(info(1, step))
        gone = chosen(kept, KeepPolicy(3, 100))
        kept = [each for each in kept if (1, each.name.step) not in gone]
    milestones = [min(step for step in range(7, 2000, 7) if step >= first) for first in range(0, 2000, 100)]
    steps = [each.name.step for each in kept]
    assert steps == sorted({*milestones, *range(2000 - 2000 % 7 - 14, 2000, 7)})


def test_the_newest_is_by_epoch_and_step_after_a_rollback() -> None:
    infos = [info(6, 1300), info(6, 1400), info(6, 1500), info(8, 900, (6, 800)), info(8, 1000, (6, 800))]
    assert chosen(infos, KeepPolicy(2)) == [(6, 1300), (6, 1400), (6, 1500)]


def test_milestones_lie_on_the_way_to_the_newest() -> None:
    # Epoch 6 went to 1500; epoch 8 began again at 1000, and epoch 9 where 8 stood at 1200.
    infos = [
        *(info(6, step) for step in (500, 1000, 1050, 1450, 1500)),
        *(info(8, step, (6, 1000)) for step in (1100, 1200, 1300)),
        *(info(9, step, (8, 1200)) for step in (1400, 1500, 1600)),
    ]
    gone = chosen(infos, KeepPolicy(2, 500))
    assert [each for each in gone if each in ((6, 500), (6, 1000))] == []
    assert (6, 1500) in gone, "another life of the run"
    assert (9, 1500) not in gone


def test_what_is_not_ours_or_not_whole_is_not_counted_and_stays() -> None:
    foreign = info(9, 90)
    assert foreign.manifest is not None
    infos = [
        *(info(5, step) for step in (1, 2, 3, 4)),
        replace(foreign, manifest=replace(foreign.manifest, run_id="other")),
        info(9, 91, status="invalid", reason="x"),
        info(9, 92, status="uncommitted", manifest=None),
        info(9, 93, status="bad", manifest=None),
        info(2, 94),
    ]
    assert chosen(infos, KeepPolicy(2), since=3) == [(5, 1), (5, 2)]


def test_pins_and_parents_stay_and_count() -> None:
    infos = [info(5, step) for step in (1, 2, 3, 4)]
    assert chosen(infos, KeepPolicy(2), spared={str(infos[0].name)}) == [(5, 2)]
    assert chosen(infos, KeepPolicy(2), spared={str(infos[3].name)}) == [(5, 1), (5, 2)]


@pytest.mark.parametrize("policy", [{"last": 0}, {"last": -1}, {"last": 2, "every": 0}])
def test_policies_that_keep_nothing(policy: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        KeepPolicy(**policy)


# --- deleting -----------------------------------------------------------------------------------------------


def names_left(root: Root) -> list[int]:
    return [each.name.step for each in reader.attempts(root)]


def test_pinned_ones_and_strange_things_stay(root: Root) -> None:
    names = [write_attempt(root, step) for step in range(1, 8)]
    root.pin(names[1])
    path_of(root, names[2], "note.txt").write_text("mine")
    (root.path / "ckpt" / "e00000001-s0000000001-0000000X").mkdir()
    path_of(root, names[3], MANIFEST).write_bytes(b"")
    gone = retention.apply(root, KeepPolicy(2), run_id="run", since=0, parent=str(names[0]))
    assert gone == [names[2], names[4]]
    assert names_left(root) == [7, 6, 4, 3, 2, 1]
    assert os.listdir(path_of(root, names[2])) == ["note.txt"]
    assert reader.inspect(root, names[2]).status == "uncommitted"
    root.unpin(names[1])
    assert retention.apply(root, KeepPolicy(2), run_id="run", since=0, parent=None) == [names[0], names[1]]


def test_the_manifest_goes_first_whatever_fails_next(root: Root) -> None:
    names = [write_attempt(root, step) for step in (1, 2, 3)]

    class Dying(Root):
        def delete_files(self, name: AttemptName, files: Any) -> None:
            assert not path_of(root, name, MANIFEST).exists()
            raise OSError("the machine is gone")

    with pytest.raises(OSError, match="machine is gone"):
        retention.apply(Dying(root.path), KeepPolicy(2), run_id="run", since=0, parent=None)
    assert [(each.name.step, each.status) for each in reader.attempts(root)] == [
        (3, "committed"),
        (2, "committed"),
        (1, "uncommitted"),
    ]
    assert reader.latest(root, "run").commit is not None
    assert names[0] == AttemptName(1, 1, "00000000")


# --- leftovers ----------------------------------------------------------------------------------------------


class Scene:
    """A root with the leftovers of two dead epochs, and a clock that stands until it is told."""

    def __init__(self, root: Root) -> None:
        self.root, self.now = root, 0.0
        for _ in range(3):
            epochs.claim(root, "run", fresh=False, parent=None)
        self.commit = write_attempt(root, 10, epoch=1)
        self.old = write_attempt(root, 20, epoch=1, commit=False, done=False)
        self.dead = write_attempt(root, 30, epoch=2, commit=False)
        self.live = write_attempt(root, 40, epoch=3, commit=False)

    def sweeper(self, **options: Any) -> Leftovers:
        options = {"run_id": "run", "epoch": 3, "wait": 100.0, "clock": lambda: self.now, **options}
        return Leftovers(self.root, **options)


def test_leftovers_go_when_they_were_seen_twice_long_enough_apart(root: Root) -> None:
    scene = Scene(root)
    for name in (scene.old, scene.dead):  # whatever the files' own times say
        os.utime(path_of(root, name), (0, 0))
        for file in root.files(name):
            os.utime(path_of(root, name, file), (0, 0))
    sweeper = scene.sweeper()
    for scene.now in (0.0, 50.0, 99.9):
        assert sweeper.sweep() == []
    scene.now = 100.0
    assert sweeper.sweep() == [scene.old, scene.dead]
    assert root.attempts() == [scene.live, scene.commit]
    assert sweeper.sweep() == []


def test_one_that_still_changes_is_seen_for_the_first_time_again(root: Root) -> None:
    scene = Scene(root)
    sweeper = scene.sweeper()
    sweeper.sweep()
    path_of(root, scene.old, "r00001.0.safetensors").write_bytes(b"x")
    scene.now = 100.0
    assert sweeper.sweep() == [scene.dead]
    scene.now = 199.0
    assert sweeper.sweep() == []
    scene.now = 200.0
    assert sweeper.sweep() == [scene.old]


def test_one_that_is_committed_meanwhile_is_none(root: Root) -> None:
    scene = Scene(root)
    sweeper = scene.sweeper()
    sweeper.sweep()
    write_attempt(root, 99, epoch=1)
    path_of(root, AttemptName(1, 99, "00000000"), MANIFEST).rename(path_of(root, scene.dead, MANIFEST))
    scene.now = 100.0
    assert sweeper.sweep() == [scene.old]
    assert len(root.files(scene.dead)) == 7


@pytest.mark.parametrize("why", ["another run", "no record", "pinned", "parent", "latest", "newer epoch"])
def test_what_is_no_leftover_of_ours_stays(root: Root, why: str) -> None:
    scene = Scene(root)
    options: dict[str, Any] = {}
    if why == "another run":
        options["run_id"] = "other"
    if why == "no record":
        root.delete(epoch_key(2))
    if why == "pinned":
        root.pin(scene.dead)
    if why == "parent":
        options["parent"] = str(scene.dead)
    if why == "latest":
        root.write(LATEST, f"{scene.dead}\n".encode())
    if why == "newer epoch":
        epochs.claim(root, "run", fresh=False, parent=None)
    sweeper = scene.sweeper(**options)
    sweeper.sweep()
    scene.now = 1000.0
    assert sweeper.sweep() == ([] if why in ("another run", "newer epoch") else [scene.old])
    assert len(root.files(scene.dead)) == 6


def test_what_is_not_understood_stays_in_a_leftover(root: Root) -> None:
    scene = Scene(root)
    path_of(root, scene.old, "notes.txt").write_text("mine")
    path_of(root, scene.old, ".r00000.json.0123abcd.tmp").write_text("torn")
    (root.path / "ckpt" / "step-7").mkdir()
    sweeper = scene.sweeper()
    sweeper.sweep()
    scene.now = 100.0
    assert sweeper.sweep() == [scene.dead]
    assert list(root.files(scene.old)) == ["notes.txt"]
    assert (root.path / "ckpt" / "step-7").is_dir()
