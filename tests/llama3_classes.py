"""The 18 classes of interruption that Meta counted while it trained Llama 3, as evidence that a launcher could see.

Counts are those of table 5 of "The Llama 3 Herd of Models" (arXiv 2407.21783). The paper names what was found to be
broken, not what it looked like: the evidence here is the nearest form that the kernel, the driver, NCCL or torch
gives such a fault. For classes that take a whole host with them (power supply, chassis), the evidence is what an
agent on another node sees. ``kind`` is what a launcher can honestly name from such evidence, and no more.

``make(name)`` gives the evidence of two ranks, of which ``AT_FAULT`` broke and the other is its victim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftrun.error_file import ErrorRecord
from ftrun.launch.evidence.model import Evidence, RankEvidence
from ftrun.launch.failures.kinds import Kind
from ftrun.pulse import Beat, Phase

AT_FAULT = 1
_PIDS = {0: 4100, 1: 4101}
_NOW = 1_700_000_000.0

PEER_GONE = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.7]:48808. This is typically caused by a remote worker crashing."
)
NCCL_TIMEOUT = (
    (
        "[rank{rank}]:[E1203 10:00:00.1 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for "
        "600060 milliseconds before timing out."
    ),
    (
        "[rank{rank}]:[E1203 10:00:00.2 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {rank}] Exception (either an error or "
        "timeout) detected by watchdog at work: 1580, last enqueued NCCL work: {last}, last completed NCCL work: 1579."
    ),
    "terminate called after throwing an instance of 'c10::DistBackendError'",
)
CUDA_NOTE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace may be wrong."
)


@dataclass(frozen=True)
class Llama3Class:
    """One row.

    Attributes:
        name: as in the paper.
        count: interruptions in 54 days.
        form: how it is injected: what the evidence is.
        kind: what the launcher names.
        rank: the rank that is named; None where no rank of this node can be.
    """

    name: str
    count: int
    form: str
    kind: Kind
    rank: int | None = AT_FAULT


CLASSES = (
    Llama3Class("Faulty GPU", 148, "Xid 79 names the rank's process, which dies of a CUDA error", Kind.HARDWARE),
    Llama3Class("GPU HBM3 memory", 72, "CUDA reports an uncorrectable ECC error; Xid 95 and 48", Kind.HARDWARE),
    Llama3Class("Software bug", 54, "an exception of the training script", Kind.CODE_ERROR),
    Llama3Class("Network switch/cable", 35, "NCCL times out; an adapter's link went down", Kind.HARDWARE, None),
    Llama3Class("Unplanned host maintenance", 32, "SIGTERM from outside", Kind.KILLED),
    Llama3Class("GPU SRAM memory", 19, "Xid 172 names the rank's process, which is killed", Kind.HARDWARE),
    Llama3Class("GPU system processor", 17, "Xid 119; the rank hangs in the driver, others time out", Kind.HARDWARE),
    Llama3Class("NIC", 7, "NCCL loses its peers; the adapter's health is compromised", Kind.HARDWARE, None),
    Llama3Class("NCCL watchdog timeouts", 7, "both watchdogs abort; one had enqueued less", Kind.COLLECTIVE_TIMEOUT),
    Llama3Class("Silent data corruption", 6, "only its effect: the script's own check of the loss", Kind.CODE_ERROR),
    Llama3Class("GPU thermal interface + sensor", 6, "the GPU shuts itself off: Xid 79 without a pid", Kind.HARDWARE),
    Llama3Class("SSD", 3, "EIO while reading; the kernel reports a critical medium error", Kind.STORAGE),
    Llama3Class("Power supply", 3, "from another node: all peers there are gone at once", Kind.UNKNOWN, None),
    Llama3Class("Server chassis", 2, "from another node: all peers there are gone at once", Kind.UNKNOWN, None),
    Llama3Class("IO expansion board", 2, "uncorrectable PCIe error; the rank dies of SIGBUS", Kind.HARDWARE),
    Llama3Class("Dependency", 2, "an object store refuses to serve", Kind.STORAGE),
    Llama3Class("CPU", 2, "machine check; the rank dies of SIGILL", Kind.HARDWARE),
    Llama3Class("System memory", 2, "the kernel kills the process for a corrupt page (SIGBUS)", Kind.HARDWARE),
)


def make(name: str) -> Evidence:
    """The evidence of one class."""
    ranks, kernel = _SCENES[name]
    return Evidence(ranks, host="gpu-17", time=_NOW, kernel=kernel)


def all_of_them() -> list[tuple[Llama3Class, Evidence]]:
    """Every row with its evidence."""
    return [(row, make(row.name)) for row in CLASSES]


def _rank(
    rank: int, code: int | None, after: float = 0.0, error: str = "", lines: tuple[str, ...] = ()
) -> RankEvidence:
    at = _NOW + after
    record = ErrorRecord(error, _traceback(error), at) if error else None
    beat = Beat(step=120, base=100, total=1000, phase=Phase.STEP, owned=True, time=at - 1, first_step=at - 60)
    exited = 0.0 if code is None else at + 0.05
    return RankEvidence(rank, rank, _PIDS[rank], code, exited, record, beat, last_lines=lines)


def _traceback(error: str) -> str:
    frame = '  File "/home/user/job/train.py", line 88, in train_step'
    return f"Traceback (most recent call last):\n{frame}\n    step()\n{error}"


def _died(code: int, error: str = "", lines: tuple[str, ...] = ()) -> tuple[RankEvidence, ...]:
    """Rank 1 dies, and rank 0 loses its peer a moment before the end of rank 1 is seen."""
    return (_rank(0, 1, -0.01, PEER_GONE), _rank(AT_FAULT, code, 0.0, error, lines))


def _timed_out(last: dict[int, int]) -> tuple[RankEvidence, ...]:
    """NCCL's watchdog aborts both."""
    return tuple(
        _rank(rank, -6, 0.01 * rank, lines=tuple(line.format(rank=rank, last=number) for line in NCCL_TIMEOUT))
        for rank, number in last.items()
    )


def _lost_peers(text: str) -> tuple[RankEvidence, ...]:
    return (_rank(0, 1, 0.001, text), _rank(1, 1, 0.002, text))


def _hung_in_the_driver() -> tuple[RankEvidence, ...]:
    stuck = replace(_rank(AT_FAULT, None), state="D", waits_in="_nv033212rm")
    return (_timed_out({0: 1582})[0], stuck)


_CUDA_LOST = f"torch.AcceleratorError: CUDA error: unspecified launch failure{CUDA_NOTE}"
_CUDA_ECC = f"torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered{CUDA_NOTE}"
_NCCL_REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2300, remote process exited or there was "
    "a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nNET/IB: Got completion from peer 10.0.0.7<36315> with status=12 "
    "opcode=32698 len=32696 vendor err 129 (Send)"
)
_STORE = "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling GetObject: reduce your rate"

_SCENES: dict[str, tuple[tuple[RankEvidence, ...], tuple[str, ...]]] = {
    "Faulty GPU": (
        _died(1, _CUDA_LOST),
        ("NVRM: Xid (PCI:0000:5d:00): 79, pid=4101, name=python, GPU has fallen off the bus.",),
    ),
    "GPU HBM3 memory": (
        _died(1, _CUDA_ECC),
        (
            "NVRM: Xid (PCI:0000:5d:00): 48, pid=4101, name=python, DBE (double bit error) ECC error.",
            "NVRM: Xid (PCI:0000:5d:00): 95, pid=4101, name=python, Uncontained ECC error.",
        ),
    ),
    "Software bug": (_died(1, "IndexError: index 50304 is out of bounds for dimension 0 with size 50304"), ()),
    "Network switch/cable": (
        _timed_out({0: 1582, 1: 1582}),
        ("mlx5_core 0000:9b:00.0: mlx5_0: Port: 1 Link DOWN", "mlx5_core 0000:9b:00.0 ib0: Link is Down"),
    ),
    "Unplanned host maintenance": ((_rank(0, 1, 0.2, PEER_GONE), _rank(AT_FAULT, -15)), ()),
    "GPU SRAM memory": (
        _died(-9),
        (
            "NVRM: Xid (PCI:0000:5d:00): 172, pid=4101, name=python, Uncorrectable SRAM error",
            "NVRM: Xid (PCI:0000:5d:00): 45, pid=4101, name=python, Ch 00000010",
        ),
    ),
    "GPU system processor": (
        _hung_in_the_driver(),
        ("NVRM: Xid (PCI:0000:5d:00): 119, pid=4101, name=python, Timeout after 6s of waiting for RPC from GSP!",),
    ),
    "NIC": (
        _lost_peers(_NCCL_REMOTE),
        ("mlx5_core 0000:9b:00.0: poll_health:825: device's health compromised - reached miss count",),
    ),
    "NCCL watchdog timeouts": (_timed_out({0: 1582, 1: 1580}), ()),
    "Silent data corruption": (_died(1, "ValueError: gradient norm is NaN on replica 1 and 2.31 elsewhere"), ()),
    "GPU thermal interface + sensor": (
        _died(1, _CUDA_LOST),
        ("NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",),
    ),
    "SSD": (
        _died(1, "OSError: [Errno 5] Input/output error: '/data/shard-00412.bin'"),
        ("critical medium error, dev nvme0n1, sector 41283 op 0x0:(READ)",),
    ),
    "Power supply": (_lost_peers(_NCCL_REMOTE), ()),
    "Server chassis": (_lost_peers(PEER_GONE), ()),
    "IO expansion board": (
        _died(-7),
        ("pcieport 0000:00:03.0: AER: Uncorrectable (Fatal) error message received from 0000:5d:00.0",),
    ),
    "Dependency": (_died(1, _STORE), ()),
    "CPU": (_died(-4), ("mce: [Hardware Error]: CPU 17: Machine Check Exception: 5 Bank 1: be00000000800150",)),
    "System memory": (
        _died(-7),
        ("Memory failure: 0x1a2b3c: Sending SIGBUS to python:4101 due to hardware memory corruption",),
    ),
}
