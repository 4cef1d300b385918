"""Who is at fault, and what follows: tables, one line for each rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.contract import RESERVED_CODES, ExitCode
from ftrun.error_file import ErrorRecord
from ftrun.launch.failure import Failure, Kind, RankExit, explain, shell_code, signal_name
from ftrun.launch.policy import Decision, Limits, Situation, backoff, decide


def ended(rank: int, code: int, message: str | None = None, time: float = 0.0, kind: str = "exception") -> RankExit:
    error = None if message is None else ErrorRecord(message, time=time, kind=kind)
    return RankExit(rank, 1000 + rank, code, error)


GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
RESET = "RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Read error: Connection reset by peer"
NCCL = "DistBackendError: NCCL error: remote process exited or there was a network error, ncclRemoteError"
STORE = "DistNetworkError: Broken pipe"
HEARD = "AgreementTimeout: heard nothing from rank 1 for 30 s"
OWN = "ValueError: loss is NaN"

# what is seen: (rank at fault, kind, victims)
FAULTS = {
    "killed": ([ended(1, -9)], 1, Kind.KILLED, ()),
    "killed, and gloo says so on the peers": ([ended(0, 1, GLOO, 9.0), ended(1, -9)], 1, Kind.KILLED, (0,)),
    "killed, and the peers' stories are older": (
        [ended(0, 1, RESET, 1.0), ended(2, 1, NCCL, 2.0), ended(3, 1, STORE, 3.0), ended(1, -9)],
        1,
        Kind.KILLED,
        (0, 2, 3),
    ),
    "killed, and a peer aborts": ([ended(0, -6), ended(1, -9)], 1, Kind.KILLED, (0,)),
    "killed, and a peer was asked to end": ([ended(0, -15), ended(1, -9)], 1, Kind.KILLED, (0,)),
    "killed, and another raised before": ([ended(0, 1, OWN, 1.0), ended(1, -9)], 1, Kind.KILLED, (0,)),
    "the first exception by time": (
        [ended(0, 1, OWN, 20.0), ended(1, 1, OWN, 10.0), ended(2, 1, OWN, 30.0)],
        1,
        Kind.CODE_ERROR,
        (0, 2),
    ),
    "exception, and an older story of a peer": (
        [ended(0, 1, GLOO, 1.0), ended(1, 1, OWN, 10.0)],
        1,
        Kind.CODE_ERROR,
        (0,),
    ),
    "exception, and a plain exit": ([ended(0, 1), ended(1, 1, OWN, 5.0)], 1, Kind.CODE_ERROR, (0,)),
    "exception whose time is unknown": ([ended(0, 1, OWN, 0.0), ended(1, 1, OWN, 5.0)], 1, Kind.CODE_ERROR, (0,)),
    "torn error file": ([ended(0, 1, "unreadable error file (3 bytes)")], 0, Kind.CODE_ERROR, ()),
    "only stories of peers: the first": (
        [ended(0, 1, GLOO, 9.0), ended(1, 1, HEARD, 8.0)],
        1,
        Kind.CODE_ERROR,
        (0,),
    ),
    "plain exits: the lowest rank": ([ended(2, 3), ended(1, 4)], 1, Kind.EXIT, (2,)),
    "aborted alone": ([ended(1, -6)], 1, Kind.CRASHED, ()),
    "abort is a consequence of an exception": ([ended(0, -6), ended(1, 1, OWN, 5.0)], 1, Kind.CODE_ERROR, (0,)),
    "abort before a story of a peer": ([ended(0, 1, GLOO, 1.0), ended(1, -6)], 1, Kind.CRASHED, (0,)),
    "segmentation fault": ([ended(0, 1, GLOO, 1.0), ended(1, -11)], 1, Kind.CRASHED, (0,)),
    "bus error": ([ended(0, -7)], 0, Kind.CRASHED, ()),
    "interrupted": ([ended(0, -2), ended(1, -2)], 0, Kind.KILLED, (1,)),
    "asked to end": ([ended(1, -15)], 1, Kind.KILLED, ()),
    "usage": ([ended(0, 2, "StateMismatch: w", 1.0, "usage"), ended(1, 1, GLOO, 0.5)], 0, Kind.USAGE, (1,)),
    "corrupt": (
        [ended(1, 1, "CorruptCheckpoint: crc", 1.0, "corrupt_checkpoint"), ended(0, 1, GLOO, 2.0)],
        1,
        Kind.CORRUPT_CHECKPOINT,
        (0,),
    ),
    "stopped": ([ended(0, 75), ended(1, 75)], 0, Kind.STOPPED, (1,)),
    "stopped, and the last ones lose their peer": ([ended(0, 1, GLOO, 1.0), ended(1, 75)], 1, Kind.STOPPED, (0,)),
    "stopped, and a peer aborts for it": ([ended(0, -6), ended(1, 75)], 1, Kind.STOPPED, (0,)),
    "one fails while the others stop": ([ended(0, 75), ended(1, 1)], 1, Kind.EXIT, (0,)),
    "one raises while the others stop": ([ended(0, 75), ended(1, 1, OWN, 3.0)], 1, Kind.CODE_ERROR, (0,)),
    "one is killed while the others stop": ([ended(0, 75), ended(1, -9)], 1, Kind.KILLED, (0,)),
    "a usage code without its error is an exit": ([ended(0, 2)], 0, Kind.EXIT, ()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_who_is_at_fault(name: str) -> None:
    exits, rank, kind, victims = FAULTS[name]
    for order in itertools.permutations(exits):
        failure = explain(order)
        assert (failure.rank, failure.kind, failure.victims) == (rank, kind, victims)
    assert failure.exit_code == next(each.exit_code for each in exits if each.rank == rank)


def test_the_corrupt_checkpoint_is_named() -> None:
    error = ErrorRecord("CorruptCheckpoint: crc differs", time=1.0, kind="corrupt_checkpoint", attempt="e1-s2-x")
    assert explain([RankExit(0, 1, 1, error)]).attempt == "e1-s2-x"
    assert explain([ended(0, 1)]).attempt == ""


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (ended(1, -9), "rank 1 was ended by SIGKILL"),
        (ended(1, -11), "rank 1 was ended by SIGSEGV"),
        (ended(1, -99), "rank 1 was ended by signal 99"),
        (ended(3, 7), "rank 3 exited with code 7"),
        (ended(0, 1, OWN), "rank 0: ValueError: loss is NaN"),
        (ended(0, 2, "StateMismatch: shapes differ", kind="usage"), "rank 0: shapes differ"),
        (ended(0, 2, "UsageError: no such thing", kind="usage"), "rank 0: no such thing"),
    ],
)
def test_messages_for_people(seen: RankExit, message: str) -> None:
    assert explain([seen]).message.startswith(message)


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
def test_the_verdict_does_not_depend_on_the_order_of_the_evidence(seen: list, random: object) -> None:
    exits = [ended(rank, code, message, time, kind) for rank, (code, message, time, kind) in enumerate(seen)]
    verdict = explain(exits)
    random.shuffle(exits)
    assert explain(exits) == verdict
    assert {verdict.rank, *verdict.victims} == set(range(len(seen)))
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
        (Kind.CRASHED, -11, 139),
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


# --- decisions

KILLED = Failure(Kind.KILLED, 1, -9, "rank 1 was ended by SIGKILL")
RAISED = Failure(Kind.CODE_ERROR, 0, 1, "rank 0: ValueError")
LEFT = Failure(Kind.EXIT, 0, 3, "rank 0 exited with code 3")
WRONG = Failure(Kind.USAGE, 0, 2, "rank 0: shapes differ")
CORRUPT = Failure(Kind.CORRUPT_CHECKPOINT, 0, 1, "rank 0: crc", attempt="e1")
STOPPED = Failure(Kind.STOPPED, 0, 75, "rank 0 exited with code 75")

DEFAULT = Limits()
COUNTED = Limits(max_restarts=2, exactly=True)
CAPPED = Limits(max_restarts=2)


def at(failure: Failure, restarts: int = 0, streak: int = 0, *, made_a_step: bool = True) -> Situation:
    return Situation(failure, restarts, streak, made_a_step)


# name: (situation, limits, restart, exit code, outcome, part of the reason)
DECISIONS = {
    "the first failure": (at(KILLED), DEFAULT, True, 0, "", "1 of 3 allowed before the next commit"),
    "the third in a row": (at(KILLED, 2, 2), DEFAULT, True, 0, "", "3 of 3 allowed"),
    "one too many in a row": (at(KILLED, 3, 3), DEFAULT, False, 76, "gave_up", "3 restarts in a row without a new"),
    "one is the limit": (at(KILLED, 1, 1), Limits(no_progress=1), False, 76, "gave_up", "1 restart in a row"),
    "commits refill the budget": (at(KILLED, 50, 0), DEFAULT, True, 0, "", "1 of 3 allowed"),
    "before the first step": (at(RAISED, made_a_step=False), DEFAULT, False, 1, "failed", "before the first step"),
    "killed before it": (at(KILLED, made_a_step=False), DEFAULT, False, 137, "failed", "before the first step"),
    "left before it": (at(LEFT, made_a_step=False), DEFAULT, False, 3, "failed", "before the first step"),
    "usage": (at(WRONG), DEFAULT, False, 2, "failed", "the same start would end the same way"),
    "usage, with restarts": (at(WRONG), COUNTED, False, 2, "failed", "the same start"),
    "stopped": (at(STOPPED), DEFAULT, False, 75, "stopped", "with a commit"),
    "stopped, counted": (at(STOPPED, 9, 9), COUNTED, False, 75, "stopped", "with a commit"),
    "stopped before a step": (at(STOPPED, made_a_step=False), DEFAULT, False, 75, "stopped", "with a commit"),
    "corrupt": (at(CORRUPT, made_a_step=False), DEFAULT, True, 0, "", "the next older one is used"),
    "corrupt, budget spent": (at(CORRUPT, 9, 9), DEFAULT, True, 0, "", "the next older one is used"),
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
    "in all: below": (at(LEFT, 1, 0), CAPPED, True, 0, "", "1 of 3 allowed"),
    "in all: used": (at(LEFT, 2, 0), CAPPED, False, 3, "failed", "all 2 restarts are used (restart.max_restarts)"),
    "in all: none": (at(LEFT), Limits(max_restarts=0), False, 3, "failed", "all 0 restarts"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    situation, limits, restart, code, outcome, reason = DECISIONS[name]
    made = decide(situation, limits)
    assert (made.restart, made.exit_code, made.outcome) == (restart, code, outcome)
    assert reason in made.reason


def test_back_off() -> None:
    limits = Limits(backoff_first=1.0, backoff_max=10.0)
    assert [backoff(streak, limits) for streak in range(7)] == [0, 1, 2, 4, 8, 10, 10]
    assert backoff(10**6, limits) == 10
    assert decide(at(KILLED, 2, 2), replace(limits, no_progress=5)).delay == 2
    assert decide(at(KILLED), limits).delay == 0
    assert decide(at(RAISED, 1, 1), COUNTED).delay == 0  # as under torchrun


@given(
    st.sampled_from([KILLED, RAISED, LEFT, WRONG, CORRUPT, STOPPED]),
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
    ),
)
def test_a_decision_is_a_restart_or_an_end_with_a_code(
    failure: Failure, restarts: int, streak: int, made_a_step: bool, limits: Limits
) -> None:
    made: Decision = decide(at(failure, restarts, streak, made_a_step=made_a_step), limits)
    assert made.reason
    if made.restart:
        assert 0 <= made.delay <= limits.backoff_max
        assert (made.exit_code, made.outcome) == (0, "")
    else:
        assert made.exit_code != 0
        assert made.outcome in ("stopped", "failed", "gave_up")
        assert (made.exit_code == 75) == (made.outcome == "stopped")
        assert (made.exit_code == 76) == (made.outcome == "gave_up")
