"""``ftrun nodes``, ``exclude``, ``admit``, and the way back of a node that was left out."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ftrun import events
from ftrun.cli.app import app
from ftrun.config.health import Nodes
from ftrun.health.history import By, Excluded, Marked
from ftrun.health.marks import Sign
from ftrun.health.memory import About, NodeMemory
from ftrun.health.nodes_file import NodesFile
from ftrun.launch import remembering
from ftrun.launch.remembering import Remembering, rules
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOUR = 3600.0
RULES = rules(Nodes())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return make(tmp_path, "llama")


def make(path: Path, name: str, nnodes: str = "3:4", **nodes: Any) -> RunDir:
    made = RunDir(path / "runs" / name)
    job = {"config": {"health": {"nodes": Nodes.model_validate(nodes).model_dump(mode="json")}}}
    made.create({"run_id": name, "launch": {"nnodes": {"value": nnodes}}, "job": job})
    return made


def file(run: RunDir) -> NodesFile:
    return NodesFile(run.nodes, print)


def know(run: RunDir, *hosts: str) -> None:
    file(run).change(lambda book: book.saw(hosts, time.time()))


def ran(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["nodes", *arguments])
    print(result.output)
    assert result.exit_code == code, result.output
    return result.output


def states() -> dict[str, str]:
    return {each["host"]: each["state"] for each in json.loads(ran("--json"))["nodes"]}


def test_nothing_known(run: RunDir) -> None:
    assert "llama: nothing is known of its nodes" in ran()
    assert json.loads(ran("--json"))["nodes"] == []
    assert not run.nodes.exists()


def test_exclude_and_admit(run: RunDir) -> None:
    know(run, "node1", "node2", "node3", "node4")
    assert states() == dict.fromkeys(("node1", "node2", "node3", "node4"), "fine")
    out = ran("exclude", "node3", "--for", "2h", "--reason", "loud fans")
    assert "node3 is excluded by hand for another 2h: loud fans; `ftrun nodes admit node3` lets it in" in out
    assert "--nnodes" not in out
    assert "3 needed" not in out
    shown = ran("llama")
    assert "llama: 4 nodes, 1 excluded" in shown
    assert "node3  excluded by hand, 2h left" in shown
    assert "loud fans" in shown
    out = ran("exclude", "node4")
    assert "2 of the nodes that this run has seen are left, and it needs 3 (--nnodes)" in out
    assert "node4  excluded by hand, until it is admitted" in ran()
    document = json.loads(ran("--json"))
    assert document["schema_version"] == 1
    assert [each["by"] for each in document["nodes"]] == [None, None, "user", "user"]
    assert 7140 < document["nodes"][2]["seconds_left"] <= 7200
    assert "node3 may take part again" in ran("admit", "node3", "--run", "llama")
    assert "node1 was not excluded (fine)" in ran("admit", "node1")
    assert states() == {"node1": "fine", "node2": "fine", "node3": "fine", "node4": "excluded"}


def test_a_policy_exclusion_and_what_counts_against_a_node(run: RunDir) -> None:
    know(run, "node1", "node2", "node3")
    now = time.time()
    mark = Marked(now, Sign.SEGFAULT, "rank 5 died of SIGSEGV", 3, 5)
    out = Excluded(now, By.POLICY, "Xid 79 on GPU 0", HOUR, Sign.DEVICE)
    file(run).change(lambda book: book.add("node1", out).add("node2", mark))
    shown = ran()
    assert "node1  excluded, 1h left" in shown
    assert "Xid 79 on GPU 0" in shown
    assert "node2  suspect" in shown
    assert "attempt 3: rank 5 died of SIGSEGV" in shown
    assert "node2 was not excluded (suspect); nothing counts against it now" in ran("admit", "node2")
    assert states()["node2"] == "fine"


def test_the_jobs_own_rules_count(tmp_path: Path, run: RunDir) -> None:
    for name, check in (("with", True), ("without", False)):
        other = make(tmp_path, name, check=check)
        ago = Excluded(time.time() - HOUR, By.POLICY, "it", 60.0)
        file(other).change(lambda book, ago=ago: book.saw(["a"], time.time()).add("a", ago))
        state = json.loads(ran(name, "--json"))["nodes"][0]["state"]
        assert state == ("to be checked" if check else "on probation")
    assert run.path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("exclude", "node9"), "has never seen a node 'node9'; it has seen node1. --force excludes it all the same."),
        (("admit", "node9"), "has never seen a node 'node9'; it has seen node1."),
        (("exclude", "no de"), "'no de' is no host name"),
        (("exclude", "node1", "--for", "30"), "--for: 30 has no unit; write 30s, 30m or 30h"),
        (("exclude", "node1", "--for", "0s"), "--for 0s is no time at all"),
        (("exclude", "node1", "--run", "nope"), "no run 'nope'"),
        (("nope",), "no run 'nope'"),
    ],
)
def test_bad_input(run: RunDir, arguments: tuple[str, ...], message: str) -> None:
    know(run, "node1")
    before = run.nodes.read_bytes()
    assert message in ran(*arguments, code=2)
    assert run.nodes.read_bytes() == before


def test_a_host_that_has_only_started_is_known_and_any_other_takes_force(run: RunDir) -> None:
    started = events.RunStarted("llama", [], 1, "node7", 1, False, {})
    events.EventLog(run.events(2)).write(started)
    ran("exclude", "node7")
    ran("exclude", "node9", "--force")
    assert states() == {"node7": "excluded", "node9": "excluded"}


def test_a_damaged_record_is_told_and_excluding_goes_on(run: RunDir) -> None:
    run.nodes.write_text("{")
    assert "is damaged" in ran(code=2)
    ran("exclude", "node1", "--force")
    assert states() == {"node1": "excluded"}


# The way back


@pytest.fixture
def returning(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remembering]:
    monkeypatch.setattr(remembering, "_JOIN_SECONDS", 60.0)  # a node that isn't looked up in time counts as fine
    about = About(socket.gethostname(), RULES, 2, check_seconds=0.1)
    said: list[str] = []
    made = Remembering(NodeMemory(file(run), about, said.append), about, said.append)
    yield made
    made.close()


def test_a_node_without_a_past_joins(returning: Remembering) -> None:
    assert returning.may_join() == ""


def test_an_excluded_node_is_told_what_to_do(run: RunDir, returning: Remembering) -> None:
    host = socket.gethostname()
    ran("exclude", host, "--force", "--reason", "loud fans")
    assert returning.may_join() == f"{host} is excluded by hand: loud fans; `ftrun nodes admit {host}` lets it in"
    ran("admit", host)
    assert returning.may_join() == ""


@pytest.mark.slow
def test_a_node_whose_time_is_over_is_checked_and_on_probation(run: RunDir, returning: Remembering) -> None:
    host = socket.gethostname()
    out = Excluded(time.time() - HOUR, By.POLICY, "Xid 79", HOUR, Sign.DEVICE)
    file(run).change(lambda book: book.add(host, out))
    assert states() == {host: "to be checked"}
    assert returning.may_join() == ""
    assert states() == {host: "on probation"}
