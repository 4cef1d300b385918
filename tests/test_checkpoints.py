"""When a Session takes a checkpoint, and what it makes of one that is refused: decided by itself, with a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftrun import pulse
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import Every
from ftrun.errors import CheckpointError, Disagreement
from ftrun.session import checkpoints
from ftrun.session.checkpoints import Checkpoints
from ftrun.session.open_saves import OpenSaves, Save

if TYPE_CHECKING:
    from pathlib import Path


class Saver:
    """Has room when it is told to, and answers each wait with the next thing that it is given."""

    stall_seconds = commit_seconds = None

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.free = True
        self.saves = self.asked = 0

    def may_save(self) -> bool:
        self.asked += 1
        return self.free

    def save(self, *_: Any) -> None:
        self.saves += 1

    def wait(self, timeout: float) -> None:
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer

    def poll(self) -> list[Any]:
        return []


def checkpoints_of(saver: Saver, tmp_path: Path) -> Checkpoints:
    page = tmp_path / "pulse"
    pulse.create(page)
    place: Any = SimpleNamespace(rank=0, world_size=1)
    contract: Any = SimpleNamespace(failures=0, uptime=0.0)
    stand_in: Any = saver
    return Checkpoints(stand_in, pulse.Pulse(page), Every(steps=1), place, contract, lambda event: None)


def test_the_last_state_is_taken_again_until_it_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_DELAYS", (0.0, 0.0, 0.0))
    saver = Saver(CheckpointError("the disk is full"), CheckpointError("the disk is full"), None)
    made = checkpoints_of(saver, tmp_path)
    made.surely(lambda: made.take(7, 7, "last", dict, {}))
    assert saver.saves == 3


def test_ranks_at_different_positions_stay_there_and_nobody_tries_again(tmp_path: Path) -> None:
    saver = Saver(Disagreement("the ranks saved different steps"), None)
    made = checkpoints_of(saver, tmp_path)
    with pytest.raises(Disagreement, match="different steps"):
        made.surely(lambda: made.take(7, 7, "last", dict, {}))
    assert saver.saves == 1


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_that_is_final_is_told_from_others(tmp_path: Path, final: bool) -> None:
    tier = Tier(tmp_path / "memory")
    tier.create()
    name = "e00000001-s0000000007-00000000"
    saves = OpenSaves(tier, 0, "root", lambda names: None)
    saves.add(Save(name, 7, 7, "last", {}, "", 0.0))
    Outcomes(tier).put(Outcome(name, 7, committed=False, reason="they differ", seconds=0.0, size=0, final=final))
    with pytest.raises(CheckpointError, match="was not committed: they differ") as caught:
        saves.wait(60)
    assert isinstance(caught.value, Disagreement) == final


def test_a_slow_storage_costs_training_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.05)
    monkeypatch.setattr(checkpoints, "_FREE_SECONDS", 0.1)
    now = [0.0]  # a clock of its own: one long sleep of a busy machine would use up what there is for all waits

    def sleep(_seconds: float) -> None:
        now[0] += 2**-7

    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    saver = Saver()
    made = checkpoints_of(saver, tmp_path)
    looks = []
    for step in range(10):
        saver.free, saver.asked = step % 2 == 0, 0
        assert made.decide(step, wanted=False) == saver.free
        looks.append(saver.asked)
    assert min(looks[1], looks[3]) > 1, "a drain that is nearly done is waited for"
    assert looks[5::2] == [1, 1, 1], "but not again and again"
