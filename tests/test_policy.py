"""What follows from a failure: a table, one line for each rule."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.config.supervisor import Budgets
from ftrun.config.units import Window
from ftrun.launch.failures.failure import Failure, Kind
from ftrun.launch.failures.kinds import NATURES
from ftrun.launch.policy import Decision, Limits, Situation, backoff, decide, is_progress


def failed(kind: Kind, code: int = 1, mark: str = "") -> Failure:
    nature = NATURES[kind]
    return Failure(kind, 0, code, "", fingerprint=mark, blame=nature.blame, retryable=nature.retryable)


KILLED = failed(Kind.KILLED, -9, "aaaa1111")
RAISED = failed(Kind.CODE_ERROR, 1, "bbbb2222")
UNREAD = failed(Kind.DATA, 1, "cccc3333")
LEFT = failed(Kind.EXIT, 3)
WRONG = failed(Kind.USAGE, 2)
AWAY = failed(Kind.STORAGE)
CORRUPT = failed(Kind.CORRUPT_CHECKPOINT)
LOST = failed(Kind.LOST_SNAPSHOT)
STOPPED = failed(Kind.STOPPED, 75)

DEFAULT = Limits()
COUNTED = Limits(max_restarts=2, exactly=True)
CAPPED = Limits(max_restarts=2)
WINDOW = Limits(window=Window(2, timedelta(hours=1)))
BUDGET = Limits(no_progress=5, budgets={"code_error": 2, "exit": 0, "killed": None})
WIDE = Limits(no_progress=9)
NOW = 10_000.0


def at(failure: Failure, restarts: int = 0, streak: int = 0, *, made_a_step: bool = True, **more: object) -> Situation:
    return Situation(failure, restarts, streak, made_a_step, now=NOW, **more)


def again(failure: Failure, times: int, step: int = 7, **more: object) -> Situation:
    """The failure after a step, when it has come there so many times before."""
    earlier = ((failure.fingerprint, step),) * times
    return at(failure, times, times, step=step, earlier=(("dddd4444", step), *earlier), **more)


# name: (situation, limits, restart, exit code, outcome, part of the reason)
DECISIONS = {
    "the first failure": (at(KILLED), DEFAULT, True, 0, "", "1 of 3 allowed before the next commit"),
    "the third in a row": (at(KILLED, 2, 2), DEFAULT, True, 0, "", "3 of 3 allowed"),
    "one too many in a row": (at(KILLED, 3, 3), DEFAULT, False, 76, "gave_up", "3 restarts in a row without a new"),
    "one is the limit": (at(KILLED, 1, 1), Limits(no_progress=1), False, 76, "gave_up", "1 restart in a row"),
    "commits refill the budget": (at(KILLED, 50, 0), DEFAULT, True, 0, "", "1 of 3 allowed"),
    "before the first step": (at(RAISED, made_a_step=False), DEFAULT, False, 1, "failed", "before the first step"),
    "killed before it": (at(KILLED, made_a_step=False), DEFAULT, True, 0, "", "1 of 3 allowed"),
    "killed before it again and again": (
        at(KILLED, 3, 3, made_a_step=False),
        DEFAULT,
        False,
        76,
        "gave_up",
        "3 restarts",
    ),
    "left before it": (at(LEFT, made_a_step=False), DEFAULT, False, 3, "failed", "before the first step"),
    "usage": (at(WRONG), DEFAULT, False, 2, "failed", "the same start would end the same way"),
    "usage, with restarts": (at(WRONG), COUNTED, False, 2, "failed", "the same start"),
    "stopped": (at(STOPPED), DEFAULT, False, 75, "stopped", "with a commit"),
    "stopped, counted": (at(STOPPED, 9, 9), COUNTED, False, 75, "stopped", "with a commit"),
    "stopped before a step": (at(STOPPED, made_a_step=False), DEFAULT, False, 75, "stopped", "with a commit"),
    "corrupt": (at(CORRUPT, made_a_step=False), DEFAULT, True, 0, "", "the next older one is used"),
    "corrupt, budget spent": (at(CORRUPT, 9, 9), DEFAULT, True, 0, "", "the next older one is used"),
    "lost snapshot": (at(LOST, made_a_step=False), DEFAULT, True, 0, "", "the newest commit is used"),
    "corrupt, counted": (at(CORRUPT, 2), COUNTED, False, 1, "failed", "all 2 restarts used (--max-restarts)"),
    "exactly: the first": (at(RAISED, made_a_step=False), COUNTED, True, 0, "", "restart 1 of 2 (--max-restarts)"),
    "exactly: the last": (at(RAISED, 1, 1), COUNTED, True, 0, "", "restart 2 of 2"),
    "exactly: used": (at(RAISED, 2, 0), COUNTED, False, 1, "failed", "all 2 restarts used"),
    "exactly: no budget in a row": (at(RAISED, 4, 4), Limits(max_restarts=9, exactly=True), True, 0, "", "5 of 9"),
    "exactly: none": (
        at(KILLED),
        Limits(max_restarts=0, exactly=True),
        False,
        137,
        "failed",
        "no restarts allowed (--max-restarts)",
    ),
    "without its node": (at(KILLED, 9, 9, left_out="node3 is excluded"), DEFAULT, True, 0, "", "node3 is excluded"),
    "without its node, again and again": (again(RAISED, 5, left_out="node3 is"), DEFAULT, True, 0, "", "node3 is"),
    "without its node, in all": (at(KILLED, 2, 0, left_out="x"), CAPPED, False, 137, "failed", "restarts are used"),
    "without its node, no step": (at(RAISED, made_a_step=False, left_out="x"), DEFAULT, False, 1, "failed", "first"),
    "without its node, counted": (at(KILLED, 1, left_out="node3 is"), COUNTED, True, 0, "", "restart 2 of 2"),
    "in all: below": (at(LEFT, 1, 0), CAPPED, True, 0, "", "1 of 3 allowed"),
    "in all: used": (at(LEFT, 2, 0), CAPPED, False, 3, "failed", "all 2 restarts are used (restart.max_restarts)"),
    "in all: none": (at(LEFT), Limits(max_restarts=0), False, 3, "failed", "all 0 restarts"),
    "window: the last that is allowed": (at(KILLED, 1, 0, failed_at=(NOW - 3599,)), WINDOW, True, 0, "", "1 of 3"),
    "window: one too many": (
        at(KILLED, 2, 0, failed_at=(NOW - 3599, NOW - 1)),
        WINDOW,
        False,
        76,
        "gave_up",
        "3 failures, and 2 in 1h are",
    ),
    "window: old ones don't count": (at(KILLED, 9, 0, failed_at=(NOW - 3601, NOW - 1)), WINDOW, True, 0, "", "1 of 3"),
    "budget: the first": (
        at(RAISED),
        BUDGET,
        True,
        0,
        "",
        "1 of 2 allowed before the next commit (restart.budgets.code_error",
    ),
    "budget: the last": (at(RAISED, 1, 1, streak_by_kind={Kind.CODE_ERROR: 1}), BUDGET, True, 0, "", "2 of 2 allowed"),
    "budget: spent": (
        at(RAISED, 2, 2, streak_by_kind={Kind.CODE_ERROR: 2}),
        BUDGET,
        False,
        76,
        "gave_up",
        "(restart.budgets.code_error)",
    ),
    "budget: of another kind": (at(KILLED, 2, 2, streak_by_kind={Kind.CODE_ERROR: 2}), BUDGET, True, 0, "", "3 of 5"),
    "budget: refilled": (at(RAISED, 9, 0), BUDGET, True, 0, "", "1 of 2"),
    "budget: none at all": (at(LEFT), BUDGET, False, 3, "failed", "(restart.budgets.exit)"),
    "budget: not before no_progress": (
        at(RAISED, 3, 3, streak_by_kind={Kind.CODE_ERROR: 0}),
        replace(BUDGET, no_progress=3),
        False,
        76,
        "gave_up",
        "(restart.no_progress)",
    ),
    "plain: the first": (
        at(KILLED, has_commit=False, session=False),
        DEFAULT,
        True,
        0,
        "",
        "1 of 3 allowed before 1h of training (restart.no_progress, restart.refill_after)",
    ),
    "plain: one too many": (
        at(KILLED, 3, 3, has_commit=False, session=False),
        DEFAULT,
        False,
        76,
        "gave_up",
        "3 restarts in a row without 1h of training (restart.no_progress, restart.refill_after)",
    ),
    "plain: nothing refills": (
        at(KILLED, has_commit=False, session=False),
        Limits(refill_after=None),
        True,
        0,
        "",
        "1 of 3 allowed before the next commit, which takes a Session (restart.no_progress)",
    ),
    "no commit ever": (at(KILLED, 3, 3, has_commit=False), DEFAULT, False, 76, "gave_up", "set checkpoint.every lower"),
    "in all wins over the window": (
        at(KILLED, 2, 0, failed_at=(NOW, NOW)),
        replace(WINDOW, max_restarts=2),
        False,
        137,
        "failed",
        "restart.max_restarts",
    ),
    "the same twice": (
        again(RAISED, 1, has_older_commit=True),
        WIDE,
        True,
        0,
        "",
        "(bbbb2222) after step 7 as before, so it goes one commit",
    ),
    "the same twice, nothing older": (
        again(RAISED, 1),
        WIDE,
        True,
        0,
        "",
        "no older commit to go back to; 2 of 9 allowed",
    ),
    "the same twice, nothing at all": (
        again(RAISED, 1, has_commit=False),
        WIDE,
        True,
        0,
        "",
        "there is no commit to go",
    ),
    "the same three times": (
        again(RAISED, 2, has_older_commit=True),
        WIDE,
        False,
        76,
        "gave_up",
        "(bbbb2222) after step 7 for the third time",
    ),
    "the same three times, with samples": (
        again(UNREAD, 2),
        WIDE,
        False,
        76,
        "gave_up",
        "look at the samples of that step",
    ),
    "the same, but elsewhere": (
        at(RAISED, 2, 2, step=8, earlier=(("bbbb2222", 7), ("bbbb2222", 7))),
        WIDE,
        True,
        0,
        "",
        "3 of 9 allowed",
    ),
    "another at the same step": (
        at(RAISED, 2, 2, step=7, earlier=(("aaaa1111", 7), ("cccc3333", 7))),
        WIDE,
        True,
        0,
        "",
        "3 of 9 allowed",
    ),
    "the same, but from outside": (again(KILLED, 2), WIDE, True, 0, "", "3 of 9 allowed"),
    "the same, at an unknown step": (
        at(RAISED, 2, 2, step=None, earlier=(("bbbb2222", 7),) * 2),
        WIDE,
        True,
        0,
        "",
        "3 of 9 allowed",
    ),
    "a checkpoint can't be read": (
        at(AWAY, 1, 1, has_older_commit=True, made_a_step=False),
        DEFAULT,
        True,
        0,
        "",
        "2 of 3 allowed",
    ),
    "again": (
        at(AWAY, 2, 2, has_older_commit=True, made_a_step=False, streak_by_kind={Kind.STORAGE: 1}),
        DEFAULT,
        True,
        0,
        "",
        "before the first step as it did before, so it goes one commit further back",
    ),
    "again, without an older one": (
        at(AWAY, 2, 2, made_a_step=False, streak_by_kind={Kind.STORAGE: 1}),
        DEFAULT,
        True,
        0,
        "",
        "3 of 3 allowed",
    ),
    "storage again, but after steps": (
        at(AWAY, 2, 2, step=7, has_older_commit=True, streak_by_kind={Kind.STORAGE: 1}),
        DEFAULT,
        True,
        0,
        "",
        "3 of 3 allowed",
    ),
    "the same, counted": (again(RAISED, 2), Limits(max_restarts=5, exactly=True), True, 0, "", "restart 3 of 5"),
}


@pytest.mark.parametrize(
    ("resumed", "newest", "trained", "expected"),
    [
        ("a", "b", None, True),
        ("a", "a", None, False),
        ("a", None, None, False),
        (None, "a", None, True),
        (None, None, None, False),
        (None, None, 3599.0, False),
        (None, None, 3600.0, True),
        ("a", "a", 3600.0, True),
        (None, "a", 1.0, True),
    ],
)
def test_what_refills_the_budgets(
    resumed: str | None, newest: str | None, trained: float | None, expected: bool
) -> None:
    assert is_progress(resumed, newest, trained, DEFAULT) is expected
    assert is_progress(resumed, newest, trained, Limits(refill_after=None)) is (newest not in (None, resumed))


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    situation, limits, restart, code, outcome, reason = DECISIONS[name]
    made = decide(situation, limits)
    assert (made.restart, made.exit_code, made.outcome) == (restart, code, outcome)
    assert reason in made.reason
    assert made.further_back == ("further back" in made.reason)


def test_what_is_retried_before_the_first_step() -> None:
    retried = {kind for kind in Kind if decide(at(failed(kind), made_a_step=False), DEFAULT).restart}
    outside = {Kind.KILLED, Kind.HARDWARE, Kind.STORAGE, Kind.PREEMPTED, Kind.UNKNOWN}
    assert retried == {*outside, Kind.CORRUPT_CHECKPOINT, Kind.LOST_SNAPSHOT}


def test_the_job_file_has_a_budget_for_each_kind_that_may_be_retried() -> None:
    counted = set(Kind) - {Kind.USAGE, Kind.STOPPED, Kind.CORRUPT_CHECKPOINT, Kind.LOST_SNAPSHOT}
    assert {kind.key for kind in counted} == set(Budgets.model_fields)


def test_what_can_t_end_in_another_way_is_not_retried() -> None:
    made = decide(at(replace(RAISED, retryable=False)), DEFAULT)
    assert (made.restart, made.reason) == (False, "the same start would end the same way")


def test_back_off() -> None:
    limits = Limits(backoff_first=1.0, backoff_max=10.0)
    assert [backoff(streak, limits) for streak in range(7)] == [0, 1, 2, 4, 8, 10, 10]
    assert backoff(10**6, limits) == 10
    assert decide(at(KILLED, 2, 2), replace(limits, no_progress=5)).delay == 2
    assert decide(at(KILLED), limits).delay == 0
    assert decide(at(RAISED, 1, 1), COUNTED).delay == 0  # as under torchrun
    assert decide(again(RAISED, 1, has_older_commit=True), limits).delay == 1


def test_jitter_only_shortens_a_wait() -> None:
    limits = Limits(backoff_first=8.0, backoff_max=10.0, jitter=0.25)
    assert [backoff(1, limits, chance) for chance in (0.0, 0.5, 1.0)] == [8, 7, 6]
    assert backoff(9, limits, 1.0) == 7.5
    assert backoff(0, limits, 1.0) == 0
    assert decide(at(KILLED, 1, 1, chance=1.0), limits).delay == 6


@given(
    st.sampled_from([KILLED, RAISED, UNREAD, LEFT, WRONG, CORRUPT, STOPPED]),
    st.integers(0, 10),
    st.integers(0, 10),
    st.booleans(),
    st.builds(
        Limits,
        no_progress=st.integers(1, 5),
        max_restarts=st.none() | st.integers(0, 5),
        exactly=st.booleans(),
        backoff_first=st.floats(0, 100),
        backoff_max=st.floats(100, 1000),
        jitter=st.floats(0, 1),
        window=st.none() | st.builds(Window, st.integers(1, 3), st.just(timedelta(hours=1))),
        budgets=st.dictionaries(st.sampled_from([kind.key for kind in Kind]), st.none() | st.integers(0, 3)),
    ),
    st.floats(0, 1),
    st.none() | st.integers(1, 9),
)
def test_a_decision_is_a_restart_or_an_end_with_a_code(
    failure: Failure, restarts: int, streak: int, made_a_step: bool, limits: Limits, chance: float, step: int | None
) -> None:
    more = {"chance": chance, "step": step, "earlier": ((failure.fingerprint, 3),) * restarts}
    situation = at(failure, restarts, streak, made_a_step=made_a_step, streak_by_kind={failure.kind: streak}, **more)
    made: Decision = decide(situation, limits)
    assert made.reason
    if made.restart:
        assert 0 <= made.delay <= limits.backoff_max
        assert (made.exit_code, made.outcome) == (0, "")
    else:
        assert made.exit_code != 0
        assert made.outcome in ("stopped", "failed", "gave_up")
        assert (made.exit_code == 75) == (made.outcome == "stopped")
        assert (made.exit_code == 76) == (made.outcome == "gave_up")
