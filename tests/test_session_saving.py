"""When a Session saves, and when it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from conftest import eventually
from session_kit import Broken, Launch, committed, fall, idle, of, open_session, path_of
from torch import nn

import ftrun
from ftrun import events, pulse
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.memory.tier import Tier
from ftrun.contract import Every, Fault
from ftrun.errors import UsageError
from ftrun.inject import InjectedFault
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun import Session

    E = TypeVar("E", bound=events.Event)

pytestmark = pytest.mark.usefixtures("here")


def test_saves_every_so_many_steps_and_at_the_end() -> None:
    with open_session(every=4) as ft:
        assert (ft.step, ft.resume, ft.rank, ft.world_size, ft.local_rank) == (0, None, 0, 1, 0)
        idle(ft, 10)
        assert ft.step == 10
        assert committed() == [10, 8, 4]
    assert [(each.step, each.reason) for each in of(events.Saved)] == [(4, "interval"), (8, "interval"), (10, "last")]
    assert of(events.StepsEnded) == [events.StepsEnded(step=10, finished=True)]
    assert of(events.RunEnded) == [events.RunEnded(outcome="finished", exit_code=0)]


def test_a_save_of_the_last_step_is_not_made_twice() -> None:
    with open_session(every=5) as ft:
        idle(ft, 10)
    assert [(each.step, each.reason) for each in of(events.Saved)] == [(5, "interval"), (10, "interval")]


def test_a_second_save_at_one_step_does_nothing() -> None:
    with open_session(every=100) as ft:

        def save() -> None:
            ft.save()
            assert not ft.should_save()
            ft.save()

        idle(ft, 5, {3: save})
    assert [(each.step, each.reason) for each in of(events.Saved)] == [(3, "user"), (5, "last")]


def test_should_save_is_true_once_at_a_due_step() -> None:
    with open_session(every=2) as ft:
        due = []
        for _ in range(5):
            ft.step_end()
            due.append((ft.step, ft.should_save(), ft.should_save()))
            if ft.should_save():
                ft.save()
                assert not ft.should_save()
    assert due == [(1, False, False), (2, True, True), (3, False, False), (4, True, True), (5, False, False)]
    assert committed() == [4, 2]
    with open_session(every=2) as ft:
        assert ft.step == 4
        assert not ft.should_save()


def test_a_save_before_the_first_step_holds_the_beginning() -> None:
    model = nn.Linear(2, 2)
    with open_session(every=100) as ft:
        ft.track(model=model)
        ft.save()
    with open_session() as ft:
        other = nn.Linear(2, 2)
        ft.track(model=other)
        assert (ft.step, ft.resume.step if ft.resume else None) == (0, 0)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("every", [0, -1, 2.5, "10"])
def test_an_interval_is_a_whole_number_of_steps(every: Any) -> None:
    with pytest.raises(UsageError, match="whole number from 1"), ftrun.Session.open(every=every):
        pytest.fail("must not open")


def test_the_job_decides_the_interval_before_the_script(launch: Launch) -> None:
    launch(every=Every(steps=3))
    with open_session(every=2) as ft:
        idle(ft, 7)
    assert committed() == [7, 6, 3]


def test_an_interval_in_seconds(launch: Launch) -> None:
    launch(every=Every(seconds=0.05), keep_last=100)
    with ftrun.Session.open() as ft:
        waiting = iter(ft.steps(total=100_000))
        eventually(lambda: next(waiting, None) is None or len(of(events.Saved)) >= 2, what="a second save")
    saved = of(events.Saved)
    assert len(saved) >= 2
    assert {each.reason for each in saved} == {"interval"}
    assert sorted(committed()) == [each.step for each in saved]


def test_an_interval_in_seconds_in_a_loop_of_ones_own(launch: Launch) -> None:
    launch(every=Every(seconds=0.05))
    with ftrun.Session.open() as ft:

        def made_a_save() -> bool:
            ft.step_end()
            due = ft.should_save()
            if due:
                ft.save()
                assert not ft.should_save()
            return due

        eventually(made_a_save, what="a save")
        step = ft.step
    assert committed() == [step]


def test_a_very_long_interval_saves_at_the_end_only(launch: Launch) -> None:
    launch(every=Every(seconds=3600.0))
    with ftrun.Session.open() as ft:
        idle(ft, 50)
    assert committed() == [50]


def test_the_pulse_says_how_far_the_run_is(launch: Launch) -> None:
    contract = launch(every=Every(steps=4))
    with pytest.raises(Broken), ftrun.Session.open() as ft:
        idle(ft, 9, {6: fall})
    beat = launch.beat(contract)
    assert (beat.step, beat.base, beat.total, beat.owned) == (6, 0, 9, True)
    contract = launch()
    with ftrun.Session.open() as ft:
        beat = launch.beat(contract)
        assert (beat.step, beat.base, beat.made_a_step) == (4, 4, False)
        idle(ft, 9)
    beat = launch.beat(contract)
    assert (beat.step, beat.base, beat.phase) == (9, 4, pulse.Phase.END)


@pytest.mark.parametrize("own", [False, True])
def test_a_scripted_fault_fires_once_before_its_step(launch: Launch, own: bool) -> None:
    fault = (Fault(at_step=3, rank=0, do="raise"), Fault(at_step=2, rank=1, do="raise"))

    def loop() -> list[int]:
        made = []
        with ftrun.Session.open() as ft:
            if own:
                while ft.step < 5:
                    made.append(ft.step)
                    ft.step_end()
            else:
                made.extend(ft.steps(total=5))
        return made

    launch(faults=fault, every=Every(steps=1))
    with pytest.raises(InjectedFault, match="step 3 on rank 0"):
        loop()
    launch(faults=fault)
    assert loop() == ([0, 1, 2, 3, 4] if own else [2, 3, 4])


def in_the_way() -> Callable[[], None]:
    """Make the storage unusable; what makes it usable again."""
    directory = RunDir(path_of("run")).checkpoints / "ckpt"
    away = directory.with_name("away")
    directory.mkdir(parents=True, exist_ok=True)
    directory.rename(away)
    directory.write_text("in the way")

    def back() -> None:
        directory.unlink()
        # One by one: a keeper that tries just now makes the directory anew.
        directory.mkdir(exist_ok=True)
        for each in away.iterdir():
            each.rename(directory / each.name)
        away.rmdir()

    return back


def await_waiting() -> None:
    tier = Tier.of(path_of("run"), 0)

    def waiting() -> bool:
        progress = Progress.read(tier)
        return progress is not None and progress.waiting != ""

    eventually(waiting, what="the keeper waits for the storage")


def test_a_storage_that_is_away_for_a_while_costs_no_commit() -> None:
    undo: list[Callable[[], None]] = []

    def break_it() -> None:
        eventually(lambda: len(of(events.Committed)) == 1, what="the first commit")
        undo.append(in_the_way())

    def repair_it() -> None:
        await_waiting()
        undo.pop()()

    with open_session() as ft:
        idle(ft, 17, {7: break_it, 13: repair_it})
    assert of(events.SaveFailed) == []
    assert [each.step for each in of(events.Committed)] == [5, 10, 15, 17]


def test_a_last_state_waits_until_the_storage_is_back() -> None:
    undo: list[Callable[[], None]] = []

    def mend() -> None:
        await_waiting()
        undo.pop()()

    mender = threading.Thread(target=mend)
    with open_session(every=None) as ft:
        undo.append(in_the_way())
        mender.start()
        idle(ft, 3)
    mender.join(60)
    assert committed() == [3]
    assert of(events.RunEnded) == [events.RunEnded(outcome="finished", exit_code=0)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that is away is given up, and a last state tried again, after moments."""
    monkeypatch.setattr("ftrun.session.checkpoints.RETRY_DELAYS", (0.01,))
    monkeypatch.setattr("ftrun.session.alone.STORAGE_SECONDS", 0.5)


@pytest.mark.usefixtures("impatient")
def test_a_save_that_is_given_up_is_reported_and_training_goes_on() -> None:
    undo: list[Callable[[], None]] = []

    def repair_it() -> None:
        eventually(lambda: of(events.SaveFailed), what="the failure")
        undo.pop()()

    def break_it() -> None:
        eventually(lambda: of(events.Committed), what="the first commit")
        undo.append(in_the_way())

    with open_session() as ft:
        idle(ft, 17, {7: break_it, 13: repair_it})
    (failure,) = of(events.SaveFailed)
    assert failure.step == 10
    assert "was not committed" in failure.error
    assert committed()[:2] == [17, 15]


def test_one_loop_over_steps_is_not_inside_another() -> None:
    with open_session() as ft:
        for _ in ft.steps(total=1):
            with pytest.raises(UsageError, match="can't be inside another"):
                next(iter(ft.steps(total=1)))


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_run_whose_last_state_can_not_be_committed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    # The storage stays away: nobody waits for it here as long as a user would.
    monkeypatch.setattr("ftrun.session.alone._FINISH_SECONDS", 0.5)

    def break_it() -> None:
        eventually(lambda: of(events.Committed), what="the first commit")
        in_the_way()

    with pytest.raises(ftrun.FtrunError, match="was not committed"), open_session(every=5) as ft:
        idle(ft, 8, {7: break_it})
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


def test_a_change_past_torch_after_the_last_save_costs_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    with open_session(every=None) as ft:
        model = nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ft.track(model=model, optimizer=optimizer)
        for step in range(1, 5):
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
            ft.step_end()
            if step < 4:
                ft.save()
        with held(ft):
            ft.save()
            model.weight.data.view(-1).numpy()[:] += 1.0
        wanted = model.weight.detach().clone()
    assert "changed outside an optimizer step" in caplog.text
    assert "it is taken again in" in caplog.text
    assert committed()[0] == 4
    with open_session(every=None) as ft:
        again = nn.Linear(512, 512)
        ft.track(model=again, optimizer=None)
        assert ft.step == 4
        assert torch.equal(again.weight, wanted)


@contextlib.contextmanager
def held(ft: Session) -> Iterator[None]:
    """For the length of a block the helper copies nothing: a change in it comes before the copy."""
    stager, gate = ft._checkpoints._saver._stager, threading.Event()
    assert stager.settle(60)
    stager.in_background(lambda: gate.wait(120) and None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stager, "settle", lambda _timeout: True)  # else the save would wait for the gate
        yield
    gate.set()


def test_a_save_under_way_when_the_script_fails_is_committed_still() -> None:
    with pytest.raises(Broken), open_session() as ft:
        idle(ft, 20, {5: fall})
    assert committed() == [5]
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


# ---------------------------------------------------------------- when it stops


def test_a_requested_stop_saves_and_leaves_with_75() -> None:
    with pytest.raises(SystemExit) as leaving, open_session(every=None) as ft:
        idle(ft, 1_000_000, {3: ft.request_stop})
    assert leaving.value.code == 75
    (saved,) = of(events.Saved)
    assert saved.reason == "stop"
    assert committed() == [saved.step]
    assert of(events.StepsEnded) == [events.StepsEnded(step=saved.step, finished=False)]
    assert of(events.RunEnded) == [events.RunEnded(outcome="stopped", exit_code=75)]
    with open_session() as ft:
        assert ft.step == saved.step > 3
        assert ft.resume is not None
        assert ft.resume.reason == "stop"


def test_a_stop_is_honoured_in_a_loop_of_ones_own() -> None:
    def loop(ft: Session) -> None:
        ft.request_stop("enough")
        while not ft.should_stop():
            ft.step_end()

    with pytest.raises(SystemExit) as leaving, open_session(every=None) as ft:
        loop(ft)
    assert leaving.value.code == 75
    assert committed() == [ft.step]
    assert of(events.RunEnded) == [events.RunEnded(outcome="stopped", exit_code=75)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_a_stop(number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as leaving, open_session() as ft:
        idle(ft, 1_000_000, {2: lambda: os.kill(os.getpid(), number)})
    assert leaving.value.code == 75
    assert committed()


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with open_session() as ft:
        idle(ft, 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_script_that_leaves_with_a_code_of_its_own_failed() -> None:
    with pytest.raises(SystemExit) as leaving, open_session() as ft:
        idle(ft, 20, {4: lambda: sys.exit(3)})
    assert leaving.value.code == 3
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


def test_breaking_out_of_steps_is_allowed_and_resumes_at_the_last_commit() -> None:
    with open_session() as ft:
        for step in ft.steps(total=20):
            if step == 7:
                break
        assert ft.step == 7
    with open_session() as ft:
        assert ft.step == 5
