"""What a failure says of its node: from evidence, through the verdict, to the mark."""

from __future__ import annotations

import pytest

from ftrun.config.health import After
from ftrun.error_file import ErrorRecord
from ftrun.health.marks import TABLE, Sign
from ftrun.launch.evidence.model import Evidence, RankEvidence
from ftrun.launch.failures import against_node
from ftrun.launch.failures.failure import explain
from ftrun.launch.watching.watch import Value, Verdict

NOW = 1_700_000_000.0
GPU_ERROR = "torch.AcceleratorError: CUDA error: unspecified launch failure"
XID = "NVRM: Xid (PCI:0000:5d:00): {}, pid=1002, name=python"
HUNG = Verdict(Value.HUNG, "step", 60.0, 10.0, 12, "no step for 60 s", rank=2)


def rank(code: int | None, words: str = "", number: int = 2) -> RankEvidence:
    record = ErrorRecord(words, "", NOW) if words else None
    return RankEvidence(number, 0, 1000 + number, code, 0.0 if code is None else NOW, record)


# name: (exit code, last words, kernel log, sign, part of the evidence)
MARKS = {
    "fell off the bus": (1, GPU_ERROR, XID.format(79), Sign.DEVICE, "Xid 79 on GPU 0000:5d:00"),
    "double bit": (-9, "", XID.format(48), Sign.DEVICE, "double-bit ECC"),
    "contained": (1, GPU_ERROR, XID.format(94), Sign.CONTAINED, "contained ECC"),
    "stopped processing": (1, GPU_ERROR, XID.format(46), Sign.SUSPECT, "suspect the node if it comes again"),
    "of the program": (1, GPU_ERROR, XID.format(31), None, ""),
    "machine check": (-11, "", "mce: [Hardware Error]: Machine check: 0 Bank 4", Sign.DEVICE, "the processor or"),
    "link down": (-9, "", "mlx5_core 0000:9b:00.0 ib0: Link down", Sign.HOST, "a network adapter"),
    "out of memory": (-9, "", "Out of memory: Killed process 1002 (python)", Sign.OUT_OF_MEMORY, "rank 2"),
    "crash": (-11, "", "", Sign.SEGFAULT, "rank 2"),
    "killed": (-9, "", "", Sign.KILLED, "rank 2"),
    "disk": (1, "OSError: [Errno 5] Input/output error", "", Sign.STORAGE, "rank 2"),
    "a bug": (1, "ValueError: bad value", "", None, ""),
    "a plain code": (3, "", "", None, ""),
}


@pytest.mark.parametrize("name", MARKS)
def test_marks(name: str) -> None:
    code, words, kernel, sign, part = MARKS[name]
    evidence = Evidence((rank(code, words),), kernel=(kernel,) if kernel else ())
    mark = against_node.read(explain(evidence), evidence, 7)
    if sign is None:
        assert mark is None
        return
    assert mark is not None
    assert (mark.sign, mark.attempt, mark.rank) == (sign, 7, 2)
    assert part in mark.evidence
    assert "\n" not in mark.evidence
    assert mark.fingerprint


def test_a_hang() -> None:
    evidence = Evidence((rank(None),), hang=HUNG)
    mark = against_node.read(explain(evidence), evidence, 7)
    assert mark is not None
    assert mark.sign is Sign.HANG


def test_every_sign_has_its_row_and_its_key() -> None:
    assert set(TABLE) == set(Sign)
    assert list(After.model_fields) == sorted(After.model_fields, key=[str(each) for each in Sign].index)
    assert set(After.model_fields) == set(Sign)
