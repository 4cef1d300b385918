"""What a start resumes from: the newest of commits and snapshots in memory, and what is said of those passed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loading_kit import Written, commit, replicated, seal, written

from ftrun.checkpoint import epochs, reader, sealed
from ftrun.checkpoint.layout import AttemptName, Root
from ftrun.checkpoint.memory.tier import Tier, put
from ftrun.checkpoint.resuming import Choice, choose

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND, THIRD = (AttemptName(1, step, f"{step:08x}") for step in (10, 20, 30))


@pytest.fixture
def tier(tmp_path: Path, root: Root) -> Tier:
    made = Tier(tmp_path / "memory")
    made.create()
    record = epochs.claim(root, "run", fresh=False, parent=None)
    put(made.path / "epoch.json", sealed.seal(dict(record.__dict__)))
    return made


def made(name: AttemptName) -> Written:
    return written(
        2, lambda rank: {"tracked": {"w": torch.arange(100.0)}, "extra": {"rank": rank}}, replicated(2), name
    )


def seen(choice: Choice) -> tuple[str, bool]:
    assert choice.point is not None
    return str(choice.point.name), choice.point.sealed


def test_the_newest_counts_wherever_it_lies(root: Root, tier: Tier) -> None:
    assert choose(root, "run", tier) == Choice(None)
    commit(root, made(FIRST))
    assert seen(choose(root, "run", tier)) == (str(FIRST), False)
    seal(tier, made(SECOND), 0)
    assert seen(choose(root, "run", tier)) == (str(SECOND), True)
    assert seen(choose(root, "run", None)) == (str(FIRST), False)
    commit(root, made(SECOND))
    assert seen(choose(root, "run", tier)) == (str(SECOND), False), "a commit needs nobody to finish it"
    seal(tier, made(THIRD), 1)
    assert seen(choose(root, "run", tier)) == (str(THIRD), True)
    assert choose(root, "run", tier).skipped == ()


def test_a_snapshot_that_was_found_damaged_makes_way_for_the_one_before(root: Root, tier: Tier) -> None:
    commit(root, made(FIRST))
    seal(tier, made(SECOND), 0)
    seal(tier, made(THIRD), 1)
    reader.mark_bad(root, THIRD, "chunk 0 fails its checksum")
    choice = choose(root, "run", tier)
    assert seen(choice) == (str(SECOND), True)
    assert seen(choose(root, "run", tier, exclude={str(SECOND)})) == (str(FIRST), False)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("unlink", "r00001.0.safetensors is missing in this node's memory"),
        ("truncate", "r00001.0.safetensors has 0 bytes in this node's memory instead of"),
        ("mkdir", "r00001.0.safetensors is no regular file in this node's memory"),
    ],
)
def test_a_snapshot_that_lacks_a_file_is_passed_over_and_named(root: Root, tier: Tier, damage: str, words: str) -> None:
    commit(root, made(FIRST))
    seal(tier, made(SECOND), 0)
    seal(tier, made(THIRD), 1)
    payload = tier.slots(1)[1].payload
    if damage == "truncate":
        payload.write_bytes(b"")
    else:
        payload.unlink()
    if damage == "mkdir":
        payload.mkdir()
    choice = choose(root, "run", tier)
    assert seen(choice) == (str(SECOND), True)
    ((name, reason),) = choice.skipped
    assert name == str(THIRD)
    assert words in reason
    commit(root, made(THIRD))
    assert choose(root, "run", tier).skipped == (), "it is a commit now"


def test_what_is_passed_over_is_listed_newest_first(root: Root, tier: Tier) -> None:
    commit(root, made(FIRST))
    commit(root, made(SECOND))
    reader.mark_bad(root, SECOND, "damaged")
    seal(tier, made(THIRD), 1)
    tier.slots(0)[1].record.unlink()
    choice = choose(root, "run", tier)
    assert seen(choice) == (str(FIRST), False)
    assert [name for name, _ in choice.skipped] == [str(THIRD), str(SECOND)]
