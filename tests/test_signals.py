"""Signals to workers: what they save, whether they go on, and what a child that they fork makes of them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import SCRIPTS, Runner, eventually
from session_kit import committed, idle, open_session

from ftrun import events
from ftrun.contract import Fault
from ftrun.launch.evidence import process_state
from ftrun.session import stopping
from ftrun.session.agreement import Agreement
from ftrun.session.place import Place
from ftrun.session.stopping import StopRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from session_kit import Launch

SMALL = SCRIPTS / "small.py"
LONG = ("--total", "100000", "--pace", "0.01")
RARELY = ("--set", "checkpoint.every=1h")


def of(runner: Runner, name: str, kind: type[events.Event]) -> list[events.Record]:
    return [record for record in runner.events(name) if isinstance(record.event, kind)]


def workers(runner: Runner, name: str) -> list[int]:
    """Process ids by rank, once the run makes steps."""
    eventually(lambda: of(runner, name, events.Step), 60, "the first step")
    (started,) = (record.event for record in of(runner, name, events.AttemptStarted))
    return [started.pids[str(rank)] for rank in range(len(started.pids))]


def saved(runner: Runner, name: str) -> list[int]:
    return [record.event.step for record in of(runner, name, events.Committed)]


def furthest(runner: Runner, name: str) -> int:
    return max(record.event.step for record in of(runner, name, events.Step))


# --- whole runs


@pytest.mark.slow
def test_sigusr1_saves_and_goes_on(runner: Runner) -> None:
    started = runner.start("--nproc", "2", "--name", "asked", *RARELY, SMALL, *LONG)
    pids = workers(runner, "asked")
    os.kill(pids[1], signal.SIGUSR1)
    (step,) = eventually(lambda: saved(runner, "asked"), 30, "a commit")
    eventually(lambda: furthest(runner, "asked") > step, 30, "another step")

    time.sleep(stopping._SAME_REQUEST)  # what comes sooner is the same wish
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # as a batch system does
    eventually(lambda: len(saved(runner, "asked")) >= 2, 30, "a second commit")
    step = furthest(runner, "asked") + 200
    eventually(lambda: furthest(runner, "asked") > step, 30, "some seconds of steps")
    # A rank that gets no processor for longer than that hears of another wish; the steps stand still then, too.
    times = [record.time for record in of(runner, "asked", events.Step)]
    stood = max(after - before for before, after in itertools.pairwise(times))
    assert len(saved(runner, "asked")) == 2 or stood > stopping._SAME_REQUEST
    assert started.process.poll() is None


@pytest.mark.slow
def test_sigusr2_to_one_rank_saves_and_leaves_with_75(runner: Runner) -> None:
    started = runner.start("--nproc", "2", "--name", "warned", *RARELY, SMALL, *LONG)
    os.kill(workers(runner, "warned")[1], signal.SIGUSR2)
    assert started.wait(60).code == 75
    (step,) = saved(runner, "warned")
    assert of(runner, "warned", events.StepsEnded)[-1].event.step == step


STUCK = """
    import time
    import torch
    import ftrun

    @ftrun.entrypoint(every=10)
    def main(ft):
        model = torch.nn.Linear(512, 512)
        ft.track(model=model)
        for step in ft.steps(total=100):
            if step == 10 and ft.rank == 1:
                open("stuck", "w").close()
                time.sleep(600)
            if ft.world_size > 1:
                torch.distributed.all_reduce(torch.ones(1))

    main()
"""


def write(path: Path, text: str) -> Path:
    path.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    return path


@pytest.mark.slow
def test_what_is_staged_is_committed_although_a_rank_is_stuck(runner: Runner) -> None:
    script = write(runner.cwd / "stuck.py", STUCK)
    slowly = ("--set", "checkpoint.drain_limit=300kB", "--set", "signals.grace=15s")  # a megabyte or two to write
    started = runner.start("--nproc", "2", "--name", "stuck", *slowly, script)
    eventually((runner.cwd / "stuck").exists, 60, "rank 1 to be stuck")
    started.process.send_signal(signal.SIGTERM)
    assert started.wait(90).code == 75
    assert saved(runner, "stuck") == [10]


EARLY = """
    import os, signal, time
    import ftrun

    @ftrun.entrypoint(every=1000)
    def main(ft):
        os.kill(os.getpid(), signal.SIGUSR1)
        for step in ft.steps(total=300):
            time.sleep(0.01)

    main()
"""


@pytest.mark.slow
def test_a_wish_before_the_first_step_is_kept(runner: Runner) -> None:
    script = write(runner.cwd / "early.py", EARLY)
    assert runner.run("--name", "early", script).code == 0
    assert saved(runner, "early") == [1, 300]


# --- one process


@pytest.fixture
def own_handlers(here: None) -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_a_scripts_own_handlers_stay() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))

    def later() -> None:
        signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))

    def send() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)

    with open_session(every=100) as ft:
        idle(ft, 9, {2: later, 4: send})
    assert heard == [signal.SIGUSR1, signal.SIGUSR2]
    assert committed() == [9]
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard[2:] == [signal.SIGUSR2]


@pytest.mark.usefixtures("own_handlers")
def test_handlers_are_there_from_the_session_to_its_end() -> None:
    with open_session() as ft:
        assert callable(signal.getsignal(signal.SIGUSR1))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        idle(ft, 2)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.usefixtures("own_handlers")
def test_a_forked_child_has_its_handlers_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if [signal.getsignal(number) for number in numbers] == before else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert signal.getsignal(signal.SIGTERM) is not before[0]

    with open_session() as ft:
        idle(ft, 4, {2: fork})
    fork_after = [signal.getsignal(number) for number in numbers]
    assert codes == [0]
    assert fork_after == before


@pytest.fixture
def request_of_rank_0() -> Iterator[StopRequest]:
    request = StopRequest(0, launched=False)
    request.listen_for_requests()
    request.listen()
    yield request
    request.unlisten()


def test_a_warning_and_the_end_that_follows_are_not_two_requests(
    request_of_rank_0: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_SAME_REQUEST", 0.1)
    alone = Agreement(Place(), None, first_point=1)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(stopping._SAME_REQUEST * 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert request_of_rank_0.heard(alone) == "SIGTERM"


@pytest.mark.parametrize(("launched", "code"), [(False, -signal.SIGTERM), (True, 0)])
def test_what_a_launcher_passes_on_late_is_no_second_request(launched: bool, code: int) -> None:
    program = f"""
import os, signal, time
from ftrun.session import stopping

stopping._SAME_REQUEST, stopping._PASSED_ON = 0.1, 600.0
stopping.StopRequest(0, launched={launched}).listen()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == code


def test_a_wish_to_save_counts_once(request_of_rank_0: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_SAME_REQUEST", 30.0)  # whatever this process has to wait for meanwhile
    alone = Agreement(Place(), None, first_point=1)
    assert not request_of_rank_0.save_wanted(alone)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert request_of_rank_0.save_wanted(alone)
    assert not request_of_rank_0.save_wanted(alone)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not request_of_rank_0.save_wanted(alone)  # met already
    assert request_of_rank_0.heard(alone) is None


# --- scripted faults that look like them


FAULT = """
import os, sys
from ftrun import inject
from ftrun.contract import WorkerContract

inject.fire_if_due(WorkerContract.from_environment(os.environ), 0, 1)
print("went on")
"""


def start_with_fault(launch: Launch, do: str) -> subprocess.Popen[str]:
    launch(faults=(Fault(at_step=1, rank=0, do=do),))
    return subprocess.Popen([sys.executable, "-c", FAULT], stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("here")
def test_a_scripted_segfault_is_one(launch: Launch) -> None:
    process = start_with_fault(launch, "segv")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (-signal.SIGSEGV, "")


@pytest.mark.usefixtures("here")
def test_a_scripted_stop_ends_with_sigcont(launch: Launch) -> None:
    process = start_with_fault(launch, "stop")
    eventually(lambda: process_state.letter(process.pid) == "T", 30, "it to stop")
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "went on\n")


@pytest.mark.usefixtures("here")
def test_a_scripted_loop_keeps_a_core_busy(launch: Launch) -> None:
    process = start_with_fault(launch, "spin")
    try:
        eventually(lambda: psutil.Process(process.pid).cpu_times().user > 0.5, 60, "half a second of work")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=30)
