"""How a launcher leaves, with which outcome and which code; and which signals make it leave."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from ftrun.launch import supervise, torch_seams
from ftrun.launch.agent import Agent
from ftrun.launch.nodes_group import Group
from ftrun.launch.policy import Decision
from ftrun.rendezvous.endpoint import Endpoint
from ftrun.rendezvous.handler import Handler
from ftrun.rendezvous.model import Terms
from ftrun.rendezvous.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

FELL = RunResult(state=WorkerState.FAILED)


@pytest.mark.parametrize(
    ("decision", "left"),
    [
        (Decision(restart=False, reason="no", exit_code=3, outcome="gave_up"), ("gave_up", 3)),
        (Decision(restart=False, reason="asked", exit_code=75, outcome="stopped"), ("stopped", 75)),
        (Decision(restart=True, reason="again"), ("failed", 1)),  # and torch allows none
        (None, ("failed", 1)),
    ],
)
def test_after_a_fall(decision: Decision | None, left: tuple[str, int]) -> None:
    director: Any = SimpleNamespace(decision=decision, rank_at_fault=-1, cause="")
    plan: Any = SimpleNamespace(job=SimpleNamespace(config=SimpleNamespace(exit_codes="ftrun")))
    console: Any = None
    assert supervise._after_end(FELL, plan, director, None, console) == left


@pytest.mark.parametrize(
    ("codes", "meets", "left"),
    [
        ([0, 0], False, ("finished", 0)),
        ([0, 0], True, ("stopped", 75)),  # they have to be started once more: another node was lost
        ([0, None], False, ("stopped", 75)),
        ([75, 75], False, ("stopped", 75)),
        ([], True, ("stopped", 75)),
    ],
)
def test_after_a_signal(codes: list[int | None], meets: bool, left: tuple[str, int]) -> None:
    agent: Any = SimpleNamespace(exit_codes=lambda: codes, meets=meets, interrupted=False)
    director: Any = SimpleNamespace(
        sessions_lead=lambda: True,
        outcome_of_success=lambda: "finished",
        commit_step=lambda: 10,
        how_to_continue="the same command goes on",
    )
    console: Any = SimpleNamespace(say=lambda _: None)
    stopped = SignalException("stopped", signal.SIGTERM)
    assert supervise._after_signal(stopped, agent, director, console) == left


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TOUCHED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def agent() -> Iterator[Agent]:
    """One of many nodes that hasn't met the others yet, in a process whose handlers are as at its start."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in TOUCHED}
    handler = Handler(Settings(Endpoint("127.0.0.1", 29400), "run", Terms(1, 2)))  # nothing is opened there yet
    nobody: Any = None
    spec = WorkerSpec("default", 1, handler, entrypoint="python")
    logs: Any = DefaultLogsSpecs()
    yield Agent(spec, logs, nobody, nobody, nobody, group=Group(handler), interval=0.1)
    handler.shutdown()
    for number, handled in before.items():
        signal.signal(number, handled)


def ends() -> set[signal.Signals]:
    return {number for number in TOUCHED if signal.getsignal(number) is torch_seams.end}


def test_signals_end_a_launcher_that_has_no_workers_yet(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    agent.listen()
    assert ends() == set(ENDING)
    assert callable(signal.getsignal(signal.SIGUSR1))


def test_what_is_no_signal_or_cannot_be_heard_is_passed_over(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGFOO, SIGKILL,,SIGUSR1")
    agent.listen()
    assert ends() == {signal.SIGTERM, signal.SIGUSR1}


def test_a_launcher_under_nohup_goes_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    agent.listen()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert ends() == set(ENDING) - {signal.SIGHUP}
