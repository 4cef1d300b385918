"""The check of a node that comes back: right and wrong results, crashes, an end in any case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from conftest import eventually, kill_tree

from ftrun.health import burn, check, checking
from ftrun.health.burn import Load
from ftrun.health.checking import Found

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_over(process: psutil.Process) -> bool:
    """Whether a process has ended; it may vanish while it is looked at, and be reaped at any time."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_a_check(process: psutil.Process) -> bool:
    """Whether it is one that runs, and not what another test has left."""
    try:
        return check.__name__ in process.cmdline()
    except psutil.NoSuchProcess:  # a zombie, too
        return False


def test_right_results_are_right() -> None:
    load = burn.processors(0.0)
    assert load.trouble == ""
    assert load.detail.startswith(f"{len(os.sched_getaffinity(0))} processors, ")


def test_one_wrong_bit_on_one_processor_is_found_and_the_others_are_not_blamed() -> None:
    cores = sorted(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)

    def multiply(left: NDArray[np.float64], right: NDArray[np.float64], product: NDArray[np.float64]) -> None:
        np.matmul(left, right, product)
        if os.sched_getaffinity(0) == {cores[-1]}:
            product.view(np.uint64)[300, 7] ^= 1

    load = burn.processors(0.0, multiply=multiply)
    assert load.trouble == f"processor {cores[-1]}: of 262,144 numbers in product 1, 1 wrong"
    assert os.sched_getaffinity(0) == before  # of this thread


def test_a_result_that_was_never_written_is_wrong() -> None:
    assert "262,144 wrong" in burn.processors(0.0, multiply=lambda _left, _right, _product: None).trouble


def test_a_processor_that_is_gone_is_trouble() -> None:
    assert burn.processors(0.0, [10_000]).trouble.startswith("processor 10000: can't be used")


def test_gpus_on_what_stands_in_for_one() -> None:
    torch = pytest.importorskip("torch")
    from ftrun.health import burn_gpu

    load = burn_gpu.gpus(0.0, [torch.device("cpu")], side=64)
    assert load == Load("GPUs", "", "1 GPUs, 8 products")


def test_without_gpus_nothing_is_wrong_with_them() -> None:
    torch = pytest.importorskip("torch")
    from ftrun.health import burn_gpu

    if torch.version.cuda is None:
        assert burn_gpu.gpus(0.0) == Load("GPUs", "", "this torch uses no GPUs")


def test_a_gpu_that_is_gone_is_trouble_unless_only_some_are_to_be_used() -> None:
    from ftrun.health.burn_gpu import gone

    assert gone(8, 7, {}) == "1 of 8 GPUs can't be used"
    assert gone(8, 7, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}) == ""
    assert gone(8, 8, {}) == gone(0, 0, {}) == gone(0, 8, {}) == ""


GOOD = json.dumps([{"name": "a", "trouble": "", "detail": "2 processors"}]).encode()
BAD = json.dumps([{"name": "a", "trouble": "processor 3", "detail": ""}, {"name": "b", "trouble": "", "detail": ""}])

# how it ended: (code, output, standard error, trouble, part of what it says)
ENDS = {
    "right": (0, GOOD, b"", "", "2 processors"),
    "wrong": (1, BAD.encode(), b"", "processor 3", "processor 3"),
    "crashed": (-signal.SIGSEGV, b"", b"", "the check crashed (SIGSEGV)", ""),
    "bus error": (-signal.SIGBUS, b"", b"", "the check crashed (SIGBUS)", ""),
    "killed": (-signal.SIGKILL, b"", b"", "", "could not be done (ended by signal 9)"),
    "no memory": (3, b"", b"Traceback\nMemoryError: no room\n", "", "could not be done (MemoryError: no room)"),
    "no module": (1, b"", b"ModuleNotFoundError: No module named 'x'", "", "could not be done (ModuleNotFound"),
    "no sense": (0, b"garbage", b"", "", "could not be done (exit code 0)"),
    "says right and ends wrong": (1, GOOD, b"", "", "could not be done (exit code 1)"),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(name: str) -> None:
    code, out, said, trouble, part = ENDS[name]
    found = checking.read(code, out, said)
    assert found.trouble == trouble
    assert part in str(found)


def test_a_real_check() -> None:
    found = checking.run(0.1)
    assert found.trouble == ""
    assert "processors" in found.detail


def test_a_check_that_does_not_end_has_failed_and_is_gone() -> None:
    assert checking.run(60.0, limit=0.5) == Found("the check did not end within 0.5 s", "")
    # Killed it is; its end takes the processor time that it gets.
    eventually(lambda: not [each for each in psutil.Process().children() if is_a_check(each)], what="its end")


@pytest.mark.slow
def test_nothing_is_left_of_it_where_its_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", "from ftrun.health import checking; checking.run(50.0)"])
    try:
        made = eventually(psutil.Process(starter.pid).children, 30, "the check")[0]
        eventually(lambda: made.num_threads() > len(os.sched_getaffinity(0)), 30, "its load")
        starter.send_signal(signal.SIGKILL)
        starter.wait(10)
        # By itself it would go on for longer than that.
        eventually(lambda: is_over(made), 20, "its end")
    finally:
        kill_tree(starter.pid)
