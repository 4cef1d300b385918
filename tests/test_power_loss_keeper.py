"""Power losses during a save: what loads afterwards is the checkpoint before or the new one, bit for bit.

Once a keeper has told that a checkpoint is committed, only that one. Every state is looked at in three ways: which
checkpoint a start would choose, whether all of its bytes can be read into each rank's state, and the same again after
the next start has rolled forward what it found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from power_loss import log, recording
from power_loss import subjects_keeper as subjects
from power_loss.folder import Folder, folder
from power_loss.snapshots import NUM_OWN, NUM_SHARED, RUN, own_value, shared_value
from power_loss.states import State, survey
from power_loss.subjects_keeper import FIRST, SECOND, THIRD, told

from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.keeper.commit import roll_forward
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.layout import AttemptName, Root
from ftrun.checkpoint.loading.stored import open_stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(recording.COMPILER is None, reason=recording.NO_COMPILER)

SUBJECTS = [
    "first",
    "second",
    "second_of_two_ranks",
    "second_with_local_tier",
    "third",
    "two_nodes",
    "without_syncing_names",
    "without_syncing_bytes",
]
_RANDOM = re.compile(r"\.[0-9a-f]{8}\.tmp$")


def record(*names: str) -> dict[str, list[log.Op]]:
    return recording.record(subjects.__name__, names, durable=("root", "local"), timeout=250)


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[log.Op]]:
    return record(*SUBJECTS)


def load(top: Path, local: bool = False) -> AttemptName | None:
    """What a start of the run resumes from, read in full by every rank; None where it begins anew."""
    root = Root.open(top / "root")
    commit = reader.resume_point(root, RUN).commit
    if commit is None:
        return None
    for rank in range(commit.manifest.world_size):
        stored = open_stored(
            root, commit.name, rank, commit.manifest.world_size, local=top / "local" if local else None
        )
        model = stored.value("tracked", "model")
        stored.close()
        assert stored.step == commit.name.step
        assert torch.equal(model["shared"], torch.full((NUM_SHARED,), shared_value(commit.name)))
        assert torch.equal(model["own"], torch.full((NUM_OWN,), own_value(commit.name, rank)))
    return commit.name


def roll(top: Path) -> None:
    root = Root.open(top / "root")
    record = epochs.claim(root, RUN, fresh=False, parent=None)
    roll_forward(root, RUN, since=record.since, before=record.epoch, faults=Faults())


@dataclass(frozen=True)
class Seen:
    """What a state is good for.

    Attributes:
        loaded: what a start resumes from.
        rolled: the same after the next start has rolled forward.
        statuses: of all attempts.
    """

    loaded: AttemptName | None
    rolled: AttemptName | None
    statuses: tuple[str, ...]


class Judge:
    """Looks at states, at each one only once: two that differ in the random part of temporary names are one."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._seen: dict[tuple[bool, tuple[tuple[str, bytes | None], ...]], Seen] = {}

    def look(self, state: State, local: bool) -> Seen:
        named = ((_RANDOM.sub(".tmp", path), data) for path, data in state.files.items())
        key = local, tuple(sorted(named, key=lambda item: (item[0], item[1] or b"")))
        if key not in self._seen:
            try:
                self._seen[key] = self._look(state, local)
            except Exception as error:  # whatever it is: no state may lead to an error
                raise AssertionError(f"{type(error).__name__}: {error}\nin the state {state}") from error
        return self._seen[key]

    def _look(self, state: State, local: bool) -> Seen:
        top = self._folder.put(state)
        try:
            loaded = load(top, local)
            statuses = tuple(info.status for info in reader.attempts(Root.open(top / "root")))
            roll(top)
            return Seen(loaded, load(top, local), statuses)
        finally:
            self._folder.forget()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with folder() as laid_out:
        yield Judge(laid_out)


def check(
    judge: Judge, ops: Sequence[log.Op], allowed: Mapping[str, set[AttemptName | None]], *, local: bool = False
) -> dict[str, set[AttemptName | None]]:
    """Look at every state. ``allowed`` says by the last mark which checkpoints may be what loads.

    Returns:
        Which ones did, by the same marks.
    """
    found = survey(ops, ("root", "local") if local else ("root",), mark=told)
    print(found)
    assert found.exhaustive
    loaded: dict[str, set[AttemptName | None]] = {}
    for state in found.states:
        seen = judge.look(state, local)
        for mark in state.since:
            loaded.setdefault(mark, set()).add(seen.loaded)
            assert seen.loaded in allowed[mark], f"{seen.loaded} is loaded from the state {state}"
        newer = seen.rolled is not None and (seen.loaded is None or seen.rolled >= seen.loaded)
        assert newer or seen.rolled is seen.loaded is None, f"{seen} from the state {state}"
    return loaded


def test_power_loss_during_the_first_save(recorded: dict[str, list[log.Op]], judge: Judge) -> None:
    allowed = {"start": {None, FIRST}, str(FIRST): {FIRST}}
    assert check(judge, recorded["first"], allowed) == allowed


SECOND_SAVE = {"start": {FIRST, SECOND}, str(SECOND): {SECOND}}


@pytest.mark.parametrize("subject", ["second", "second_of_two_ranks", "two_nodes"])
def test_power_loss_during_a_save(recorded: dict[str, list[log.Op]], judge: Judge, subject: str) -> None:
    assert check(judge, recorded[subject], SECOND_SAVE) == SECOND_SAVE


def test_power_loss_with_a_local_tier(recorded: dict[str, list[log.Op]], judge: Judge) -> None:
    assert check(judge, recorded["second_with_local_tier"], SECOND_SAVE, local=True) == SECOND_SAVE


def test_power_loss_while_an_old_checkpoint_is_deleted(recorded: dict[str, list[log.Op]], judge: Judge) -> None:
    allowed = {"start": {SECOND, THIRD}, str(THIRD): {THIRD}}
    assert check(judge, recorded["third"], allowed) == allowed
    for state in survey(recorded["third"], mark=told).states:
        statuses = judge.look(state, local=False).statuses
        assert statuses.count("committed") >= 2, f"{statuses} in the state {state}"
        assert set(statuses) <= {"committed", "uncommitted"}, f"half of a deleted one has a manifest in {state}"


@pytest.mark.parametrize("subject", ["without_syncing_names", "without_syncing_bytes"])
def test_power_loss_would_find_a_keeper_that_forgets_to_sync(
    recorded: dict[str, list[log.Op]], judge: Judge, subject: str
) -> None:
    def is_bad(state: State) -> bool:
        try:
            return judge.look(state, local=False).loaded != SECOND
        except AssertionError:
            return True

    states = survey(recorded[subject], mark=told).states
    assert any(is_bad(state) for state in states if str(SECOND) in state.since)


@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds of work, but of a keeper that gives way to everybody
@pytest.mark.parametrize("subject", ["killed", "killed_with_local_tier", "killed_and_rolled_forward"])
def test_power_loss_after_the_keeper_was_killed_at_any_operation(judge: Judge, subject: str) -> None:
    allowed = {**SECOND_SAVE, "started-again": {FIRST, SECOND}}
    lives = record(subject)
    for name in sorted(lives.keys() - {subject}):
        # The local tier is left out: it may be lost as a whole, and its torn files are looked at above.
        check(judge, lives[name], allowed)
