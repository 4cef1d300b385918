"""Moving bytes: any tensor, in slices, and what is moved at once to know later whether the rest is right."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from staging_kit import Copy, memory_for, plan_of, raw, stored

from ftrun.checkpoint.checksums import to_hex
from ftrun.checkpoint.staging import digests
from ftrun.checkpoint.staging.moves import PARTS, PROBES, SLICE, Block, Strided, Whole, batches, moves, split
from ftrun.checkpoint.staging.work import Helper, Work, is_crowded

MIB = 2**20


def tensors() -> dict[str, torch.Tensor]:
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    grid = torch.randn(6, 8, 10)
    return {
        "float32": torch.randn(7, 3),
        "bfloat16": torch.randn(9).bfloat16(),
        "float8": bits[:100].view(torch.float8_e4m3fn),
        "float8_e8m0": bits[100:200].view(torch.float8_e8m0fnu),
        "bool": torch.rand(5) > 0.5,
        "int64": torch.arange(5),
        "uint16": bits[:64].view(torch.uint16),
        "complex64": torch.randn(4, dtype=torch.complex64),
        "complex128": torch.randn(4, 2, dtype=torch.complex128).t(),
        "complex32": torch.randn(6, dtype=torch.complex32)[::2],
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "transposed": grid.transpose(0, 2),
        "strided": grid[:, ::2, 1:5],
        "channels_last": torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 4).expand(40, 4),
        "inside": grid[2],
        "large": torch.randn(3 * MIB // 4 + 5),
        "large_strided": torch.randn(600, 1300).t(),
        "slices": torch.randint(0, 256, (2 * SLICE + 12345,), dtype=torch.uint8),
    }


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    plan = plan_of(tensors())
    memory = memory_for(tmp_path / "slot", plan)
    memory.tensor(torch.uint8, 0, (plan.size,)).fill_(0xAB)
    memory.tensor(torch.uint8, 0, (len(plan.header),)).copy_(
        torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)
    )
    every = [move for copy in plan.copies for move in moves(copy, memory)]
    for move in every:
        move.run()
        assert move.is_same(), move.name
    assert stored(tmp_path / "slot", plan) == {name: raw(tensor) for name, tensor in tensors_of(plan).items()}
    memory.close()


def tensors_of(plan: Any) -> dict[str, torch.Tensor]:
    return {copy.name: copy.tensor for copy in plan.copies}


@pytest.mark.parametrize("name", ["slices", "large_strided", "conj", "nan"])
def test_one_changed_byte_is_seen(tmp_path: Path, name: str) -> None:
    plan = plan_of({name: tensors()[name]})
    memory = memory_for(tmp_path / "slot", plan)
    every = moves(plan.copies[0], memory)
    for move in every:
        move.run()
    memory.tensor(torch.uint8, plan.size - 1, (1,)).bitwise_xor_(1)
    assert [move.is_same() for move in every] == [True] * (len(every) - 1) + [False]
    memory.close()


def test_kinds_and_sizes_of_slices(tmp_path: Path) -> None:
    plan = plan_of(tensors())
    memory = memory_for(tmp_path / "slot", plan)
    for copy in plan.copies:
        every = moves(copy, memory)
        assert sum(move.size for move in every) == copy.tensor.nbytes, copy.name
        assert all(move.size <= SLICE + 1300 * 4 for move in every)
        kind = Whole if copy.name in ("conj", "neg") else Block if copy.tensor.is_contiguous() else Strided
        assert {type(move) for move in every} <= {kind}, copy.name
    memory.close()


def test_over_all_turns_each_byte_is_a_probe_once(tmp_path: Path) -> None:
    generous = {"rows": torch.randn(64, 700).t(), "small": torch.randn(5000), "large": torch.randn(SLICE // 4 + 99)}
    plan = plan_of(generous)
    memory = memory_for(tmp_path / "slot", plan)
    every = [move for copy in plan.copies for move in moves(copy, memory)]
    total = sum(move.size for move in every)
    now: Counter[str] = Counter()
    for turn in range(PROBES):
        parts = [split(move, number, turn) for number, move in enumerate(every)]
        chosen = [part for first, rest in parts for part in (*first, *rest)]
        assert sum(part.size for part in chosen) == total
        memory.tensor(torch.uint8, 0, (plan.size,)).zero_()
        for part in chosen:
            part.run()
        assert all(move.is_same() for move in every), turn
        probes = [part for first, _ in parts for part in first if part.size != 1024]
        for part in probes:
            now[part.name] += part.size
        assert {part.name for first, _ in parts for part in first} == set(generous), "each tensor has a probe"
    wanted = {name: tensor.nbytes for name, tensor in generous.items()}
    assert now == wanted | {"rows": wanted["rows"] * PROBES // PARTS}, "rows more often: they are fewer parts"
    memory.close()


def test_batches_keep_the_order_and_a_size(tmp_path: Path) -> None:
    sizes = [SLICE, 1, 2, SLICE - 3, 10, SLICE, 5]
    every = [Block(str(number), 0, 0, size) for number, size in enumerate(sizes)]
    groups = [[move.name for move in batch] for batch in batches(every)]
    assert groups == [["0"], ["1", "2", "3"], ["4"], ["5"], ["6"]]
    assert list(batches([])) == []


def test_digests() -> None:
    import crc32c

    some = tensors()
    found: dict[str, str] = {}
    work = digests.tasks(some, found)
    assert set(found) == {"conj", "neg"}, "what only torch can read is read by the training thread"
    for task in work.values():
        task()
    assert found == {name: to_hex(crc32c.crc32c(raw(tensor))) for name, tensor in some.items()}


def test_work_is_done_once_from_both_ends() -> None:
    done: list[int] = []
    meet = threading.Barrier(2, timeout=60)

    def task(number: int) -> None:
        if number in (0, 99):
            meet.wait()  # so both are at work at once
        done.append(number)

    work = Work([lambda number=number: task(number) for number in range(100)])
    helper = Helper()
    helper.submit(work.help)
    work.help(from_end=True)
    work.wait(60)
    assert work.error is None
    assert sorted(done) == list(range(100))
    helper.close(60)


def test_what_is_kept_is_done_by_one_thread() -> None:
    """Only what a helper is at already is still done by it."""
    did: dict[int, int] = {}
    begun, go_on = threading.Event(), threading.Event()

    def task(number: int) -> None:
        did[number] = threading.get_ident()
        if number == 0:
            begun.set()
            assert go_on.wait(60)

    work = Work([lambda number=number: task(number) for number in range(100)])
    helper = Helper()
    helper.submit(work.help)
    assert begun.wait(60)
    work.keep()
    go_on.set()
    assert helper.wait(60)  # it leaves the rest
    assert len(work) == 99
    work.help(from_end=True)
    work.wait(60)
    me = threading.get_ident()
    assert {number for number, thread in did.items() if thread != me} == {0}
    assert len(did) == 100
    helper.close(60)


@pytest.mark.parametrize(
    ("mine", "launchers", "ranks", "crowded"),
    [(2, 2, 2, True), (4, 4, 2, False), (8, 64, 8, False), (1, 64, 8, True), (8, 8, 8, True)],
)
def test_ranks_are_crowded_where_all_processors_are_busy(
    mine: int, launchers: int, ranks: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(launchers if pid else mine)))
    assert is_crowded(ranks) is crowded


def test_whoever_waits_is_not_woken_by_each_task() -> None:
    def switches() -> int:
        status = Path(f"/proc/self/task/{waiting.native_id}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[0])

    seen: list[int] = []
    short = [lambda: time.sleep(0.001)] * 100
    work = Work([lambda: seen.append(switches()), *short, lambda: seen.append(switches())])
    waiting = threading.Thread(target=work.wait, args=(60,))
    waiting.start()
    work.help()
    waiting.join(60)
    assert seen[1] - seen[0] < 20


def test_an_error_ends_the_work_for_both() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("broken")

    work = Work([fail, lambda: done.append(1)])
    work.help()
    work.wait(1)
    assert isinstance(work.error, ValueError)
    assert done == []


def test_an_interrupt_passes_and_leaves_nobody_waiting() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    work = Work([interrupted, lambda: None])
    with pytest.raises(KeyboardInterrupt):
        work.help()
    work.wait(1)
    assert isinstance(work.error, KeyboardInterrupt)


def test_waiting_has_an_end() -> None:
    begun, release = threading.Event(), threading.Event()
    work = Work([lambda: begun.set() or release.wait(60), lambda: None])
    helper = Helper()
    helper.submit(work.help)
    assert begun.wait(60)  # a helper that comes too late finds nothing left to do
    work.wait(0.05)
    assert "not done after" in str(work.error)
    assert not helper.wait(0.01)
    release.set()
    assert helper.wait(60)
    helper.close(60)


def test_the_helper_survives_a_job_that_fails() -> None:
    done: list[int] = []

    def broken() -> None:
        raise ValueError

    helper = Helper()
    helper.submit(broken)
    helper.submit(lambda: done.append(1))
    assert helper.wait(60)
    assert done == [1]
    helper.close(60)


def test_the_helper_begins_later_where_no_thread_can_be_had_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    helper = Helper()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="new thread"):
            helper.submit(lambda: done.append(1))
    helper.submit(lambda: done.append(2))
    assert helper.wait(60)
    assert done == [2]
    helper.close(60)


def test_the_helper_gives_way_to_the_training() -> None:
    import os

    seen: list[tuple[int, int]] = []
    helper = Helper()
    helper.submit(
        lambda: seen.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), threading.get_native_id()))
    )
    assert helper.wait(60)
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen[0][0] > here or here >= 5
    helper.close(60)


def test_a_copy_has_a_name() -> None:
    plan = plan_of({"a": torch.zeros(2)})
    assert isinstance(plan.copies[0], Copy)
    assert plan.copies[0].name == plan.copies[0].piece.tensor == "a"
