"""What nodes say of the snapshots in their memories, what comes of it together, and which memory is whose. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from keeper_kit import RUN, name_of, nodes_fixture  # noqa: F401 - a fixture

from ftrun.checkpoint.holdings import Holding, Parts, of_node, together
from ftrun.checkpoint.keeper import seats
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

A, B, C = (AttemptName.of(name_of(epoch, step)) for epoch, step in ((1, 10), (1, 20), (2, 15)))


def held(name: AttemptName, *ranks: int, world: int = 4, copied: bool = False, node: int = 0) -> Holding:
    return Holding(name, world, ranks, copied, node)


def test_a_node_tells_of_what_is_whole_and_not_given_up(nodes: Any) -> None:
    node = nodes(1, world=4, ranks=(2, 3))
    assert of_node(node.tier, None, RUN) == []
    node.seal(str(A))
    node.seal(str(B), 1, ranks=(3,))
    assert of_node(node.tier, None, RUN) == [held(B, 3), held(A, 2, 3)]
    assert of_node(node.tier, None, "another") == []
    node.tier.slots(2)[0].payload.write_bytes(b"torn")
    assert of_node(node.tier, None, RUN) == [held(B, 3), held(A, 3)]
    Outcomes(node.tier).put(Outcome(str(B), B.step, committed=False, reason="no room", seconds=0.0, size=0))
    assert of_node(node.tier, None, RUN) == [held(A, 3)]


def test_words_are_short_and_come_back() -> None:
    large = held(A, *range(8_000), world=16_384, copied=True)
    text = json.dumps(large.to_json())
    assert len(text) < 80
    assert Holding.from_json(json.loads(text)) == large


@pytest.mark.parametrize(
    "document",
    [None, [], "e1", [str(A), 4, "0"], ["e1", 4, "0", False], [str(A), 1, "0-1", False], [str(A), "4", "0", False]],
)
def test_what_is_no_word_of_a_node_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"says nothing|outside its world|e1|unpack"):
        Holding.from_json(document)


def test_parts_make_up_attempts_of_this_lineage_that_are_newer_than_every_commit() -> None:
    found = [held(A, 0, 1), held(B, 0, 1), held(B, 2, 3, node=1), held(C, 3, node=1)]
    assert together(found, None, 0) == [
        Parts(C, 4, frozenset({3})),
        Parts(B, 4, frozenset(range(4))),
        Parts(A, 4, frozenset({0, 1})),
    ]
    assert [each.name for each in together(found, A, 0)] == [C, B]
    assert [each.name for each in together(found, None, 2)] == [C]
    assert together(found, None, 0)[2].missing(besides=[3]) == (2,)


def test_a_copy_stands_in_for_a_node_that_is_gone_and_for_no_other() -> None:
    gone = [held(A, 0, 1), held(A, 2, 3, copied=True, node=2)]
    (parts,) = together(gone, None, 0)
    assert (parts.missing(), parts.copies, parts.adopted().missing()) == ((2, 3), (gone[1],), ())
    (twice,) = together([*gone, held(A, 2, 3, copied=True, node=1)], None, 0)
    assert [each.node for each in twice.copies] == [1], "one of them brings it there"
    (alive,) = together([*gone, held(A, 3, node=1)], None, 0)
    assert (alive.missing(), alive.copies) == ((2,), ()), "its node has lost one rank's part, and still has another's"


@pytest.fixture
def launcher() -> Iterator[int]:
    """A process that looks like a launcher that lives."""
    command = [sys.executable, "-c", "print(flush=True); input()", "ftrun", "train.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def tier_of(run: Path, number: int) -> Tier:
    return Tier.of(run, number, run.parent)


def choose(run: Path, number: int) -> tuple[Tier, int]:
    return seats.choose(run, number, run.parent)


def left(run: Path, nodes: Any, number: int, parent: int) -> Tier:
    """What a launcher has on this machine, or has left there."""
    node = nodes(number)
    node.tier = tier_of(run, number)
    node.seal(str(A))
    config: KeeperConfig = replace(node.config, run_dir=str(run), parent=parent, token="theirs")
    config.write(node.tier)
    return node.tier


def test_a_launcher_has_the_memory_of_its_number(tmp_path: Path, nodes: Any) -> None:
    run = tmp_path / "run"
    assert choose(run, 3) == (tier_of(run, 3), 3)
    mine = left(run, nodes, 3, parent=os.getpid())
    left(run, nodes, 4, parent=os.getpid())
    assert choose(run, 3) == (mine, 3)


def test_what_belongs_to_a_living_launcher_is_left_alone(tmp_path: Path, nodes: Any, launcher: int) -> None:
    run = tmp_path / "run"
    theirs = left(run, nodes, 1, parent=launcher)
    tier, number = choose(run, 1)
    assert (tier.path == theirs.path, number) == (False, 1)
    assert choose(run, 2) == (tier_of(run, 2), 2)


def test_what_a_dead_launcher_has_left_goes_to_one_that_has_nothing(tmp_path: Path, nodes: Any, launcher: int) -> None:
    run = tmp_path / "run"
    gone = left(run, nodes, 5, parent=2**22 + 1)
    left(run, nodes, 6, parent=launcher)
    assert choose(run.with_name("another"), 0)[0].path != gone.path
    assert choose(run, 0) == (gone, 5), "and the number under which a local tier knows it"
    found = KeeperConfig.read(gone)
    assert found is not None
    assert found.parent == os.getpid(), "the next one sees that somebody has it"
