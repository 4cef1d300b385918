"""What went wrong, and who is at fault, told from texts that torch, gloo, Python and the C library really wrote."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import llama3_classes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.contract import RESERVED_CODES, ExitCode
from ftrun.error_file import ErrorRecord
from ftrun.launch.evidence.model import Evidence, RankEvidence
from ftrun.launch.failures import fingerprint, host_signs, traces, xid
from ftrun.launch.failures.failure import Failure, Kind, explain, shell_code, signal_name
from ftrun.launch.failures.kinds import NATURES
from ftrun.launch.failures.xid import XidClass
from ftrun.launch.watching.watch import Value, Verdict
from ftrun.pulse import Beat, Phase

TEXTS = Path(__file__).parent / "failure_texts"
NOW = 1_700_000_000.0

GPU_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 11.44 GiB is free. Process {pid} has 67.70 GiB memory in use."
)
HIP_MEMORY = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has 64 GiB"
ASSERT = "torch.AcceleratorError: CUDA error: device-side assert triggered\nFor debugging pass CUDA_LAUNCH_BLOCKING=1"
LAUNCH = "torch.AcceleratorError: CUDA error: unspecified launch failure"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
HEARTBEAT = (
    "[rank1]:[F1203 ProcessGroupNCCL.cpp:1169] [PG 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds",
)
THROWN_ASSERT = (
    "terminate called after throwing an instance of 'c10::AcceleratorError'",
    "  what():  CUDA error: device-side assert triggered",
)
NCCL_PEER = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1269, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external "
    "library call failed or device error.\nLast error:\nsocketProgress: Connection closed by remote peer node1<34567>"
)
OOM_LINE = "Memory cgroup out of memory: Killed process {pid} (python) total-vm:8000kB, anon-rss:7000kB"


def text(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text()


def beat(step: int = 12) -> Beat:
    return Beat(step=step, base=0, total=100, phase=Phase.STEP, owned=True, time=NOW - 1, first_step=NOW - 9)


def ended(
    rank: int, code: int | None, words: str = "", at: float = 0.0, *, step: int = 12, lines: tuple[str, ...] = ()
) -> RankEvidence:
    """A rank that ended (or runs, without a code), with an error file that holds a traceback or one line."""
    record = None
    if words:
        final = traces.last(words)
        assert final is not None, words
        record = ErrorRecord(f"{final.name}: {final.text}", words if "Traceback" in words else "", NOW + at)
    exited = 0.0 if code is None else NOW + at + 0.02
    return RankEvidence(rank, rank, 1000 + rank, code, exited, record, beat(step), last_lines=lines)


def evidence(*ranks: RankEvidence, **more: object) -> Evidence:
    return Evidence(ranks, **more)


GONE = text("gloo_peer_gone")

# file of the texts: kind before the first step, kind after it
KINDS = {
    "argparse": (Kind.IMPORT_ERROR, Kind.EXIT),
    "checkpoint_unreadable": (Kind.STORAGE, Kind.STORAGE),
    "error_after_lookup": (Kind.CODE_ERROR, Kind.CODE_ERROR),
    "error_in_cleanup": (Kind.CODE_ERROR, Kind.CODE_ERROR),
    "gloo_barrier_timeout": (Kind.COLLECTIVE_TIMEOUT, Kind.COLLECTIVE_TIMEOUT),
    "gloo_monitored_barrier": (Kind.COLLECTIVE_TIMEOUT, Kind.COLLECTIVE_TIMEOUT),
    "gloo_peer_gone": (Kind.UNKNOWN, Kind.UNKNOWN),
    "gloo_timeout": (Kind.COLLECTIVE_TIMEOUT, Kind.COLLECTIVE_TIMEOUT),
    "gloo_wrong_size": (Kind.CODE_ERROR, Kind.CODE_ERROR),
    "import_missing": (Kind.IMPORT_ERROR, Kind.CODE_ERROR),
    "loader_chain": (Kind.DATA, Kind.DATA),
    "loader_eio": (Kind.STORAGE, Kind.STORAGE),
    "loader_exit": (Kind.CODE_ERROR, Kind.CODE_ERROR),
    "loader_hang": (Kind.DATA, Kind.DATA),
    "loader_json": (Kind.DATA, Kind.DATA),
    "loader_key": (Kind.DATA, Kind.DATA),
    "loader_kill": (Kind.KILLED, Kind.KILLED),
    "loader_missing": (Kind.DATA, Kind.DATA),
    "loader_segv": (Kind.SEGFAULT, Kind.SEGFAULT),
    "loader_shape": (Kind.DATA, Kind.DATA),
    "loader_struct": (Kind.DATA, Kind.DATA),
    "loader_unicode": (Kind.DATA, Kind.DATA),
    "loader_value": (Kind.DATA, Kind.DATA),
    "loader_zlib": (Kind.DATA, Kind.DATA),
    "memory_error": (Kind.HOST_OUT_OF_MEMORY, Kind.HOST_OUT_OF_MEMORY),
    "ranks_disagree": (Kind.CODE_ERROR, Kind.CODE_ERROR),
    "store_broken_pipe": (Kind.UNKNOWN, Kind.UNKNOWN),
    "store_clients_missing": (Kind.COLLECTIVE_TIMEOUT, Kind.COLLECTIVE_TIMEOUT),
    "store_connect_timeout": (Kind.COLLECTIVE_TIMEOUT, Kind.COLLECTIVE_TIMEOUT),
    "store_port_taken": (Kind.UNKNOWN, Kind.UNKNOWN),
    "store_server_gone": (Kind.UNKNOWN, Kind.UNKNOWN),
    "store_wait_timeout": (Kind.COLLECTIVE_TIMEOUT, Kind.COLLECTIVE_TIMEOUT),
    "syntax_error": (Kind.IMPORT_ERROR, Kind.CODE_ERROR),
    "torch_cpu_memory": (Kind.HOST_OUT_OF_MEMORY, Kind.HOST_OUT_OF_MEMORY),
    "torch_load_no_zip": (Kind.DATA, Kind.DATA),
    "torch_load_torn": (Kind.DATA, Kind.DATA),
    "torch_save_disk_full": (Kind.STORAGE, Kind.STORAGE),
    "torch_without_cuda": (Kind.IMPORT_ERROR, Kind.CODE_ERROR),
    "write_disk_full": (Kind.STORAGE, Kind.STORAGE),
    "yaml_error": (Kind.IMPORT_ERROR, Kind.CODE_ERROR),
    "exception_group": (Kind.STORAGE, Kind.STORAGE),
    "glibc_free": (Kind.SEGFAULT, Kind.SEGFAULT),
    "segfault_faulthandler": (Kind.SEGFAULT, Kind.SEGFAULT),
}
CODES = {"argparse": 2, "glibc_free": -6, "segfault_faulthandler": -11}


def test_every_text_has_its_row() -> None:
    assert {path.stem for path in TEXTS.glob("*.txt")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_real_texts_at_the_end_of_stderr(name: str) -> None:
    code = CODES.get(name, 1)
    for step, kind in zip((0, 12), KINDS[name], strict=True):
        lines = tuple(line for line in text(name).splitlines() if line.strip())
        assert explain(evidence(ended(0, code, step=step, lines=lines))).kind is kind


@pytest.mark.parametrize("name", [name for name in KINDS if name not in CODES])
def test_the_same_texts_in_an_error_file(name: str) -> None:
    for step, kind in zip((0, 12), KINDS[name], strict=True):
        found = explain(evidence(ended(0, 1, text(name), step=step)))
        assert (found.kind, found.rank, found.blame) == (kind, 0, NATURES[kind].blame)
        assert "\n" not in found.message


# name: (ranks, what the host says, rank at fault, kind, victims, part of the message or of the evidence)
SCENES = {
    "killed, and the peer saw it first": (
        (ended(0, 1, GONE, -0.3), ended(1, -9)), {}, 1, Kind.KILLED, (0,), "rank 1 was ended by SIGKILL",
    ),
    "crashed, and the peer saw it first": (
        (ended(0, 1, GONE, -0.3), ended(1, -11)), {}, 1, Kind.SEGFAULT, (0,), "SIGSEGV",
    ),
    "killed for memory, says the counter": (
        (ended(0, 1, GONE), ended(1, -9)), {"oom_kills": 1},
        1, Kind.HOST_OUT_OF_MEMORY, (0,), "killed 1 process for memory",
    ),
    "killed for memory, says the kernel log": (
        (ended(0, -9, at=0.0), ended(1, -9, at=0.1)),
        {"kernel": (OOM_LINE.format(pid=1001),)},
        1, Kind.HOST_OUT_OF_MEMORY, (0,), "it killed 1001",
    ),
    "somebody else was killed for memory": (
        (ended(0, -9),), {"kernel": (OOM_LINE.format(pid=77),)}, 0, Kind.KILLED, (), "SIGKILL",
    ),
    "a crash is no kill for memory": ((ended(0, -11),), {"oom_kills": 1}, 0, Kind.SEGFAULT, (), "SIGSEGV"),
    "a DataLoader worker was killed for memory": (
        (ended(0, 1, text("loader_kill")),),
        {"kernel": (OOM_LINE.format(pid=10059),)},
        0, Kind.HOST_OUT_OF_MEMORY, (), "it killed the worker",
    ),
    "the first of several errors, to the millisecond": (
        (ended(0, 1, text("error_after_lookup"), 0.004), ended(1, 1, text("error_in_cleanup"), 0.002)),
        {}, 1, Kind.CODE_ERROR, (0,), "loss is NaN",
    ),
    "an error long before a kill": (
        (ended(0, 1, text("error_in_cleanup"), -60.0), ended(1, -9)), {}, 0, Kind.CODE_ERROR, (1,), "loss is NaN",
    ),
    "an error file of a rank that hasn't ended yet": (
        (ended(0, 1, text("gloo_timeout"), 4.0), ended(1, None, text("error_in_cleanup"), 0.0)),
        {}, 1, Kind.CODE_ERROR, (0,), "loss is NaN",
    ),
    "out of GPU memory, and NCCL says so on the peer": (
        (ended(0, 1, NCCL_PEER, -0.1), ended(1, 1, GPU_MEMORY)), {},
        1, Kind.GPU_OUT_OF_MEMORY, (0,), "CUDA out of memory",
    ),
    "out of an AMD GPU's memory": ((ended(0, 1, HIP_MEMORY),), {}, 0, Kind.GPU_OUT_OF_MEMORY, (), "HIP"),
    "an assertion of a kernel is code": ((ended(0, 1, ASSERT),), {}, 0, Kind.CODE_ERROR, (), "device-side assert"),
    "... thrown in C++ too": ((ended(0, -6, lines=THROWN_ASSERT),), {}, 0, Kind.SEGFAULT, (), "device-side assert"),
    "an uncorrectable error is hardware": ((ended(0, 1, ECC),), {}, 0, Kind.HARDWARE, (), "uncorrectable ECC"),
    "a failed launch is code": ((ended(0, 1, LAUNCH),), {}, 0, Kind.CODE_ERROR, (), "unspecified launch failure"),
    "... unless the GPU fell off the bus": (
        (ended(0, 1, LAUNCH),),
        {"kernel": ("NVRM: Xid (PCI:0000:5d:00): 79, pid=1000, name=python, GPU has fallen off the bus.",)},
        0, Kind.HARDWARE, (), "fallen off the bus",
    ),
    "an application's Xid doesn't make it hardware": (
        (ended(0, 1, LAUNCH),),
        {"kernel": ("NVRM: Xid (PCI:0000:5d:00): 31, pid=1000, name=python, MMU Fault",)},
        0, Kind.CODE_ERROR, (), "Xid 31 on GPU 0000:5d:00: memory page fault (application",
    ),
    "a kill has nothing to do with another job's GPU": (
        (ended(0, -9),),
        {"kernel": ("NVRM: Xid (PCI:0000:5d:00): 79, pid=4, name=other, GPU has fallen off the bus.",)},
        0, Kind.KILLED, (), "Xid 79",
    ),
    "an error of one's own isn't the GPU's": (
        (ended(0, 1, text("error_in_cleanup")),),
        {"kernel": ("NVRM: Xid (PCI:0000:5d:00): 79, pid=4, name=other, GPU has fallen off the bus.",)},
        0, Kind.CODE_ERROR, (), "loss is NaN",
    ),
    "NCCL's heartbeat monitor": (
        (ended(0, -6, lines=HEARTBEAT), replace(ended(1, None), stack=("/job/train.py:9 in load",))),
        {}, 1, Kind.COLLECTIVE_TIMEOUT, (0,), "rank 1 is in train.py:9 in load",
    ),
    "gloo timed out: the rank that still sleeps": (
        (ended(0, 1, text("gloo_timeout")), replace(ended(1, None), stack=("/job/train.py:9 in load",))),
        {}, 1, Kind.COLLECTIVE_TIMEOUT, (0,), "rank 0 waited in vain for rank 1",
    ),
    "gloo timed out: the other lost its peer for it": (
        (ended(0, 1, text("gloo_timeout")), ended(1, 1, GONE, 4.0)),
        {}, 1, Kind.COLLECTIVE_TIMEOUT, (0,), "the only one that doesn't say it waited",
    ),
    "a monitored barrier names it": (
        (ended(0, 1, text("gloo_monitored_barrier")), ended(1, 1, GONE, 0.1), ended(2, 1, GONE, 0.2)),
        {}, 1, Kind.COLLECTIVE_TIMEOUT, (0, 2), "rank 1",
    ),
    "the rank that is a step behind": (
        (ended(0, 1, text("gloo_timeout"), step=13), ended(1, 1, text("gloo_timeout"), 0.5, step=12)),
        {}, 1, Kind.COLLECTIVE_TIMEOUT, (0,), "step 12, the others 13",
    ),
    "a rank left in good order, and the others miss it": (
        (ended(0, 1, GONE), ended(1, 0, at=-0.5)), {}, 1, Kind.LEFT_EARLY, (0,), "rank 1 ended with code 0",
    ),
    "all lost a peer, and it isn't here": (
        (ended(0, 1, GONE, 0.001), ended(1, 1, NCCL_PEER, 0.002)), {}, 0, Kind.UNKNOWN, (1,), "another rank was gone",
    ),
    "a peer is about to be seen dead": (
        (ended(0, 1, GONE), replace(ended(1, None), state="Z")), {},
        1, Kind.UNKNOWN, (0,), "rank 1 ended; how isn't known",
    ),
    "a batch system preempts": (
        (ended(0, -15, lines=("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 10:00 DUE TO PREEMPTION ***",)),),
        {}, 0, Kind.PREEMPTED, (), "SIGTERM",
    ),
    "a plain exit with words of a peer's end in its log": (
        (ended(0, 3), ended(1, 1, GONE, -0.1)), {}, 0, Kind.EXIT, (1,), "exited with code 3",
    ),
    "Python's own exit code for lost output": (
        (ended(0, 120),), {}, 0, Kind.EXIT, (), "couldn't write the last of its output",
    ),
    "no command line that the script takes": (
        (ended(0, 2, step=0, lines=("usage: train.py [-h]", "train.py: error: unrecognized arguments: --lr")),),
        {}, 0, Kind.IMPORT_ERROR, (), "the command line was refused",
    ),
    "a page of memory went bad": (
        (ended(0, -7),),
        {"kernel": ("Memory failure: 0x1a2b: Killing python:1000 due to hardware memory corruption",)},
        0, Kind.HARDWARE, (), "the memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_who_is_at_fault_and_why(name: str) -> None:
    ranks, host, rank, kind, victims, part = SCENES[name]
    for order in itertools.permutations(ranks):
        found = explain(evidence(*order, **host))
        assert (found.rank, found.kind, found.victims) == (rank, kind, victims)
        assert any(part in line for line in (found.message, *found.why)), found
        assert found.fingerprint
        assert "\n" not in found.message


def hung(phase: str = "step", rank: int | None = None) -> Verdict:
    return Verdict(Value.HUNG, phase, 31.0, 30.0, 12, "no step for 31 s, and 30 s is the limit", rank)


WAITS = (
    "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3252 in all_reduce",
    "/job/a.py:5 in f",
)
ELSEWHERE = ("/job/data.py:31 in read", "/job/train.py:40 in main")


def alive(
    rank: int, stack: tuple[str, ...], state: str = "S", waits_in: str = "", code: int | None = None
) -> RankEvidence:
    return replace(ended(rank, code), stack=stack, state=state, waits_in=waits_in)


HANGS = {
    "the one outside the collective": ((alive(0, WAITS), alive(1, ELSEWHERE)), hung(), {}, 1, Kind.HANG),
    "all wait: the one the watch looked at": ((alive(0, WAITS), alive(1, WAITS)), hung(rank=1), {}, 1, Kind.HANG),
    "stopped": ((alive(0, WAITS), alive(1, WAITS, "T")), hung(rank=0), {}, 1, Kind.HANG),
    "storage doesn't answer": (
        (alive(0, WAITS), alive(1, ELSEWHERE, "D", "rpc_wait_bit_killable")), hung(), {}, 1, Kind.STORAGE,
    ),
    "the server doesn't answer": (
        (alive(0, WAITS), alive(1, ELSEWHERE)), hung(), {"kernel": ("nfs: server data1 not responding, still trying",)},
        1, Kind.STORAGE,
    ),
    "the GPU's own processor": (
        (alive(0, WAITS), alive(1, ELSEWHERE)), hung(),
        {"kernel": ("NVRM: Xid (PCI:0000:5d:00): 119, pid=1001, name=python, Timeout waiting for RPC from GSP!",)},
        1, Kind.HARDWARE,
    ),
    "one left": ((alive(0, WAITS), alive(1, (), code=0)), hung("end"), {}, 1, Kind.LEFT_EARLY),
    "nobody left, and the end hangs": ((alive(0, WAITS), alive(1, ELSEWHERE)), hung("end"), {}, 1, Kind.HANG),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_hangs(name: str) -> None:
    ranks, verdict, host, rank, kind = HANGS[name]
    found = explain(evidence(*ranks, hang=verdict, **host))
    assert (found.rank, found.kind, found.victims) == (rank, kind, ())
    assert verdict.why in found.why
    assert found.exit_code == 1


def test_a_rank_that_fell_says_more_than_the_watch() -> None:
    found = explain(evidence(ended(0, -9), alive(1, WAITS), hang=hung(rank=1)))
    assert (found.rank, found.kind) == (0, Kind.KILLED)


def test_nothing_to_explain_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nothing to explain"):
        explain(evidence(ended(0, 0)))


def test_a_time_in_whole_seconds_is_not_taken_for_exact() -> None:
    # torch's @record writes whole seconds: 5 of 5.9. The ends tell who was first.
    record = ErrorRecord("ValueError: a", time=NOW)
    first = replace(ended(1, 1, at=0.2), error=record)
    second = replace(ended(0, 1, at=0.8), error=record)
    assert explain(evidence(second, first)).rank == 1


@pytest.mark.parametrize(("row", "seen"), llama3_classes.all_of_them(), ids=lambda each: getattr(each, "name", ""))
def test_the_classes_of_the_llama_3_table(row: llama3_classes.Llama3Class, seen: Evidence) -> None:
    found = explain(seen)
    assert found.kind is row.kind
    assert row.rank in (None, found.rank)


def test_the_llama_3_table_is_whole() -> None:
    assert (len(llama3_classes.CLASSES), sum(row.count for row in llama3_classes.CLASSES)) == (18, 419)


def test_the_sample_that_could_not_be_read_is_named() -> None:
    words = text("loader_value")
    noted = words.rstrip() + "\nftrun was loading sample index 5 of epoch 2 (s3://b/5.jpg)\n"
    found, plain = explain(evidence(ended(0, 1, noted))), explain(evidence(ended(0, 1, words)))
    assert found.kind is Kind.DATA
    assert "while it read samples: sample index 5 of epoch 2 (s3://b/5.jpg)" in str(found)
    assert found.fingerprint == plain.fingerprint


# --- fingerprints


def test_a_bug_has_one_fingerprint_on_every_rank_and_in_every_attempt() -> None:
    first = text("loader_value")
    again = first.replace("worker process 0", "worker process 3").replace("bad sample 5", "bad sample 70123")
    assert explain(evidence(ended(0, 1, first))).fingerprint == explain(evidence(ended(7, 1, again, 50.0))).fingerprint
    memory = {explain(evidence(ended(0, 1, GPU_MEMORY.format(pid=pid)))).fingerprint for pid in (1, 22)}
    assert len(memory) == 1


def test_other_bugs_have_other_fingerprints() -> None:
    names = ["loader_value", "loader_key", "loader_eio", "error_in_cleanup", "gloo_wrong_size", "memory_error"]
    prints = [explain(evidence(ended(0, 1, text(name)))).fingerprint for name in names]
    prints += [explain(evidence(ended(0, code))).fingerprint for code in (-9, -11, 3, 4)]
    assert len(set(prints)) == len(prints)
    moved = text("error_in_cleanup").replace("line 30, in step", "line 33, in step")
    assert moved != text("error_in_cleanup")
    assert explain(evidence(ended(0, 1, moved))).fingerprint != prints[3]


@pytest.mark.parametrize(
    ("said", "normal"),
    [
        ("rank 3 of 16 at 0x7f12ab", "rank <n> of <n> at <n>"),
        ("no such file '/data/a b/shard-03.bin'", "no such file <path>"),
        ("cannot open /data/x.bin: gone", "cannot open <path>: gone"),
        ("run 1b4e28ba-2fa1-11d2-883f-0016d3cca427 lost", "run <n> lost"),
        ("blob deadbeef01 and facade", "blob <n> and facade"),
        ("10.0.0.7:4242 refused, loss -1.5e-3", "<n> refused, loss <n>"),
        ("'label'", "'label'"),
    ],
)
def test_what_is_left_of_a_message(said: str, normal: str) -> None:
    assert fingerprint.normal(said) == normal


# --- tracebacks


@pytest.mark.parametrize(
    ("name", "first", "final"),
    [
        ("loader_chain", "FileNotFoundError", "RuntimeError"),
        ("loader_eio", "OSError", "OSError"),
        ("error_in_cleanup", "ValueError", "RuntimeError"),
        ("error_after_lookup", "ValueError", "ValueError"),
        ("loader_kill", "RuntimeError", "RuntimeError"),
    ],
)
def test_the_exception_that_began_it(name: str, first: str, final: str) -> None:
    whole = text(name)
    cause, last = traces.cause(whole), traces.last(whole)
    assert cause is not None
    assert last is not None
    assert (cause.name, last.name) == (first, final)
    torn = traces.cause("\n".join(whole.splitlines()[-3:]))  # its head is cut off
    assert torn is not None


def test_texts_without_an_exception() -> None:
    for nothing in (
        "",
        "step 1 loss 2.0",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "\x00\xff",
    ):
        assert traces.cause(nothing) is None
    alone = traces.cause("warming up\nmodel.errors.BadLossError: loss is NaN\nmore of it")
    assert alone == traces.Raised("model.errors.BadLossError", "loss is NaN\nmore of it")


# --- the kernel's log


def test_xids_are_read_by_a_table() -> None:
    lines = [
        "no Xid errors found in dmesg",
        "NVRM: Xid (PCI:0000:5d:00): 13, pid=1, name=python, Graphics SM Warp Exception",
        "NVRM: Xid (PCI:0000:5d:00): 43, pid=1, name=python, Ch 00000008",
        "NVRM: Xid (PCI:0000:5d:00): 45, pid='<unknown>', name=<unknown>, Ch 00000008",
        "NVRM: Xid (0000:5d:00): 63, Row Remapper: New row marked for remapping",
        "NVRM: Xid (PCI:0000:5d:00): 79, pid=22, name=python, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 08",
        "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08",
        "NVRM: Xid (PCI:0018:01:00): 999, something new",
    ]
    found = xid.find(lines)
    assert [(each.code, each.family) for each in found] == [
        (13, XidClass.APP),
        (43, XidClass.INFORMATIONAL),
        (45, XidClass.CASCADE),
        (63, XidClass.INFORMATIONAL),
        (79, XidClass.HARDWARE),
        (149, XidClass.INFORMATIONAL),
        (149, XidClass.HARDWARE),
        (999, XidClass.AMBIGUOUS),
    ]
    assert [each.pid for each in found][:5] == [1, 1, None, None, 22]
    assert str(found[4]) == "Xid 79 on GPU 0000:5d:00: GPU has fallen off the bus (hardware; the node needs a restart)"


@pytest.mark.parametrize(
    "line",
    [
        "mce: [Hardware Error]: Machine check events logged",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0",
        "pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
        "mlx5_core 0000:9b:00.0: Port module event: module 0, Cable plugged",
    ],
)
def test_what_is_corrected_or_harmless_is_no_sign_of_hardware(line: str) -> None:
    assert host_signs.read([line]).hardware == ()
    assert explain(evidence(ended(0, -9), kernel=(line,))).kind is Kind.KILLED


def test_every_kind_has_a_nature() -> None:
    assert set(NATURES) == set(Kind)


# --- little evidence: codes and one-line errors


def seen(rank: int, code: int, message: str | None = None, time: float = 0.0, kind: str = "exception") -> RankEvidence:
    error = None if message is None else ErrorRecord(message, time=time, kind=kind)
    return RankEvidence(rank, pid=1000 + rank, exit_code=code, error=error)


GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
RESET = "RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Read error: Connection reset by peer"
NCCL = "DistBackendError: NCCL error: remote process exited or there was a network error, ncclRemoteError"
STORE = "DistNetworkError: Broken pipe"
HEARD = "AgreementTimeout: rank 1 heard nothing from rank 0 about step 7 for 0:00:30"
OWN = "ValueError: loss is NaN"

# what is seen: (rank at fault, kind, victims)
FAULTS = {
    "killed": ([seen(1, -9)], 1, Kind.KILLED, ()),
    "killed, and gloo says so on the peers": ([seen(0, 1, GLOO, 9.0), seen(1, -9)], 1, Kind.KILLED, (0,)),
    "killed, and the peers' stories are older": (
        [seen(0, 1, RESET, 1.0), seen(2, 1, NCCL, 2.0), seen(3, 1, STORE, 3.0), seen(1, -9)],
        1,
        Kind.KILLED,
        (0, 2, 3),
    ),
    "killed, and a peer aborts": ([seen(0, -6), seen(1, -9)], 1, Kind.KILLED, (0,)),
    "killed, and a peer was asked to end": ([seen(0, -15), seen(1, -9)], 1, Kind.KILLED, (0,)),
    "killed, and another raised before": ([seen(0, 1, OWN, 1.0), seen(1, -9)], 1, Kind.KILLED, (0,)),
    "the first exception by time": (
        [seen(0, 1, OWN, 20.0), seen(1, 1, OWN, 10.0), seen(2, 1, OWN, 30.0)],
        1,
        Kind.CODE_ERROR,
        (0, 2),
    ),
    "exception, and an older story of a peer": (
        [seen(0, 1, GLOO, 1.0), seen(1, 1, OWN, 10.0)],
        1,
        Kind.CODE_ERROR,
        (0,),
    ),
    "exception, and a plain exit": ([seen(0, 1), seen(1, 1, OWN, 5.0)], 1, Kind.CODE_ERROR, (0,)),
    "exception whose time is unknown": ([seen(0, 1, OWN, 0.0), seen(1, 1, OWN, 5.0)], 1, Kind.CODE_ERROR, (0,)),
    "torn error file": ([seen(0, 1, "unreadable error file (3 bytes)")], 0, Kind.CODE_ERROR, ()),
    "only stories of peers, and one says for whom it waited": (
        [seen(0, 1, GLOO, 9.0), seen(1, 1, HEARD, 8.0)],
        0,
        Kind.COLLECTIVE_TIMEOUT,
        (1,),
    ),
    "plain exits: the lowest rank": ([seen(2, 3), seen(1, 4)], 1, Kind.EXIT, (2,)),
    "aborted alone": ([seen(1, -6)], 1, Kind.SEGFAULT, ()),
    "abort is a consequence of an exception": ([seen(0, -6), seen(1, 1, OWN, 5.0)], 1, Kind.CODE_ERROR, (0,)),
    "abort before a story of a peer": ([seen(0, 1, GLOO, 1.0), seen(1, -6)], 1, Kind.SEGFAULT, (0,)),
    "segmentation fault": ([seen(0, 1, GLOO, 1.0), seen(1, -11)], 1, Kind.SEGFAULT, (0,)),
    "bus error": ([seen(0, -7)], 0, Kind.SEGFAULT, ()),
    "interrupted": ([seen(0, -2), seen(1, -2)], 0, Kind.KILLED, (1,)),
    "asked to end": ([seen(1, -15)], 1, Kind.KILLED, ()),
    "usage": ([seen(0, 2, "StateMismatch: w", 1.0, "usage"), seen(1, 1, GLOO, 0.5)], 0, Kind.USAGE, (1,)),
    "lost snapshot": (
        [seen(0, 1, "LostSnapshot: gone", 1.0, "lost_snapshot"), seen(1, 1, GLOO, 2.0)],
        0,
        Kind.LOST_SNAPSHOT,
        (1,),
    ),
    "corrupt": (
        [seen(1, 1, "CorruptCheckpoint: crc", 1.0, "corrupt_checkpoint"), seen(0, 1, GLOO, 2.0)],
        1,
        Kind.CORRUPT_CHECKPOINT,
        (0,),
    ),
    "stopped": ([seen(0, 75), seen(1, 75)], 0, Kind.STOPPED, (1,)),
    "stopped, and the last ones lose their peer": ([seen(0, 1, GLOO, 1.0), seen(1, 75)], 1, Kind.STOPPED, (0,)),
    "stopped, and a peer aborts for it": ([seen(0, -6), seen(1, 75)], 1, Kind.STOPPED, (0,)),
    "one fails while the others stop": ([seen(0, 75), seen(1, 1)], 1, Kind.EXIT, (0,)),
    "one raises while the others stop": ([seen(0, 75), seen(1, 1, OWN, 3.0)], 1, Kind.CODE_ERROR, (0,)),
    "one is killed while the others stop": ([seen(0, 75), seen(1, -9)], 1, Kind.KILLED, (0,)),
    "a usage code without its error is an exit": ([seen(0, 2)], 0, Kind.EXIT, ()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_who_is_at_fault_by_little_evidence(name: str) -> None:
    ranks, rank, kind, victims = FAULTS[name]
    for order in itertools.permutations(ranks):
        found = explain(evidence(*order))
        assert (found.rank, found.kind, found.victims) == (rank, kind, victims)
    assert found.exit_code == next(each.exit_code for each in ranks if each.rank == rank)


def test_the_corrupt_checkpoint_is_named() -> None:
    error = ErrorRecord("CorruptCheckpoint: crc differs", time=1.0, kind="corrupt_checkpoint", attempt="e1-s2-x")
    assert explain(evidence(RankEvidence(0, exit_code=1, error=error))).attempt == "e1-s2-x"
    assert explain(evidence(seen(0, 1))).attempt == ""


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (seen(1, -9), "rank 1 was ended by SIGKILL"),
        (seen(1, -11), "rank 1 was ended by SIGSEGV"),
        (seen(1, -99), "rank 1 was ended by signal 99"),
        (seen(3, 7), "rank 3 exited with code 7"),
        (seen(0, 1, OWN), "rank 0: ValueError: loss is NaN"),
        (seen(0, 2, "StateMismatch: shapes differ", kind="usage"), "rank 0: shapes differ"),
        (seen(0, 2, "UsageError: no such thing", kind="usage"), "rank 0: no such thing"),
    ],
)
def test_messages_for_people(rank: RankEvidence, message: str) -> None:
    assert explain(evidence(rank)).message.startswith(message)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 75, 76, 86, 255, -1, -2, -6, -9, -11, -15, -64]),
            st.sampled_from([None, GLOO, OWN, HEARD, ""]),
            st.floats(0, 1e10),
            st.sampled_from(["usage", "corrupt_checkpoint", "exception", "other"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
def test_the_verdict_does_not_depend_on_the_order_of_the_evidence(drawn: list, random: object) -> None:
    ranks = [seen(rank, code, message, time, kind) for rank, (code, message, time, kind) in enumerate(drawn)]
    verdict = explain(evidence(*ranks))
    random.shuffle(ranks)
    assert explain(evidence(*ranks)) == verdict
    assert {verdict.rank, *verdict.victims} == set(range(len(drawn)))
    assert 1 <= shell_code(verdict) <= 255


@pytest.mark.parametrize(
    ("kind", "code", "shell"),
    [
        (Kind.EXIT, 1, 1),
        (Kind.EXIT, 3, 3),
        (Kind.EXIT, 255, 255),
        (Kind.CODE_ERROR, 1, 1),
        (Kind.KILLED, -9, 137),
        (Kind.KILLED, -15, 143),
        (Kind.SEGFAULT, -11, 139),
        (Kind.USAGE, 2, 2),
        (Kind.USAGE, 1, 2),
        (Kind.EXIT, 2, 1),
        (Kind.EXIT, 76, 1),
        (Kind.EXIT, 86, 1),
        (Kind.CORRUPT_CHECKPOINT, 1, 1),
    ],
)
def test_exit_codes_for_the_shell(kind: Kind, code: int, shell: int) -> None:
    assert shell_code(Failure(kind, 0, code, "")) == shell


def test_codes_that_only_ftrun_may_mean() -> None:
    assert {2, 76, 86} == RESERVED_CODES
    assert (ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE, ExitCode.TRY_AGAIN) == (0, 1, 2, 75)
    assert (ExitCode.GAVE_UP, ExitCode.EXCLUDED) == (76, 86)


def test_names_of_signals() -> None:
    assert (signal_name(9), signal_name(15), signal_name(250)) == ("SIGKILL", "SIGTERM", "signal 250")


def test_a_text_that_is_no_unicode_is_explained_like_any_other() -> None:
    said = ErrorRecord("ValueError: cannot decode caf\udce9.jpg", "ValueError: cannot decode caf\udce9.jpg", 10.5)
    ranks = (RankEvidence(0, exit_code=1, exited_at=10.6, error=said),)
    assert explain(Evidence(ranks)).fingerprint
