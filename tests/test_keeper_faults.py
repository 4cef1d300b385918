"""A keeper that dies, fails or hangs at each step of a save: nothing sealed is lost, nothing half is trusted."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from keeper_kit import Node, name_of, nodes_fixture  # noqa: F401

from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.faults import POINTS
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.outcomes import Outcomes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Node]

A, B = name_of(1, 10), name_of(1, 20)
SAVING = [point for point in POINTS if point != "failed"]
NTH = ["root.file@2", "root.middle@2", "root.filed@2", "root.filed@3", "root.filed@4", "local.file@3", "local.filed@4"]


def node_for(nodes: Make, point: str, tmp_path: Path) -> Node:
    """Two ranks, so four files; with a local tier where the point is one of its."""
    node = nodes(world=2, local=str(tmp_path / "nvme") if point.startswith("local.") else "")
    node.begin()
    return node


@pytest.mark.slow
@pytest.mark.parametrize("point", [*SAVING, *NTH])
def test_killed_at_any_step(nodes: Make, point: str, tmp_path: Path) -> None:
    node = node_for(nodes, point, tmp_path)
    node.seal(A)
    keeper = node.keeper(f"{point}:kill")
    assert keeper._process is not None
    assert keeper._process.wait(30) == -signal.SIGKILL, node.log()
    info = [each for each in reader.attempts(node.root) if each.name == AttemptName.of(A)]
    if info and info[0].status == "committed":
        node.assert_whole(A)
    else:
        assert not info or info[0].status == "uncommitted"
        assert Outcomes(node.tier).get(A) is None
    assert node.outcome(A).committed
    # The slots of A may be filled again, and are: what is left of A's commit must not need them.
    node.seal(B)
    assert node.outcome(B).committed
    for attempt in (A, B):
        node.assert_whole(attempt)
    assert keeper.finish(60)
    assert list(node.committed()) == [B, A]
    assert {each.checkpoint for each in node.events()} == {A, B}  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["pending", "freed", "manifest", "local.recorded"])
def test_killed_and_the_slots_are_filled_before_anybody_looks(nodes: Make, point: str, tmp_path: Path) -> None:
    node = node_for(nodes, point, tmp_path)
    node.seal(A)
    keeper = node.keeper(f"{point}:kill")
    assert keeper._process is not None
    assert keeper._process.wait(30) == -signal.SIGKILL, node.log()
    node.seal(B)
    assert node.outcome(B).committed
    assert node.outcome(A).committed
    node.assert_whole(A)
    node.assert_whole(B)


@pytest.mark.slow
@pytest.mark.parametrize("point", SAVING)
def test_an_error_at_any_step_is_met_with_another_try(nodes: Make, point: str, tmp_path: Path) -> None:
    node = node_for(nodes, point, tmp_path)
    node.seal(A)
    keeper = node.keeper(f"{point}:raise")
    assert node.outcome(A).committed, node.log()
    node.assert_whole(A)
    assert keeper.finish(60)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["root.middle", "root.filed", "done", "manifest", "local.middle"])
def test_a_disk_that_fills_up_at_any_step(nodes: Make, point: str, tmp_path: Path) -> None:
    if point == "local.middle":
        point = "local.filed"
    node = node_for(nodes, point, tmp_path)
    node.seal(A)
    node.keeper(f"{point}:enospc*1000", timeout=0.5)
    outcome = node.outcome(A)
    if point.startswith("local"):
        assert outcome.committed
        return
    assert "No space left on device" in outcome.reason
    assert node.committed() == []
    if point != "manifest":  # nobody has vouched for its files: they make room
        eventually(lambda: not node.root.files(AttemptName.of(A)), what="room")
    node.close_keepers()  # first: this one would give B up as well, after half a second
    node.seal(B)
    node.keeper()
    assert node.outcome(B).committed


def test_a_keeper_that_hangs_in_storage_keeps_beating_and_nothing_is_lost(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A)
    keeper = node.keeper("root.middle:hang")
    beat = node.tier.path / "keeper.beat"
    first = eventually(lambda: beat.exists() and beat.read_text())
    eventually(lambda: beat.read_text() != first, what="another beat")
    assert Outcomes(node.tier).get(A) is None
    assert not keeper.finish(0.2)


def test_a_word_that_it_gave_up_survives_a_kill(nodes: Make) -> None:
    node = nodes(0, world=2, ranks=(0,))
    node.begin()
    node.seal(A, run_id="run")
    node.begin(fresh=True)
    keeper = node.keeper("failed:kill")
    assert keeper._process is not None
    assert keeper._process.wait(30) == -signal.SIGKILL
    assert node.outcome(A).reason == "the run was started over"
