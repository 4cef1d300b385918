"""The recorder of the power-loss tests sees everything, or it says that it didn't."""

from __future__ import annotations

import pytest
from power_loss import log, recording

pytestmark = pytest.mark.skipif(recording.COMPILER is None, reason=recording.NO_COMPILER)


def test_power_loss_recorder_sees_every_call_thread_and_process() -> None:
    sections = recording.record("power_loss.subjects_calls", ["data", "names", "crowd"])  # it compares itself
    kinds = {op.kind for ops in sections.values() for op in ops}
    assert kinds == set(range(log.CREATE, log.UNSEEN))
    assert len({op.pid for op in sections["crowd"]}) == 3
    assert sum(op.kind == log.RENAME for op in sections["crowd"]) == 80


@pytest.mark.parametrize(
    ("subject", "message"), [("library_stream", "bytes differ"), ("memory_map", "can't be followed")]
)
def test_power_loss_recorder_says_what_it_could_not_see(subject: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        recording.record("power_loss.subjects_calls", [subject])
