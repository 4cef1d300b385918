"""One post-mortem for all nodes: the first rank at fault over all of them, by clocks that were compared."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from conftest import held_port
from namespaces.clock import ahead
from rendezvous_kit import SECONDS, eventually, unhurried
from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from ftrun import events, pulse
from ftrun.config.health import Nodes
from ftrun.contract import ExitCode
from ftrun.error_file import ErrorRecord
from ftrun.goodput import history, ledger
from ftrun.health import as_events
from ftrun.health.history import Admitted, By, Excluded
from ftrun.health.marks import Mark, Sign
from ftrun.health.memory import About, NodeMemory
from ftrun.health.nodes_file import NodesFile
from ftrun.launch import nodes_clock, nodes_end, nodes_story, supervise
from ftrun.launch.evidence import joined, parts, postmortem
from ftrun.launch.evidence.collect import Collector, LiveRank, Sources
from ftrun.launch.evidence.kernel_log import KernelLog
from ftrun.launch.evidence.model import ClockOffset, Evidence, RankEvidence, Seat
from ftrun.launch.evidence.parts import Part
from ftrun.launch.failures import across, failure
from ftrun.launch.nodes_group import Group
from ftrun.launch.nodes_log import NodeLog
from ftrun.launch.nodes_story import CUT_OFF, GONE_ON, Story
from ftrun.launch.policy import Decision
from ftrun.launch.remembering import rules
from ftrun.launch.watching.watch import Value, Verdict
from ftrun.pulse import Beat, Phase
from ftrun.rendezvous import endpoint
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.member import Known, Standing
from ftrun.rendezvous.model import Outcome, State, Who
from ftrun.rendezvous.model import Phase as NodePhase
from ftrun.rendezvous.model import Round as Members
from ftrun.rendezvous.shelf import Server
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = ("node1", "node2", "node3")
NOON = 1_800_000_000.0
RESET = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.77.0.2]:45678"
BROKE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: bad\n'
AGAIN = Decision(True, "1 of 3 allowed before the next commit")
STOP = Decision(False, "no restarts allowed", exit_code=1, outcome="failed")
WAITS = ("/x/torch/distributed/distributed_c10d.py:1 in all_reduce", "/x/train.py:3 in main")
WORKS = ("/x/train.py:7 in slow", "/x/train.py:3 in main")


def seat(clock: ClockOffset | None, hosts: tuple[str, ...] = HOSTS) -> Seat:
    return Seat(4, hosts, clock)


def on(number: int, *ranks: RankEvidence, ahead: float | None = 0.0, unsure: float = 0.001, **more: Any) -> Evidence:
    clock = None if ahead is None else ClockOffset(ahead, unsure)
    return Evidence(ranks, node=number, host=HOSTS[number], time=NOON + (ahead or 0.0), seat=seat(clock), **more)


def reset(rank: int, at: float) -> RankEvidence:
    return RankEvidence(rank, exit_code=1, exited_at=at, error=ErrorRecord(RESET, time=at - 0.01))


def killed(rank: int, at: float) -> RankEvidence:
    return RankEvidence(rank, exit_code=-9, exited_at=at)


def broke(rank: int, at: float) -> RankEvidence:
    return RankEvidence(rank, exit_code=1, exited_at=at, error=ErrorRecord("ValueError: bad", BROKE, at))


def runs(rank: int, stack: tuple[str, ...] = ()) -> RankEvidence:
    return RankEvidence(rank, stack=stack)


# Who was first


@pytest.mark.parametrize(
    ("seen", "gone", "decided", "expected"),
    [
        # A peer's connection is closed before the end of its cause is seen: by its own clock even 20 s earlier.
        ([on(0, reset(0, NOON - 0.2)), on(1, killed(1, NOON + 20), ahead=20)], {}, None, ("killed", 1, 1, (0,))),
        ([on(0, reset(0, NOON - 20)), on(1, broke(1, NOON))], {}, 0, ("code error", 1, 1, (0,))),
        # Of two that broke the one that broke first, by clocks that were compared.
        ([on(0, broke(0, NOON)), on(1, broke(1, NOON + 19), ahead=20)], {}, 0, ("code error", 1, 1, (0,))),
        ([on(0, broke(0, NOON)), on(1, broke(1, NOON - 19), ahead=-20)], {}, 1, ("code error", 0, 0, (1,))),
        # An error that came clearly before a kill was there first.
        ([on(0, broke(0, NOON)), on(1, killed(1, NOON + 30), ahead=20)], {}, None, ("code error", 0, 0, (1,))),
        ([on(0, broke(0, NOON)), on(1, killed(1, NOON + 23), ahead=20)], {}, None, ("killed", 1, 1, (0,))),
        # No rank is at fault for a node that is lost; what fell on others fell with it.
        ([on(0, reset(0, NOON)), on(1, runs(1))], {2: "node3 is lost"}, 0, ("membership", -1, 2, (0,))),
        ([on(0, killed(0, NOON))], {2: "node3 is lost"}, 0, ("killed", 0, 0, ())),
        # Connections closed on both sides, and nobody knows why.
        ([on(0, reset(0, NOON)), on(1, reset(1, NOON - 1))], {}, 0, ("unknown", 1, 1, (0,))),
        # One finished, and the others lost it.
        ([on(0, reset(0, NOON)), on(1, RankEvidence(1, exit_code=0, exited_at=NOON - 1))], {}, 0,
         ("left early", 1, 1, (0,))),
    ],
)  # fmt: skip
def test_the_first_rank_at_fault_over_all_nodes(
    seen: list[Evidence], gone: dict[int, str], decided: int | None, expected: tuple[str, int, int, tuple[int, ...]]
) -> None:
    found = across.explain(seen, gone, decided)
    assert found is not None
    assert (found.kind, found.failure.rank, found.failure.node, found.failure.victims) == expected
    assert found.order == ()


def test_an_order_that_the_clocks_do_not_tell_is_said_to_be_unknown() -> None:
    near = [on(0, broke(0, NOON)), on(1, broke(1, NOON + 20.02), ahead=20, unsure=0.05)]
    for decided, first in ((None, 0), (0, 0), (1, 1)):
        found = across.explain(near, {}, decided)
        assert found is not None
        assert found.failure.rank == first
        (said,) = found.order
        assert "was first can't be told: they ended within 0.02 s of each other" in said
        assert "known to 0.051 s" in said
    found = across.explain([on(0, broke(0, NOON)), on(1, broke(1, NOON + 9), ahead=None)], {}, 1)
    assert found is not None
    assert found.failure.rank == 1
    assert "clocks were not compared" in found.order[0]
    # Of the node that decided its first rank is believed, and its clock tells that one from its others.
    near = [on(0, broke(0, NOON), unsure=0.05), on(1, broke(1, NOON + 0.03), broke(2, NOON + 0.01), unsure=0.05)]
    found = across.explain(near, {}, 1)
    assert found is not None
    assert found.failure.rank == 2
    assert found.order[0].startswith("whether rank 0 on node 0 or rank 2 was first can't be told: ")
    torn = [on(each, replace(runs(each), error=ErrorRecord("unreadable error file (3 bytes)"))) for each in (0, 1)]
    found = across.explain(torn, {}, 0)
    assert found is not None
    assert found.order[0].endswith("it isn't known when they ended")
    # Kinds tell more than clocks: there is nothing to doubt.
    found = across.explain([on(0, reset(0, NOON)), on(1, killed(1, NOON + 9), ahead=None)], {}, 0)
    assert found is not None
    assert (found.failure.rank, found.order) == (1, ())


def test_a_hang_is_judged_by_the_ranks_of_all_nodes() -> None:
    hang = Verdict(Value.HUNG, "step", 9.0, 4.0, 7, "rank 0 has been in its step for 9 s", 0)
    found = across.explain([on(0, runs(0, WAITS), hang=hang), on(1, runs(1, WORKS)), on(2, runs(2, WAITS))], {}, 0)
    assert found is not None
    assert (found.kind, found.failure.rank, found.failure.node) == ("hang", 1, 1)


def test_no_rank_is_at_fault_where_all_wait_for_each_other(run_dir: RunDir) -> None:
    hang = Verdict(Value.HUNG, "step", 9.0, 4.0, 7, "rank 0 has been in its step for 9 s", 0)
    parts.write(run_dir, 2, Part(on(1, runs(1, WAITS)), "node1 starts again"))
    decided(run_dir, on(0, runs(0, WAITS), hang=hang))
    told = facts(run_dir)
    assert (told["failure"]["kind"], told["failure"]["rank"]) == ("hang", -1)
    text = (run_dir.postmortem(2) / "report.md").read_text()
    assert text.startswith("# Attempt 2: hang\n\nall ranks wait for each other, ")
    assert "- node1 decided by what it saw, which was: " in text
    assert "**Restarted**" in text
    assert "No rank is at fault." in text


def test_nothing_went_wrong_where_all_were_asked_to_leave() -> None:
    left = RankEvidence(0, exit_code=75, exited_at=NOON)
    found = across.explain([on(0, left), on(1, runs(1))], {2: "node3 left"}, None)
    assert found is not None
    assert (found.kind, found.failure.message) == ("membership", "node3 left")
    assert across.explain([on(0, runs(0))], {}, None) is None


# Clocks


def test_the_quickest_answer_says_how_far_a_clock_is_ahead() -> None:
    told = nodes_clock.estimate([(120.0, 100.4, 1.0), (130.0, 110.05, 0.1), (140.0, 119.0, 5.0)])
    assert told == ClockOffset(pytest.approx(20.0), pytest.approx(0.05))  # type: ignore[arg-type]


def test_a_machine_whose_clock_is_twenty_seconds_ahead_is_found_out() -> None:
    serving = (
        "import sys, time\nfrom ftrun.rendezvous import endpoint\nfrom ftrun.rendezvous.shelf import Server\n"
        "server = Server(endpoint.listen(0))\nserver.start()\nprint(server.port, flush=True)\nsys.stdin.read()\n"
    )
    env = {**os.environ, **ahead(20.0, Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", serving], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        clock = nodes_clock.Clock()
        clock.begin(Who("a", "node1", "127.0.0.1", port), here=False)
        assert clock.offset is None or clock.offset.seconds < -19
        eventually(lambda: clock.offset)
        assert clock.offset is not None
        assert clock.offset.uncertainty < 0.5
        assert abs(clock.offset.seconds + 20) <= clock.offset.uncertainty + 0.01
        clock.begin(Who("b", "node2", "127.0.0.1", port), here=True)
        assert clock.offset == ClockOffset(0.0, 0.0)
        clock.close()
        process.communicate()
    assert nodes_clock.ask("127.0.0.1", port) is None


def test_what_is_written_under_the_name_of_the_clock_is_not_what_is_read() -> None:
    listener = endpoint.listen(0)
    assert listener is not None
    server = Server(listener)
    server.start()
    server.shelf.set(Keys.CLOCK, "noon")
    found = nodes_clock.ask("127.0.0.1", server.port)
    server.close()
    assert found is not None
    assert abs(found.seconds) <= found.uncertainty + 0.01


# Parts and what is made of them


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    return made


def test_a_part_is_read_as_it_was_written() -> None:
    beat = Beat(119, 100, None, Phase.EVAL, True, NOON, NOON - 50)
    rank = replace(broke(3, NOON), beat=beat, state="S", stack=WORKS, last_lines=("a", "\udce4"))
    hang = Verdict(Value.HUNG, "step", 9.0, 4.0, 7, "why", 3)
    evidence = on(1, rank, kernel=("one", "two"), hang=hang, oom_kills=1)
    what = failure.explain(on(1, rank))
    part = Part(evidence, "node3 is lost", what, AGAIN, ((NOON, "noon"),), {"seconds": {"stop": 1.0}})
    assert parts.decode(parts.encode(part)) == part
    short = parts.shortened(replace(part, evidence=replace(evidence, ranks=(replace(rank, last_lines=("x",) * 99),))))
    assert len(short.evidence.ranks[0].last_lines) == 8
    for other in ("", "{", "[]", "{}", '{"schema_version": 99}', '{"schema_version": 1, "evidence": {"ranks": [1]}}'):
        assert parts.decode(other) is None


def decided(run_dir: RunDir, evidence: Evidence, decision: Decision = AGAIN, attempt: int = 2) -> Path | None:
    return postmortem.write(run_dir, attempt, failure.explain(evidence), decision, evidence)


def facts(run_dir: RunDir, attempt: int = 2) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir.postmortem(attempt) / "failure.json").read_text())
    return document


def test_one_report_tells_of_all_nodes(run_dir: RunDir) -> None:
    worker = run_dir.worker(2, 2, 2)
    worker.mkdir(parents=True)
    (worker / "stderr.log").write_text("step 41\n")
    parts.write(run_dir, 2, Part(on(0, reset(0, NOON - 0.5)), "node3 is lost, node2 starts again"))
    report = decided(run_dir, on(1, killed(1, NOON + 20.25), ahead=20))
    assert report == run_dir.postmortem(2) / "report.md"
    text = report.read_text()
    assert text.startswith("# Attempt 2: killed\n\nRank 1 was ended by SIGKILL. On node 1 (node2), ")
    for line in (
        "Rank 0 fell with it.",
        "**Restarted**: 1 of 3 allowed",
        "| 0 | node1 | 0 | node3 is lost, node2 starts again |",
        "| 1 | node2 | 1 | decided: rank 1 was ended by SIGKILL |",
        "| 2 | node3 | 2 | nothing came from it: node3 is lost |",
        "- the clock of node2 is 20.000 s ahead of that of node1 (known to 0.001 s); all times here are by the latter",
        "| 0 | 0 | exited with code 1 | +0.000 s |  | fell with it | RuntimeError: [../gloo/",
        "| 1 | 1 | ended by SIGKILL | +0.760 s |  | at fault |  |",
        "| 2 | 2 | no word of it |  |  | lost with its node |  |",
        "- logs of rank 1: `../../attempts/0002/n0001/r00001`",
    ):
        assert line in text, text
    told = facts(run_dir)
    assert (told["node"], told["host"], told["failure"]["rank"], told["failure"]["victims"]) == (1, "node2", 1, [0])
    assert (told["decided_by"], told["decision"]["restart"], told["joined"]) == (1, True, False)
    assert [(each["node"], each["host"], each["lost"]) for each in told["nodes"]] == [
        (0, "node1", False),
        (1, "node2", False),
        (2, "node3", True),
    ]
    assert [[rank["role"] for rank in each["ranks"]] for each in told["nodes"]] == [
        ["fell with it"],
        ["at fault"],
        ["lost with its node"],
    ]
    assert told["nodes"][1]["clock"] == {"seconds": 20, "uncertainty": 0.001}

    # Where the seconds of the restart went is known later, to a node that may have another number by then.
    postmortem.append_restart(run_dir, 2, {"stop": 1.0, "start": 0.5}, 3, node=0, read={"memory": 5_000_000})
    assert facts(run_dir)["restart"]["total"] == 1.5
    assert facts(run_dir)["joined"]
    text = report.read_text()
    assert text.count("## The restart") == 1
    assert "3 steps had to be done again" in text
    assert "5.0 MB from memory" in text


def test_a_node_that_is_lost_without_a_failure_has_a_post_mortem_too(run_dir: RunDir) -> None:
    parts.write(run_dir, 2, Part(on(0, runs(0, WAITS)), "node3 is lost"))
    assert joined.join(run_dir, 2) is not None
    text = (run_dir.postmortem(2) / "report.md").read_text()
    assert text.startswith("# Attempt 2: membership\n\nnode3 is lost, 20")
    assert "was ended for it" in text
    assert "- nothing has come from node2 yet" in text
    told = facts(run_dir)
    assert (told["failure"]["kind"], told["failure"]["rank"], told["node"]) == ("membership", -1, 2)
    assert (told["decision"], told["decided_by"], told["missing"]) == (None, None, ["node2"])
    assert told["nodes"][0]["ranks"][0]["stack"] == list(WAITS)


def test_what_a_node_said_when_it_ended_the_run_is_no_word_on_others(run_dir: RunDir) -> None:
    parts.write(run_dir, 2, Part(on(0, runs(0)), "node2: rank 1: ValueError: no answer, not from node3 either"))
    assert joined.join(run_dir, 2) is not None
    told = facts(run_dir)
    assert [(each["node"], each["lost"]) for each in told["nodes"]] == [(0, False), (1, True)]
    assert told["missing"] == ["node3"]
    text = (run_dir.postmortem(2) / "report.md").read_text()
    assert "node2 ended the run, and nothing else has come from it" in text
    assert "No rank is at fault" not in text


def test_the_node_that_decided_may_have_seen_less_than_all_together(run_dir: RunDir) -> None:
    decided(run_dir, on(0, broke(0, NOON)))
    parts.write(run_dir, 2, Part(on(1, killed(1, NOON - 1)), "node1 starts again"))
    joined.join(run_dir, 2)
    assert facts(run_dir)["failure"]["rank"] == 1
    text = (run_dir.postmortem(2) / "report.md").read_text()
    assert text.startswith("# Attempt 2: killed\n")
    assert "- node1 decided by what it saw, which was: rank 0: ValueError: bad" in text


@pytest.mark.slow
def test_a_message_of_megabytes_does_not_cost_the_post_mortem(run_dir: RunDir) -> None:
    long = ErrorRecord(f"ValueError: {'x' * (3 << 20)}", f"{BROKE.rstrip()}{'x' * (3 << 20)}\n", NOON)
    assert decided(run_dir, on(1, replace(broke(1, NOON), error=long))) is not None
    assert facts(run_dir)["failure"]["rank"] == 1


class Meanwhile(RunDir):
    """A run directory in which another node writes its part while parts are put together."""

    def worker(self, number: int, node: int, rank: int) -> Path:
        if node == 0 and len(parts.stamps(self, number)) == 1:
            parts.write(self, number, Part(on(1, runs(1)), "node3 is lost"))
        return super().worker(number, node, rank)


def test_a_part_that_comes_while_others_are_put_together_is_not_lost(run_dir: RunDir) -> None:
    parts.write(run_dir, 1, Part(on(0, broke(0, NOON)), "node3 is lost"))
    joined.join(Meanwhile(run_dir.path), 1)
    assert nodes(run_dir) == list(HOSTS)


def test_damaged_parts_and_directories_cost_no_more_than_the_report(run_dir: RunDir) -> None:
    directory = parts.directory(run_dir, 2)
    directory.mkdir(parents=True)
    (directory / "n0000.json").write_bytes(b"\x00torn")
    assert joined.join(run_dir, 2) is None
    assert decided(run_dir, on(1, killed(1, NOON))) is not None
    assert [each["node"] for each in facts(run_dir)["nodes"]] == [1]
    whole = json.loads(parts.encode(Part(on(0, runs(0)), "node3 is lost")))
    for other in ({"word": None}, {"evidence": {**whole["evidence"], "node": "0"}}):
        (directory / "n0000.json").write_text(json.dumps({**whole, **other}))
        assert [each.node for each in parts.read_all(run_dir, 2)] == [1]
    whole["evidence"]["seat"]["hosts"] = [1, 2]
    (directory / "n0000.json").write_text(json.dumps(whole))
    assert joined.join(run_dir, 2) is None
    (run_dir.path / "file").write_text("")
    assert decided(RunDir(run_dir.path / "file"), on(1, killed(1, NOON))) is None


# A node's own part


class Launcher:
    """What a launcher has to tell its story from."""

    def __init__(self, run_dir: RunDir, number: int, *, shared: bool = True) -> None:
        plan: Any = SimpleNamespace(run_dir=run_dir, shares_run_dir=shared)
        self.run_dir, self.number = run_dir, number
        self.story = Story(plan)
        sources = Sources(
            node=number, host=HOSTS[number], kernel=KernelLog(run_dir.path / "kmsg"), seat=lambda: self.story.seat
        )
        self.collector = Collector(sources)

    def begin(self, attempt: int, *hosts: str) -> None:
        members = Members(attempt, tuple(Who(each, each, "127.0.0.1") for each in hosts), "")
        self.story.begun(members, hosts.index(HOSTS[self.number]), attempt)
        self.collector.baseline()

    def rank(self, attempt: int, code: int | None = None) -> LiveRank:
        directory = self.run_dir.worker(attempt, self.number, self.number)
        directory.mkdir(parents=True, exist_ok=True)
        return LiveRank(self.number, 0, os.getpid(), code, NOON if code else 0.0, directory)

    def gives_way(self, attempt: int, word: str, code: int | None = None) -> None:
        self.story.look(self.collector, [self.rank(attempt, code)], word)
        self.story.gave_way(self.collector, word)

    def decides(self, attempt: int, decision: Decision = AGAIN) -> None:
        evidence = self.collector.collect([self.rank(attempt, -9)], NOON, thorough=False)
        assert postmortem.write(self.run_dir, attempt, failure.explain(evidence), decision, evidence) is not None
        self.story.decided()


@pytest.fixture
def launchers(run_dir: RunDir) -> Iterator[list[Launcher]]:
    made = [Launcher(run_dir, number) for number in range(3)]
    for each in made:
        each.begin(1, *HOSTS)
    yield made
    for each in made:
        each.story.close(ended=False)
        each.collector.close()
    # A thread that gets no processor ends later than it is waited for.
    eventually(lambda: not [each for each in threading.enumerate() if each.name in ("ftrun-clock", "ftrun-look")])


def nodes(run_dir: RunDir, attempt: int = 1) -> list[str]:
    return [each["host"] for each in facts(run_dir, attempt)["nodes"]]


def test_the_first_node_of_the_next_round_puts_all_parts_together(launchers: list[Launcher], run_dir: RunDir) -> None:
    one, two, three = launchers
    two.decides(1)
    assert nodes(run_dir) == ["node2"]
    one.gives_way(1, "node2 starts again")
    one.begin(2, "node1", "node2")
    one.story.started()
    assert nodes(run_dir) == ["node1", "node2"]
    assert facts(run_dir, 1)["nodes"][0]["ranks"][0]["role"] == "was ended for it"
    # One that comes when the others have gone on adds its part by itself.
    three.gives_way(1, f"{CUT_OFF}: no answer", 1)
    assert nodes(run_dir) == list(HOSTS)
    assert facts(run_dir, 1)["joined"]


def test_who_ends_a_run_waits_a_moment_for_the_others(
    launchers: list[Launcher], run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_story, "_PARTS_SECONDS", SECONDS)  # theirs take longer on a busy machine
    one, two, three = launchers
    three.decides(1, STOP)
    late = threading.Timer(0.2, lambda: [each.gives_way(1, "node3: it broke") for each in (one, two)])
    late.start()
    three.story.close(ended=True)
    assert nodes(run_dir) == list(HOSTS)
    late.join()
    assert facts(run_dir, 1)["decision"]["exit_code"] == 1


def test_no_restart_waits_for_what_a_node_that_was_left_out_has_put_together(
    launchers: list[Launcher], run_dir: RunDir
) -> None:
    one, two, three = launchers
    two.decides(1)
    two.story.close(ended=False)  # before it says that it leaves
    assert facts(run_dir, 1)["joined"]
    for each in (one, three):
        each.gives_way(1, "node2 is excluded")
    assert nodes(run_dir) == ["node2"]
    one.begin(2, "node1", "node3")
    one.story.started()
    three.story.close(ended=False)
    assert nodes(run_dir) == list(HOSTS)


def test_where_nobody_decided_and_no_round_follows_the_first_that_has_something_to_say_does_it(
    launchers: list[Launcher], run_dir: RunDir
) -> None:
    _, two, three = launchers
    for each in (three, two):
        each.gives_way(1, "node1 is lost")
    three.story.close(ended=False)
    assert not (run_dir.postmortem(1) / "failure.json").exists()
    two.story.close(ended=False)
    assert nodes(run_dir) == list(HOSTS)
    assert facts(run_dir, 1)["failure"]["message"] == "node1 is lost"


def test_a_launcher_that_can_not_go_on_is_the_cause(launchers: list[Launcher], run_dir: RunDir) -> None:
    one, two, _ = launchers
    directory = two.rank(1).directory
    (directory / "error.json").write_text(json.dumps({"message": {"message": RESET, "extraInfo": {}}}))
    two.gives_way(1, "node1: OSError: no space left", 1)
    joined.join(run_dir, 1)
    told = facts(run_dir, 1)
    assert told["failure"]["kind"] == "launcher"
    one.story.broke(one.collector, [one.rank(1)], "OSError: no space left")
    one.story.close(ended=False)
    told = facts(run_dir, 1)
    assert (told["failure"]["kind"], told["failure"]["rank"], told["host"]) == ("launcher", -1, "node1")
    assert (told["failure"]["message"], told["failure"]["victims"]) == ("node1: OSError: no space left", [1])
    assert [each["lost"] for each in told["nodes"]] == [False, False]


def test_run_directories_that_are_not_shared_send_their_parts(tmp_path: Path) -> None:
    made = [Launcher(RunDir(tmp_path / name), number, shared=False) for number, name in enumerate(HOSTS)]
    for each in made:
        each.run_dir.path.mkdir()
        each.begin(1, *HOSTS)
    made[1].decides(1)
    made[0].gives_way(1, "node2 starts again")
    made[2].gives_way(1, "node2 starts again")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=dt.timedelta(seconds=SECONDS))
    ports = [store, *(TCPStore("127.0.0.1", store.port, timeout=dt.timedelta(seconds=SECONDS)) for _ in range(2))]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: made[number].story.share(PrefixStore("r", ports[number]), number, 3), range(3)))
    for each in made:
        each.begin(2, *HOSTS)
        each.story.started()
    assert nodes(made[0].run_dir) == nodes(made[1].run_dir) == list(HOSTS)
    assert nodes(made[2].run_dir) == ["node3"]
    for each in made:
        each.story.close(ended=False)
        each.collector.close()


def test_how_the_rendezvous_says_that_a_node_is_cut_off() -> None:
    state = State("leader", 1, 1, called=False, outcome=Outcome.OPEN)
    said = Standing(NodePhase.RUNNING, 1).disturbance(Known(state=state, trouble="no answer"))
    assert said.startswith(CUT_OFF)
    said = Standing(NodePhase.RUNNING, 1).disturbance(Known(state=replace(state, generation=2)))
    assert said.startswith(GONE_ON)


# What nodes say when they can't go on


@pytest.mark.parametrize(
    ("text", "hosts", "said"),
    [
        ("wait timeout after 300000ms, keys: /torchelastic/role_info/2", HOSTS,
         "node3 (node 2) has not said within 300 s how many workers it has"),
        ("wait timeout after 60000ms, keys: /0/x/torchelastic/assigned_ranks/2", HOSTS,
         "node1 (node 0) has not said within 60 s how the attempt begins"),
        ("wait timeout after 500ms, keys: /ftrun/past", HOSTS,
         "node1 (node 0) has not said within 0.5 s how the attempt begins"),
        ("wait timeout after 500ms, keys: /ftrun/past/1", (),
         "node 1 has not said within 0.5 s what it has been through"),
        ("not as far within 120 s (wait timeout after 90000ms, keys: /ftrun/past/1)", HOSTS,
         "node2 (node 1) has not said within 90 s what it has been through"),
        ("Connection reset by peer\nException raised from", HOSTS,
         "the store of the round is lost (Connection reset by peer)"),
    ],
)  # fmt: skip
def test_which_node_was_waited_for_in_vain(text: str, hosts: tuple[str, ...], said: str) -> None:
    cause, advice = nodes_end.in_vain(text, hosts)
    assert cause == said
    assert nodes_end.is_in_vain(f"not within 120 s ({text})") == ("keys" in text)
    assert advice.endswith("The same command tries again.")


class Said:
    """A console that is listened to."""

    def __init__(self) -> None:
        self.text = ""

    def warn(self, text: str) -> None:
        self.text += f"{text}\n"

    say = warn


def test_a_wait_in_vain_is_told_and_may_be_tried_again() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=dt.timedelta(seconds=SECONDS))
    store.set_timeout(dt.timedelta(seconds=0.2))  # to connect may take longer
    with pytest.raises(DistStoreError) as raised:
        store.get("ftrun/past/1")
    console: Any = Said()
    with unhurried(2, 2) as met:
        a, b = met.node(), met.node()
        met.met(a, b)
        meets = met.meet(b)
        group = Group(a)
        name = group.names[1]
        assert nodes_end.unanswered(raised.value, group, console) == ("stopped", ExitCode.TRY_AGAIN)
        assert console.text.startswith(f"{name} (node 1) has not said within 0.2 s what it has been through. ")
        with pytest.raises(RendezvousClosedError, match=rf"{name} \(node 1\) has not said within"):
            meets[0].result(SECONDS)
        other: Any = Said()
        error = RendezvousClosedError("why")
        assert nodes_end.after(error, Group(b), other) == ("stopped", ExitCode.TRY_AGAIN)
        assert other.text.strip() == "[red]■[/] the run was ended by why"


def test_a_store_that_nobody_serves_is_told() -> None:
    with held_port() as port, pytest.raises(DistError) as raised:
        TCPStore("127.0.0.1", port, timeout=dt.timedelta(seconds=0.2))
    console: Any = Said()
    assert nodes_end.unanswered(raised.value, None, console) == ("failed", ExitCode.FAILED)
    assert console.text.startswith(f"nobody answers at 127.0.0.1, port {port}. ")
    other: Any = Said()
    assert nodes_end.unanswered(DistError("no such thing"), None, other) == ("failed", ExitCode.FAILED)
    assert "no such thing" in other.text


def test_a_host_that_ends_by_a_mistake_says_which() -> None:
    with unhurried(2, 2) as met:
        a, b = met.node(), met.node()
        met.met(a, b)
        assert a.hosts
        meets = met.meet(b)
        words: list[str] = []
        director: Any = SimpleNamespace(broke=words.append)
        supervise._leave_word(ValueError("a line\nanother"), a, director)
        assert words == ["ValueError: a line"]
        a.shutdown()
        with pytest.raises(RendezvousClosedError, match=r": ValueError: a line$"):
            meets[0].result(SECONDS)


# Nodes that are left out


def test_exclusions_and_admissions_are_events(run_dir: RunDir) -> None:
    file = NodesFile(run_dir.nodes, print)
    run_dir.events().parent.mkdir()
    log = NodeLog(run_dir)
    about = About("a", rules(Nodes()), 1, look_every=0.05)

    memory = NodeMemory(file, about, lambda _: None, partial(as_events.write, log), clock=lambda: NOON)
    memory.start()
    memory.seen(["a", "b", "c"])
    memory.excluded(within=SECONDS)
    file.change(lambda book: book.add("b", Excluded(NOON, By.USER, "loud fans", 3600.0)))
    eventually(memory.excluded)
    log.settle(0)  # which file it belongs into was not known before
    file.change(lambda book: book.add("b", Admitted(NOON, By.USER, "")))
    eventually(lambda: not memory.excluded())
    memory.mark("c", Mark(Sign.DEVICE, "Xid 79", 1), SECONDS)
    memory.mark("b", Mark(Sign.DEVICE, "Xid 79", 2), SECONDS)
    memory.close()
    told = [each.event for each in events.read(run_dir.events())]
    assert [type(each) for each in told] == [
        events.NodeExcluded,
        events.NodeAdmitted,
        events.NodeExcluded,
        events.ExclusionRefused,
    ]
    assert told[0] == events.NodeExcluded("b", "loud fans", NOON + 3600, "user")
    assert told[1] == events.NodeAdmitted("b", "", "user")
    assert (told[2].host, told[2].by) == ("c", "policy")  # type: ignore[attr-defined]
    assert "1 of 3 nodes are excluded" in told[3].reason  # type: ignore[attr-defined]
    # Whoever reads a run's history passes them over.
    past = history.load(run_dir)
    assert past.falls == []
    assert ledger.account(past.records).wall == 0


def test_pulse_pages_of_a_node_that_is_lost_are_read(run_dir: RunDir) -> None:
    worker = run_dir.worker(2, 2, 2)
    worker.mkdir(parents=True)
    pulse.create(worker / "pulse")
    page = pulse.Pulse(worker / "pulse")
    page.own(base=0)
    page.phase(Phase.STEP)
    page.step(41)
    parts.write(run_dir, 2, Part(on(0, runs(0)), "node3 is lost"))
    joined.join(run_dir, 2)
    assert facts(run_dir)["nodes"][1]["ranks"][0]["step"] == 41
