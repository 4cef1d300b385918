"""The power-loss tests can find what they look for: two known faults of torch's distributed checkpoint.

They are the first two of the limits named in the field notes: a metadata file that is synced before it is written
(pytorch #183878), and new tensors under old metadata. Where an installed torch has mended one, its test says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
import torch.distributed.checkpoint as dcp
from power_loss import log, recording
from power_loss import subjects_dcp as subjects
from power_loss.folder import folder
from power_loss.states import State, survey
from torch.distributed.checkpoint.api import CheckpointException

import ftrun.dcp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(recording.COMPILER is None, reason=recording.NO_COMPILER)]

METADATA = "root/.metadata"


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[log.Op]]:
    names = ["first", "again_in_one_file", "again_in_several_files", "again_with_ftrun"]
    return recording.record(subjects.__name__, names)


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP logs every refusal at length, and most states are refused."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)


def mended(what: str) -> NoReturn:
    """Say that a torch has mended a fault. Of those that are known to have it that would be a fault of this tool."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert release > (2, 13), f"torch {torch.__version__} has the fault, and it was not found"
    pytest.skip(f"torch {torch.__version__} has mended it: {what}")


def load(directory: Path, reader: Callable[[Path], dcp.StorageReader] = dcp.FileSystemReader) -> str:
    """What a user gets: the steps of the three values, or the error."""
    try:
        state = subjects.load(reader(directory / "root"))
    except (Exception, CheckpointException) as error:  # the second is no Exception
        return type(error).__name__
    steps = {float(state["step"]), *state["a"].tolist(), *state["b"].tolist()}
    return "+".join(f"{step:g}" for step in sorted(steps))


def loaded(ops: Sequence[log.Op], **how: Any) -> list[tuple[State, str]]:
    found = survey(ops, **how)
    assert found.exhaustive, found
    print(found)
    with folder() as laid_out:
        return [(state, load(laid_out.put(state))) for state in found.states]


def synced_before_written(ops: Sequence[log.Op]) -> bool:
    """Whether the metadata file's last write comes after its last fsync: read from the log, without any model."""
    inode = [op.inode for op in ops if op.kind == log.CREATE and op.path == f"{METADATA}.tmp"][-1]
    return [op.kind for op in ops if op.inode == inode and op.kind in (log.WRITE, log.FSYNC)][-1] == log.WRITE


def test_power_loss_finds_that_dcp_syncs_its_metadata_before_it_writes_them(recorded: dict[str, list[log.Op]]) -> None:
    outcomes = loaded(recorded["first"], lose_names=False)  # even where no name is ever lost
    after = [(state, outcome) for state, outcome in outcomes if "returned" in state.since]
    empty = [outcome for state, outcome in after if state.files[METADATA] == b""]
    assert "1" in [outcome for _, outcome in after], "the kindest outcome is a whole checkpoint"
    if not synced_before_written(recorded["first"]):
        assert {outcome for _, outcome in after} == {"1"}
        mended("metadata are flushed before they are synced")
    assert empty == ["CheckpointException"], (
        "the save returned, its metadata were fsynced, and there is nothing in them"
    )
    assert len({state.files["root/__0_0.distcp"] for state, _ in after}) == 1, "tensors are synced well"


def test_power_loss_finds_that_dcp_never_syncs_a_name(recorded: dict[str, list[log.Op]]) -> None:
    after = [(state, out) for state, out in loaded(recorded["first"]) if "returned" in state.since]
    assert any("root" not in state.files for state, _ in after)
    assert any("root/.metadata" in state.files and "root/__0_0.distcp" not in state.files for state, _ in after)


def test_power_loss_finds_that_dcp_loads_new_tensors_under_old_metadata(recorded: dict[str, list[log.Op]]) -> None:
    outcomes = loaded(recorded["again_in_several_files"], lose_names=False)
    before = [(state, outcome) for state, outcome in outcomes if state.since == {"start"}]
    first = next(state.files[METADATA] for state, outcome in outcomes if outcome == "1")
    mixed = [state for state, outcome in before if outcome == "1+2" and state.files[METADATA] == first]
    if not mixed:
        mended("no mix of two saves can be loaded")
    assert {outcome for _, outcome in outcomes} >= {"1", "1+2", "2", "CheckpointException"}


def test_power_loss_finds_that_dcp_loads_a_save_that_never_finished(recorded: dict[str, list[log.Op]]) -> None:
    outcomes = loaded(recorded["again_in_one_file"], lose_names=False)
    first = next(state.files[METADATA] for state, outcome in outcomes if outcome == "1")
    early = [state for state, out in outcomes if out == "2" and state.files.get(METADATA) == first]
    if not early:
        mended("new tensors under old metadata are refused")
    assert any(outcome == "CheckpointException" for _, outcome in outcomes), (
        "and the only checkpoint is gone for a while"
    )


def test_power_loss_during_a_save_through_ftrun_dcp(recorded: dict[str, list[log.Op]]) -> None:
    found = survey(recorded["again_with_ftrun"])
    print(found)
    assert found.exhaustive
    with folder() as laid_out:
        outcomes = [(state, load(laid_out.put(state), ftrun.dcp.Reader)) for state in found.states]
    assert {outcome for _, outcome in outcomes} == {"1", "2"}
    for state, outcome in outcomes:
        assert outcome == "2" or "returned" not in state.since, f"{outcome} is loaded from the state {state}"
