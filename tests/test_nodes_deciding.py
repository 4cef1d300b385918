"""What several nodes decide together: whose rendezvous it is, how long to wait for each other, what all know."""

from __future__ import annotations

import signal
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rendezvous_kit import SECONDS, unhurried
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from ftrun.config.health import Nodes
from ftrun.config.origins import Resolved
from ftrun.errors import UsageError
from ftrun.health.history import Marked
from ftrun.health.marks import Sign
from ftrun.health.memory import About, NodeMemory
from ftrun.health.nodes_file import NodesFile
from ftrun.launch import nodes_address, nodes_choice, nodes_patience
from ftrun.launch.agent import Agent
from ftrun.launch.failures.kinds import Kind
from ftrun.launch.nodes_group import Group
from ftrun.launch.nodes_others import Others
from ftrun.launch.nodes_past import Told, merged
from ftrun.launch.past import Past
from ftrun.launch.remembering import Remembering, rules
from ftrun.launch.timeline import Clock
from ftrun.pulse import Phase
from ftrun.rendezvous.model import Round as Members
from ftrun.rendezvous.model import Who
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS = {
    "nnodes": "1:1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "standalone": False,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": None,
}


def launch(**given: object) -> dict[str, Resolved]:
    defaults = {name: Resolved(value, "default") for name, value in DEFAULTS.items()}
    return defaults | {name: Resolved(value, "command line") for name, value in given.items()}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"nnodes": "2:4", "rdzv_endpoint": "a:1"}, True),
        ({"nnodes": "2", "rdzv_endpoint": "a:1"}, True),
        ({"nnodes": "1", "rdzv_endpoint": "a:1"}, False),
        ({"nnodes": "2"}, False),
        ({"nnodes": "2", "rdzv_endpoint": "a:1", "node_rank": 0}, False),
        ({"nnodes": "2", "master_addr": "a", "master_port": 1}, False),
        ({"nnodes": "2", "rdzv_endpoint": "a:1", "rdzv_backend": "c10d"}, False),
        ({"nnodes": "2", "rdzv_endpoint": "a:1", "rdzv_backend": "static"}, False),
        ({"nnodes": "1", "rdzv_endpoint": "a:1", "rdzv_backend": "ftrun"}, True),
        ({"nnodes": "1:2", "rdzv_endpoint": "a:1", "standalone": True}, False),
    ],
)
def test_whose_rendezvous_it_is(given: dict[str, object], ours: bool) -> None:
    assert nodes_choice.is_ours(launch(**given)) is ours


def test_a_run_of_several_nodes_has_a_name_in_common() -> None:
    assert nodes_choice.common_name(launch(rdzv_id="job/7")) == "job_7"
    with pytest.raises(UsageError, match="--name NAME"):
        nodes_choice.common_name(launch())
    with pytest.raises(UsageError, match="--name NAME"):
        nodes_choice.common_name(launch(rdzv_id="/"))


@pytest.mark.parametrize(
    ("codes", "explained", "victims", "leaving", "seconds"),
    [
        ({1}, True, False, False, 0.0),  # it has said what was wrong, and that is no peer's fault
        ({1}, True, True, False, 10.0),
        ({1}, False, False, False, 2.0),
        ({-signal.SIGKILL}, False, False, False, 0.0),
        ({-signal.SIGABRT}, False, False, False, 2.0),
        ({1, -signal.SIGSEGV}, False, False, False, 0.0),
        ({75}, False, False, False, 2.0),
        ({75}, False, False, True, 210.0),  # it commits before it leaves
    ],
)
def test_how_long_a_fallen_node_waits_for_another(
    codes: set[int], explained: bool, victims: bool, leaving: bool, seconds: float
) -> None:
    waited = nodes_patience.seconds(codes, explained=explained, victims=victims, leaving=leaving, grace=60.0)
    assert waited == seconds


def test_a_pause_before_a_restart_ends_where_the_nodes_meet_anyway() -> None:
    director: Any = SimpleNamespace(clock=Clock(), gpu_memory=lambda _: None)
    nobody: Any = None
    with unhurried(1, 2) as nodes:
        a, b = nodes.node(), nodes.node()
        nodes.met(a)
        spec = WorkerSpec("default", 1, a, entrypoint="python")
        logs: Any = DefaultLogsSpecs()
        agent = Agent(spec, logs, director, nobody, nobody, group=Group(a), interval=0.1)
        joining = nodes.meet(b)
        began = time.monotonic()
        agent._before_restart(60.0, set())
        assert time.monotonic() - began < SECONDS
        nodes.met(a)
        joining[0].result(SECONDS)


def test_a_node_that_stands_still_waits_for_the_one_that_does_not_wait() -> None:
    waits = ("/x/torch/distributed/distributed_c10d.py:1 in all_reduce", "/x/train.py:3 in main")
    works = ("/x/train.py:3 in main",)
    assert nodes_patience.of_a_hang([waits, waits]) == 10.0
    assert nodes_patience.of_a_hang([waits, works]) == 0.0
    assert nodes_patience.of_a_hang([]) == 0.0


def test_who_knows_of_the_most_failures_is_believed() -> None:
    past = Past()
    for kind in (Kind.KILLED, Kind.EXIT, Kind.EXIT):
        what = SimpleNamespace(fingerprint="abc", kind=kind)
        past.add(what, 7, 1000.0, restart=True)  # type: ignore[arg-type]
    mine = Told.of(past, made_a_step=True, passed_over={"old"})
    fresh = Told.of(Past(), made_a_step=False, passed_over={"older"})
    fresh.fell, fresh.node = {"cause": "exit"}, 3
    together = merged([fresh, mine])
    assert (together.fell, together.node) == ({"cause": "exit"}, 3)
    assert together.passed_over == ["old", "older"]
    assert together.made_a_step
    another = Past()
    together.give(another)
    assert (another.restarts, another.streak) == (3, 3)
    assert another.streak_by_kind == Counter({Kind.EXIT: 2, Kind.KILLED: 1})
    assert another.earlier == [("abc", 7)] * 3
    assert another.failed_at == pytest.approx([1000.0] * 3, abs=5.0)
    another.refill()
    assert merged([Told.of(another, made_a_step=True, passed_over=set()), Told()]).streak == 0


def test_workers_are_told_of_an_interface_only_where_it_matters() -> None:
    others = [Who("b", "node2", "127.0.0.1")]
    assert nodes_address.for_workers({}, None, others) == {}
    assert nodes_address.for_workers({"GLOO_SOCKET_IFNAME": "eth7"}, None, others) == {}
    told = nodes_address.for_workers({"FTRUN_INTERFACE": "lo", "NCCL_SOCKET_IFNAME": "ib0"}, None, [])
    assert told == {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    assert nodes_address.of_interface({"FTRUN_INTERFACE": "lo"}) == "127.0.0.1"
    assert nodes_address.of_interface({}) is None
    with pytest.raises(UsageError, match=r"no such interface; it has .*lo"):
        nodes_address.of_interface({"FTRUN_INTERFACE": "wlan9"})


@pytest.mark.parametrize(
    ("reason", "here", "lost"),
    [
        ("b is lost", "ac", "b"),
        ("b is lost, c is lost", "a", "bc"),
        ("the rendezvous has a new host, b is lost", "ac", "b"),
        ("b is lost, c starts again", "a", "b"),  # and has left since
        ("c starts again, b is lost", "abc", ""),  # it is back
        ("b left", "ac", ""),
        ("b is excluded, c is lost", "a", "c"),
        ("b did not stop in time", "ac", ""),  # it saves, say
        ("the launcher on b stands still", "ac", ""),
        ("bb is lost", "ac", ""),
        ("d joins", "acd", ""),
        ("", "ac", ""),
    ],
)
def test_which_nodes_are_marked_as_lost(reason: str, here: str, lost: str, tmp_path: Path) -> None:
    about = About("a", rules(Nodes()), 1)
    file = NodesFile(tmp_path / "nodes.json", print)
    memory = Remembering(NodeMemory(file, about, print), about, print)
    group: Any = SimpleNamespace(hosts=True, name="a", round=Members(1, tuple(map(who, "abc")), ""))
    plan: Any = SimpleNamespace(run_dir=RunDir(tmp_path / "run"), shares_run_dir=True)
    console: Any = SimpleNamespace(met=lambda *_: None)
    others = Others(plan, group, memory, console)
    others.begun(0, 1, None, None)
    group.round = Members(2, tuple(map(who, here)), reason)
    others.begun(0, 2, None, None)
    memory.excluded(within=60.0)
    others.close()
    marks = {
        name: [each for each in host.entries if isinstance(each, Marked)] for name, host in file.read().hosts.items()
    }
    assert {name for name, each in marks.items() if each} == set(lost)
    for name in lost:
        (mark,) = marks[name]
        assert (mark.sign, mark.evidence, mark.attempt) == (Sign.LOST, f"{name} is lost, in round 1", 1)


def who(name: str) -> Who:
    return Who(name, name, "127.0.0.1")


@pytest.mark.parametrize(
    ("reason", "here", "phases", "resumed", "since"),
    [
        ("b left", "ac", {Phase.END}, 7, "all had saved (b left)"),
        ("b is excluded", "acd", {Phase.END, Phase.SAVE}, 7, "all had saved (b is excluded)"),
        ("b left, d joins", "acd", {Phase.END}, 7, "all had saved (b left, d joins)"),
        ("the rendezvous has a new host, b left", "ac", {Phase.END}, 7, "all had saved (b left)"),
        ("the rendezvous has a new host", "ac", {Phase.END}, 7, "the failure"),
        ("d joins", "abcd", {Phase.END}, 7, "all had saved (d joins)"),
        ("d joins", "abcd", {Phase.STEP}, 5, "the change (d joins)"),  # no Session, or too slow
        ("b left", "ac", {Phase.END}, 5, "the failure"),  # what was saved did not become whole
        ("b left", "ac", {Phase.STEP}, 7, "the failure"),  # its own: it was left out for that
        ("b is lost", "ac", {Phase.SAVE}, 7, "the failure"),
        ("b left, c is lost", "a", {Phase.END}, 7, "the failure"),
        ("b left", "ac", set(), 7, "the failure"),
    ],
)
def test_a_restart_is_counted_from_what_happened(
    reason: str, here: str, phases: set[Phase], resumed: int, since: str, tmp_path: Path
) -> None:
    about = About("a", rules(Nodes()), 1)
    memory = Remembering(NodeMemory(NodesFile(tmp_path / "nodes.json", print), about, print), about, print)
    group: Any = SimpleNamespace(hosts=False, name="a", round=Members(1, tuple(map(who, "abc")), ""))
    plan: Any = SimpleNamespace(run_dir=RunDir(tmp_path / "run"), shares_run_dir=True)
    console: Any = SimpleNamespace(met=lambda *_: None, say=lambda _: None)
    others = Others(plan, group, memory, console)
    others.begun(0, 1, None, None)
    others.disturbed(reason, 7, phases, grows=False)
    group.round = Members(2, tuple(map(who, here)), reason)
    others.begun(0, 2, 1, resumed)
    others.close()
    assert others.since == since
