"""Where the seconds went, what has happened, and the curve of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ftrun import events
from ftrun.events import (
    AttemptStarted,
    Committed,
    Failed,
    FaultInjected,
    IntervalChosen,
    Met,
    Record,
    Restored,
    RunEnded,
    RunStarted,
    Saved,
    SaveFailed,
    SaveSkipped,
    Step,
    StepsBegan,
    StepsEnded,
)
from ftrun.goodput import history, ledger, plot, screen
from ftrun.goodput.history import History
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LAUNCHED = RunStarted("run", ["ftrun"], 123, "host", 2, False, {})
ENDED = RunEnded("finished", 0)


def attempt(resume_step: int = 0) -> AttemptStarted:
    return AttemptStarted(1, 2, None, resume_step, {})


def fell(step: int, lost: int = 0, *, restart: bool = True, message: str = "rank 1 died") -> Failed:
    return Failed("killed", 1, -9, message, step, lost, "restart 1 of 3", restart)


def records(*timed: tuple[float, events.Event], number: int = 1) -> list[Record]:
    """Records of events at given times; the attempt counts up with each start of the worker group."""
    made, number = [], 0
    for at, event in timed:
        number += isinstance(event, AttemptStarted)
        made.append(Record(at, number, None, event))
    return made


CLEAN = (
    (100.0, LAUNCHED),
    (101.0, attempt()),
    (104.0, StepsBegan(0, 10)),
    (105.0, Step(1)),
    (109.0, Step(5)),
    (109.5, Saved(5, "interval", 0.25, 10)),
    (110.0, Committed(5, "e1", 0.5, 10)),
    (114.0, Step(10)),
    (114.0, StepsEnded(10, True)),
    (116.0, Committed(10, "e2", 1.0, 10)),
    (117.0, ENDED),
)
KILLED = (
    *CLEAN[:7],
    (112.0, Step(8)),
    (113.0, fell(9, 4)),
    (115.0, attempt(5)),
    (118.0, Restored(5, "e1", 0.1)),
    (119.0, StepsBegan(5, 10)),
    (120.0, Step(6)),
    (122.0, Step(8)),
    (123.0, Step(9)),
    (125.0, Step(10)),
    (125.0, StepsEnded(10, True)),
    (126.0, ENDED),
)

# name: (events, until, seconds by class in the order of the ledger)
BOOKS = {
    "nothing": ((), None, (0, 0, 0, 0, 0, 0)),
    "nothing yet, and time passes": ((), 50.0, (0, 0, 0, 0, 0, 0)),
    "a clean run": (CLEAN, None, (4.0, 9.75, 0.25, 0, 0, 3.0)),
    "a killed rank": (KILLED, None, (4.0, 8.75 + 2.0, 0.25, 4.0, 6.0, 1.0)),
    "still starting": (CLEAN[:2], 103.0, (3.0, 0, 0, 0, 0, 0)),
    "still training": (CLEAN[:4], 108.0, (4.0, 4.0, 0, 0, 0, 0)),
    "still recovering": (KILLED[:9], 120.0, (4.0, 8.75, 0.25, 0, 7.0, 0)),
    "not restarted": (
        (*CLEAN[:5], (112.0, fell(7, restart=False)), (113.0, ENDED)),
        None,
        (4.0, 8.0, 0, 0, 0, 1.0),
    ),
    "a launcher that vanished, and another an hour later": (
        (*CLEAN[:5], (3700.0, LAUNCHED), (3702.0, attempt()), (3703.0, StepsBegan(0, 10)), (3704.0, Step(4))),
        None,
        (4.0 + 3.0, 5.0, 0, 1.0, 0, 0),
    ),
    "stopped and continued": (
        (*CLEAN, (500.0, LAUNCHED), (502.0, StepsBegan(10, 20)), (505.0, Step(15)), (506.0, ENDED)),
        None,
        (4.0 + 2.0, 9.75 + 4.0, 0.25, 0, 0, 3.0),
    ),
    "a commit after the end is nobody's time": ((*CLEAN, (140.0, Committed(10, "e", 1.0, 1))), None, None),
    "the clock steps back": (
        ((100.0, LAUNCHED), (104.0, StepsBegan(0, 9)), (90.0, Step(1)), (103.0, Step(2)), (106.0, ENDED)),
        None,
        (4.0, 2.0, 0, 0, 0, 0),
    ),
    "the clock steps back before the next launcher": (
        ((100.0, LAUNCHED), (104.0, StepsBegan(0, 9)), (105.0, Step(1)), (50.0, LAUNCHED), (53.0, ENDED)),
        None,
        (7.0, 1.0, 0, 0, 0, 0),
    ),
    "the present is before the last event": (CLEAN[:4], 90.0, (4.0, 1.0, 0, 0, 0, 0)),
    "a save longer than what it is part of": (
        ((0.0, LAUNCHED), (1.0, StepsBegan(0, 9)), (3.0, Saved(1, "x", 5.0, 1)), (4.0, ENDED)),
        None,
        (1.0, 1.0, 2.0, 0, 0, 0),
    ),
    "a save after the last step": (
        ((0.0, LAUNCHED), (1.0, StepsBegan(0, 9)), (3.0, StepsEnded(9, True)), (4.0, Saved(9, "x", 0.5, 1))),
        None,
        (1.0, 2.0, 0, 0, 0, 1.0),
    ),
    "a save while repeating": (
        (
            *((0.0, LAUNCHED), (1.0, StepsBegan(0, 9)), (2.0, Step(5)), (3.0, fell(6)), (4.0, StepsBegan(2, 9))),
            *((7.0, Saved(4, "x", 0.5, 1)), (8.0, ENDED)),
        ),
        None,
        (1.0, 2.0, 0.5, 3.5, 1.0, 0),
    ),
}

MET, JOINED_AGAIN = (Met(number, "", ["a", "b"], 0, "host", 123) for number in (1, 2))
LEFT = RunEnded("stopped", 75)
OTHERS = (
    (100.0, LAUNCHED),
    (100.5, MET),
    (101.0, attempt()),
    (104.0, StepsBegan(0, 10)),
    (109.0, Step(5)),
)
GO_ON = ((115.0, attempt(5)), (119.0, StepsBegan(5, 10)), (121.0, Step(7)))
# The first of several nodes leaves, and the others go on: they have met before its last word, or after it.
LEAVING = {
    "before": (*OTHERS, (110.0, LEFT), (113.0, JOINED_AGAIN), *GO_ON),
    "after": (*OTHERS, (109.5, JOINED_AGAIN), (110.0, LEFT), *GO_ON),
}
BOOKS |= {
    "the first node left, and the others met": (LEAVING["before"], None, (4.0 + 6.0, 6.0 + 2.0, 0, 0, 0, 0)),
    "the others had met before it left": (LEAVING["after"], None, (4.0 + 4.0, 6.0 + 2.0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", BOOKS)
def test_where_the_seconds_went(name: str) -> None:
    timed, until, expected = BOOKS[name]
    book = ledger.account(records(*timed), until=until)
    expected = expected or BOOKS["a clean run"][2]
    # None of these waits for data: see test_filler_seen.py.
    assert book.seconds == pytest.approx(dict(zip(ledger.CLASSES, (*expected, 0), strict=True)), abs=1e-9)
    assert book.wall == pytest.approx(sum(expected))
    assert book.goodput == (pytest.approx(expected[1] / sum(expected)) if sum(expected) else 0.0)


def wall_clock(made: Sequence[Record], until: float | None) -> float:
    """The same, from times alone: of each launcher from its start to its last event, never backwards."""
    total, start, latest = 0.0, None, 0.0
    for record in made:
        if isinstance(record.event, RunStarted):
            total += latest - start if start is not None else 0.0
            start = latest = record.time
        elif start is not None:
            latest = max(latest, record.time)
            if isinstance(record.event, RunEnded):
                total, start = total + latest - start, None
    if start is not None:
        total += max(latest, until if until is not None else latest) - start
    return total


steps = st.integers(0, 20)
seconds = st.floats(0, 50)
any_event = st.one_of(
    st.just(LAUNCHED),
    st.just(ENDED),
    st.builds(attempt, steps),
    st.builds(Restored, steps, st.just("e"), seconds),
    st.builds(StepsBegan, steps, st.none() | steps),
    st.builds(Step, steps, st.dictionaries(st.just("loss"), st.none() | st.floats(0, 9)), seconds),
    st.builds(Saved, steps, st.just("x"), seconds, steps),
    st.builds(Committed, steps, st.just("e"), seconds, steps),
    st.builds(SaveFailed, steps, st.just("e"), st.just("full")),
    st.builds(FaultInjected, steps, st.just("kill")),
    st.builds(StepsEnded, steps, st.booleans()),
    st.builds(fell, steps, steps, restart=st.booleans(), message=st.sampled_from(["", "one", "two\nlines [b]"])),
)
any_run = st.lists(st.tuples(st.floats(-5, 100), any_event), max_size=25)


def timed(run: list[tuple[float, events.Event]]) -> list[Record]:
    now, made = 1000.0, []
    for passed, event in run:
        now += passed
        made.append((now, event))
    return records(*made)


@given(any_run, st.none() | st.floats(0, 5000))
def test_every_second_belongs_to_one_class(run: list[tuple[float, events.Event]], until: float | None) -> None:
    made = timed(run)
    book = ledger.account(made, until=until)
    assert set(book.seconds) == set(ledger.CLASSES)
    assert all(spent >= 0 for spent in book.seconds.values())
    assert sum(book.seconds.values()) == book.wall == pytest.approx(wall_clock(made, until), abs=1e-6)
    assert 0 <= book.goodput <= 1


@given(any_run)
def test_any_sequence_of_events_is_a_history(run: list[tuple[float, events.Event]]) -> None:
    past = History()
    for record in timed(run):
        past.add(record)
    assert past.restarts <= len(past.falls) == sum(isinstance(event, Failed) for _, event in run)
    assert past.launches == sum(isinstance(event, RunStarted) for _, event in run)
    assert all(fall.training_again is None or fall.what.restart for fall in past.falls)
    Console(quiet=True).print(screen.render(past, "runs/[run]"))


def told(*timed: tuple[float, events.Event]) -> History:
    past = History()
    for record in records(*timed):
        past.add(record)
    return past


def test_a_history_of_a_killed_run() -> None:
    past = told(*KILLED)
    assert (past.run_id, past.pid, past.host, past.launches) == ("run", 123, "host", 1)
    assert (past.started, past.last_time) == (100.0, 126.0)
    assert (past.step, past.total, past.finished, past.outcome, past.exit_code) == (10, 10, True, "finished", 0)
    assert (past.attempts, past.restarts, past.lost_steps, past.world_size) == (2, 1, 4, 2)
    assert [commit.checkpoint for commit in past.commits] == ["e1"]
    (fall,) = past.falls
    assert (fall.attempt, fall.time, fall.training_again) == (1, 113.0, 120.0)
    assert len(past.records) == len(KILLED)


def test_steps_that_a_restart_took_back() -> None:
    def loss(step: int) -> Step:
        return Step(step, {"loss": 10.0 - step})

    begun = ((0.0, LAUNCHED), (1.0, attempt()), (2.0, StepsBegan(0, 9)))
    trained = (*begun, (3.0, loss(1)), (4.0, loss(2)), (5.0, Step(3, {"loss": None})), (6.0, loss(4)))
    assert told(*trained).losses == [(1, 9.0), (2, 8.0), (4, 6.0)]
    fallen = told(*trained, (7.0, fell(5, 3)))
    assert (fallen.step, fallen.total) == (5, 9)  # how far it had come, though no event said so
    again = told(*trained, (7.0, fell(5, 3)), (8.0, attempt(2)))
    assert (again.step, again.losses, again.pace) == (2, [(1, 9.0), (2, 8.0)], None)
    on = told(*trained, (7.0, fell(5, 3)), (8.0, attempt(2)), (9.0, Step(3, {"loss": 7.5})))
    assert on.losses == [(1, 9.0), (2, 8.0), (3, 7.5)]


def test_pace_is_that_of_late() -> None:
    slow = [(float(second), Step(second)) for second in range(1, 11)]
    fast = [(10 + second / 10, Step(10 + second)) for second in range(1, 41)]
    assert told(*slow).pace == pytest.approx(1.0)
    assert told(*slow, *fast).pace == pytest.approx(10.0)
    assert told(*slow[:1]).pace is None
    assert told((5.0, Step(1)), (5.0, Step(2)), (4.0, Step(3))).pace is None


def test_a_new_launcher_is_not_the_recovery_of_the_old_one() -> None:
    vanished = (*KILLED[:9], (9000.0, LAUNCHED), (9001.0, attempt(5)), (9002.0, StepsBegan(5, 10)), (9003.0, Step(6)))
    past = told(*vanished)
    assert past.falls[0].training_again is None
    assert (past.launches, past.started, past.outcome) == (2, 100.0, None)


def test_a_finished_run_that_is_started_again_is_not_finished() -> None:
    assert told(*CLEAN).finished
    past = told(*CLEAN, (200.0, LAUNCHED))
    assert (past.finished, past.outcome, past.exit_code) == (False, None, None)
    stopped = told(*CLEAN[:-1], (117.0, RunEnded("stopped", 75)))
    assert (stopped.finished, stopped.outcome, stopped.exit_code) == (False, "stopped", 75)


@pytest.mark.parametrize("order", LEAVING)
def test_a_run_whose_first_node_left_goes_on(order: str) -> None:
    past = told(*LEAVING[order])
    assert (past.finished, past.outcome, past.exit_code) == (False, None, None)
    assert (past.step, past.attempts, past.launches) == (7, 2, 1)
    past = told(*LEAVING[order], (125.0, StepsEnded(10, True)), (126.0, ENDED))
    assert (past.finished, past.outcome, past.exit_code) == (True, "finished", 0)


def test_a_history_is_read_from_the_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert history.load(run) == History()
    run.create({})
    for record in records(*KILLED):
        line = events.encode(record.event, record.time, record.attempt, record.rank)
        with run.events().open("ab") as file:
            file.write(line)
    assert history.load(run) == told(*KILLED)


# --- the curve and the screen


def test_a_falling_line() -> None:
    assert plot.curve([(0, 1), (3, 0)], width=4, height=2) == [
        "      1 │⠑⢄",
        "      0 │  ⠑⢄",
        "        └────",
        "         0  3",
    ]


def test_a_mark_is_under_its_point() -> None:
    points = [(float(x), float(-x)) for x in range(101)]
    for mark in (0, 1, 25, 50, 75, 99, 100):
        *_, bottom, axis, _ends = plot.curve([*points[: mark + 1]], [mark], width=40, height=4)
        assert axis.rstrip().endswith("✗") or mark == 0, (mark, bottom)
    *rows, axis, _ = plot.curve(points, [50], width=64, height=10)
    at = axis.index("✗")
    dots = [row[at] for row in rows if len(row) > at]
    assert set(dots) - {"╎"}, "the curve passes where the mark is"
    assert "╎" in dots


def test_many_marks_and_marks_outside() -> None:
    points = [(10.0, 3.0), (20.0, 1.0)]
    *rows, axis, ends = plot.curve(points, [0.0, 15.0, 15.001, 40.0], width=30, height=3)
    assert axis.count("✗") == 3
    assert axis.index("✗") == axis.index("└") + 1  # what lies before is at the edge
    assert ends.split() == ["10", "40"]  # a fault after the last logged step is on the plot
    assert all(len(row) <= len(axis) for row in rows)


@pytest.mark.parametrize("points", [[(5.0, 2.0)], [(5.0, 2.0), (6.0, 2.0)], [(5.0, 0.0), (5.0, 1.0)]])
def test_flat_and_single_points_are_drawn(points: list[tuple[float, float]]) -> None:
    lines = plot.curve(points, width=10, height=3)
    assert len(lines) == 5
    assert any(0x2801 <= ord(letter) <= 0x28FF for letter in "".join(lines))


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e300, 1e300)), min_size=1, max_size=50),
    st.lists(st.floats(0, 1e9), max_size=5),
    st.integers(1, 80),
    st.integers(1, 12),
)
def test_any_curve_fits(points: list[tuple[float, float]], marks: list[float], width: int, height: int) -> None:
    lines = plot.curve(sorted(points), marks, width=width, height=height)
    assert len(lines) == height + 2
    assert all(len(line.partition("│")[2]) <= width for line in lines[:height])
    assert all(line == line.rstrip() for line in lines)
    assert ("✗" in lines[-2]) == bool(marks)


CHOSEN = IntervalChosen(seconds=1800.0, stall=0.02, between_failures=172800.0, bound="longest")


def shown(past: History) -> str:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115 - closed below
    console.print(screen.render(past, "runs/run"))
    console.file.close()
    return console.export_text()


def test_the_last_screen_says_what_became_of_saves_and_how_often_they_come() -> None:
    text = shown(told(*KILLED, (126.5, SaveSkipped(9)), (126.6, SaveSkipped(10)), (126.7, CHOSEN)))
    assert "2 saves skipped: two were still on their way" in text
    assert "at most 30m   auto: a save holds training for 0.02 s, a failure comes about every 2d" in text


def test_the_last_screen() -> None:
    logged = tuple((at, Step(e.step, {"loss": 9.0 - e.step}) if isinstance(e, Step) else e) for at, e in KILLED)
    text = shown(told(*logged, (126.5, SaveFailed(9, "e3", "full"))))
    for part in ("run  ✓ finished   runs/run", "10 of 10", "restarts   1   4 steps done again"):
        assert part in text
    assert "✗ step 9: rank 1 died; training again after 7 s" in text
    assert "1   last at step 5   1 save failed" in text
    assert "26 s" in text
    assert "training 10.8 s" in text
    assert "repeating 4 s" in text
    assert "└" in text
    assert text.count("✗") == 2  # the fall in the list, and under the curve


def test_the_last_screen_of_a_run_that_never_began() -> None:
    text = shown(told((0.0, LAUNCHED), (1.0, fell(0, restart=False, message="")), (2.0, RunEnded("failed", 1))))
    assert "✗ failed" in text
    assert "└" not in text


def test_what_comes_from_outside_is_not_taken_for_markup() -> None:
    text = shown(told((0.0, LAUNCHED), (1.0, fell(3, message="[bold]not markup[/nor this]\nsecond line"))))
    assert "[bold]not markup[/nor this]" in text
    assert "second line" not in text
