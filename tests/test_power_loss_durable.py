"""Power losses during the small steps: each file is whole or absent, and there once the call has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from power_loss import log, recording
from power_loss.folder import folder
from power_loss.states import State, survey
from power_loss.subjects_durable import ATTEMPT, NEW, OLD

from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.layout import Root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    States = Callable[[str], Iterator[tuple[State, Path]]]

pytestmark = pytest.mark.skipif(recording.COMPILER is None, reason=recording.NO_COMPILER)

SUBJECTS = [
    "write",
    "create",
    "creating",
    "create_without_links",
    "claims",
    "marked_bad",
    "pinned",
    "after_a_kill",
    "claims_after_a_kill",
]


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[log.Op]]:
    return recording.record("power_loss.subjects_durable", SUBJECTS)


@pytest.fixture
def states(recorded: dict[str, list[log.Op]]) -> Iterator[States]:
    """The states that a subject may leave, each one laid out in a directory."""
    with folder() as laid_out:

        def of(subject: str) -> Iterator[tuple[State, Path]]:
            found = survey(recorded[subject])
            print(found)
            assert found.exhaustive
            return ((state, laid_out.put(state)) for state in found.states)

        yield of


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def test_power_loss_while_a_file_is_replaced(states: States) -> None:
    seen = {(state.since, content(top / "root" / "file")) for state, top in states("write")}
    assert {data for _, data in seen} == {OLD, NEW}
    assert {data for since, data in seen if "returned" in since} == {NEW}


@pytest.mark.parametrize("subject", ["create", "creating"])
def test_power_loss_while_a_file_is_created(states: States, subject: str) -> None:
    seen = {(state.since, content(top / "root" / "deep" / "deeper" / "file")) for state, top in states(subject)}
    assert {data for _, data in seen} == {None, NEW}
    assert {data for since, data in seen if "returned" in since} == {NEW}


def test_power_loss_while_a_file_is_created_where_there_are_no_links(
    states: States,
) -> None:
    seen = {(s.since, content(top / "root" / "deep" / "deeper" / "file")) for s, top in states("create_without_links")}
    assert len({data for _, data in seen}) > 3, "it is visible while it grows: its readers check the sum in it"
    assert {data for since, data in seen if "returned" in since} == {NEW}


def test_power_loss_while_epochs_are_claimed(states: States) -> None:
    for state, top in states("claims"):
        root = Root.open(top / "root")
        record = epochs.current(root)
        claimed = max(int(mark.removeprefix("claimed-").replace("start", "0")) for mark in state.since)
        assert claimed <= epochs.newest(root) <= claimed + 1, state
        assert (record.epoch if record else 0) == epochs.newest(root), state
        assert record is None or record.since == (1, 2, 2)[record.epoch - 1]


def test_power_loss_while_a_checkpoint_is_marked_as_bad(
    states: States,
) -> None:
    for state, top in states("marked_bad"):
        reason = reader.inspect(Root.open(top / "root"), ATTEMPT).reason
        allowed = {"is marked as bad: bytes differ"} | (
            {"has no MANIFEST.json"} if "returned" not in state.since else set()
        )
        assert reason in allowed, state


def test_power_loss_while_a_checkpoint_is_pinned(states: States) -> None:
    for state, top in states("pinned"):
        pins = Root.open(top / "root").pins()
        assert pins == [ATTEMPT] or (state.since == {"start"} and pins == []), state


def numbered(recorded: dict[str, list[log.Op]], subject: str) -> list[str]:
    found = [name for name in recorded if name.startswith(f"{subject}-")]
    assert len(found) > 5
    return found


def test_power_loss_after_somebody_was_killed_in_the_middle(recorded: dict[str, list[log.Op]], states: States) -> None:
    ends = set()
    for name in numbered(recorded, "after_a_kill"):
        for state, top in states(name):
            deep = top / "root" / "deep" / "deeper"
            if state.since & {"returned", "exists"}:
                assert content(deep / "file") == NEW, f"{name}: {state}"
            if "another" in state.since:
                assert content(deep / "file") == content(deep / "another") == NEW, f"{name}: {state}"
            ends |= state.since
    assert ends >= {"returned", "exists", "another"}


def test_power_loss_after_a_launcher_was_killed_while_it_claimed(
    recorded: dict[str, list[log.Op]], states: States
) -> None:
    for name in numbered(recorded, "claims_after_a_kill"):
        for state, top in states(name):
            claimed = max((int(mark.removeprefix("claimed-")) for mark in state.since if mark), default=0)
            assert epochs.newest(Root.open(top / "root")) >= claimed, f"{name}: {state}"
