from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ftrun import pulse
from ftrun.error_file import ErrorRecord
from ftrun.launch.evidence import postmortem
from ftrun.launch.evidence.collect import Collector, LiveRank, Sources
from ftrun.launch.evidence.kernel_log import KernelLog
from ftrun.launch.evidence.model import Evidence, RankEvidence
from ftrun.launch.failures.failure import Failure, Kind, explain
from ftrun.launch.policy import Decision
from ftrun.launch.watching.watch import Value, Verdict
from ftrun.pulse import Beat, Phase
from ftrun.rundir import RunDir

NOON = 1_800_000_000.0
TRACE = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in step\nValueError: bad | worse\n'

RANKS = (
    RankEvidence(
        rank=0,
        pid=100,
        exit_code=1,
        exited_at=NOON + 0.25,
        error=ErrorRecord("RuntimeError: Connection closed by peer", time=NOON + 0.2),
        beat=Beat(119, 100, 200, Phase.STEP, True, NOON, NOON - 50),
    ),
    RankEvidence(
        rank=1,
        local_rank=1,
        pid=101,
        exit_code=1,
        exited_at=NOON,
        error=ErrorRecord("ValueError: bad | worse", TRACE, NOON - 0.1),
        beat=Beat(119, 100, 200, Phase.SAVE, True, NOON, NOON - 50),
        last_lines=("step 119", "```", "ValueError: bad | worse \x1b[31m"),
    ),
    RankEvidence(
        rank=2,
        local_rank=2,
        pid=102,
        state="S",
        waits_in="futex_wait_queue",
        stack=("/lib/torch/distributed/distributed_c10d.py:2900 in all_reduce", "/home/me/train.py:9 in <module>"),
    ),
    RankEvidence(rank=3, local_rank=3, pid=103, exit_code=-9, exited_at=NOON + 0.125),
)
EVIDENCE = Evidence(RANKS, host="node-a", time=NOON + 0.01, kernel=("NVRM: Xid (PCI:0000:5d:00): 31",), oom_kills=1)
FAILURE = Failure(
    kind=Kind.CODE_ERROR,
    rank=1,
    exit_code=1,
    message="rank 1: ValueError: bad | worse",
    victims=(0, 2, 3),
    fingerprint="ValueError@train.py:7",
    blame="code",
    why=("rank 1 ended first", "its error file holds a traceback"),
    would_change="a sign that the hardware is bad",
)
AGAIN = Decision(True, "1 of 3 allowed before the next commit", delay=2.0)
STOP = Decision(False, "all 3 restarts are used", exit_code=76, outcome="gave_up")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "llama")
    for each in RANKS:
        made.worker(3, 0, each.rank).mkdir(parents=True)
    return made


def test_a_report_tells_the_story(run_dir: RunDir) -> None:
    timeline = [(NOON - 60, "the first step was complete"), (NOON + 0.05, "the peers were killed")]
    path = postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE, timeline)
    assert path == run_dir.path / "postmortem/0003/report.md"
    text = path.read_text()
    assert text.startswith("# Attempt 3: code error\n\nRank 1: ValueError: bad | worse. On node 0 (node-a), 20")
    for part in (
        "Ranks 0, 2-3 fell with it.",
        "**Restarted** after 2 s: 1 of 3 allowed before the next commit.",
        "- rank 1 ended first\n- its error file holds a traceback\n",
        "- the kernel killed 1 process of this control group for want of memory",
        "- blame: code; fingerprint: `ValueError@train.py:7`",
        "What would change it: A sign that the hardware is bad.",
        "Exited with code 1. Step 119 of 200 was complete, the phase was save.",
        '  File "/home/me/train.py", line 7, in step',
        "````text\nstep 119\n```\nValueError: bad | worse\n````",
        "NVRM: Xid (PCI:0000:5d:00): 31",
        "- -60.000 s  the first step was complete",
        "- +0.050 s  the peers were killed",
        "- logs of rank 1: `../../attempts/0003/n0000/r00001`",
    ):
        assert part in text
    assert (path.parent / "../../attempts/0003/n0000/r00001").is_dir()
    order = [text.index(each) for each in ("rank 1: exited", "noticed", "the peers were killed", "rank 3: ended")]
    assert order == sorted(order)


def test_the_table_has_a_row_for_every_rank(run_dir: RunDir) -> None:
    path = postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE)
    assert path is not None
    rows = [re.split(r"(?<!\\)\|", line) for line in path.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [[cell.strip() for cell in row[1:-1]] for row in rows] == [
        ["0", "100", "exited with code 1", "+0.250 s", "119", "step", "", ""],
        ["1", "101", "exited with code 1", "+0.000 s", "119", "save", "", ""],
        ["2", "102", "still ran", "", "", "", "sleeping in futex_wait_queue", rows[2][8].strip()],
        ["3", "103", "ended by SIGKILL", "+0.125 s", "", "", "", ""],
    ]
    assert rows[2][8].strip() in RANKS[2].stack


def test_how_full_memory_was_is_told_of_what_may_have_died_of_it(run_dir: RunDir) -> None:
    evidence = replace(EVIDENCE, memory="the control group uses 1.90 GB of memory, with a limit of 2.00 GB")
    for attempt, kind in enumerate((Kind.KILLED, Kind.HOST_OUT_OF_MEMORY, Kind.CODE_ERROR)):
        path = postmortem.write(run_dir, attempt, replace(FAILURE, kind=kind), AGAIN, evidence)
        assert path is not None
        assert (f"- memory: {evidence.memory}\n" in path.read_text()) == (kind is not Kind.CODE_ERROR)


def test_a_stop_says_so(run_dir: RunDir) -> None:
    path = postmortem.write(run_dir, 3, FAILURE, STOP, EVIDENCE)
    assert path is not None
    assert "**Not restarted** (exit code 76): all 3 restarts are used." in path.read_text()


def test_the_facts_are_typed(run_dir: RunDir) -> None:
    hang = Verdict(Value.HUNG, "step", 61.5, math.inf, 119, "rank 2 has stood still for 61.5 s", 2)
    assert postmortem.write(run_dir, 3, FAILURE, AGAIN, replace(EVIDENCE, hang=hang), [(NOON, "x")])
    facts = json.loads((run_dir.postmortem(3) / "failure.json").read_text())
    assert (facts["schema_version"], facts["attempt"], facts["node"], facts["host"]) == (1, 3, 0, "node-a")
    assert facts["failure"]["kind"] == "code error"
    assert facts["failure"]["victims"] == [0, 2, 3]
    assert facts["decision"]["delay"] == 2.0
    ranks = facts["evidence"]["ranks"]
    assert [each["exit_code"] for each in ranks] == [1, 1, None, -9]
    assert ranks[1]["error"]["traceback"] == TRACE
    assert ranks[1]["beat"]["phase"] == "save"
    assert ranks[2]["stack"] == list(RANKS[2].stack)
    assert facts["evidence"]["hang"]["value"] == "hung"
    assert facts["evidence"]["hang"]["limit"] is None  # JSON has no infinity
    assert facts["timeline"] == [{"time": NOON, "what": "x"}]
    assert facts["restart"] is None
    assert {each.name for each in run_dir.postmortem(3).iterdir()} == {"failure.json", "report.md"}


def test_a_hang_shows_the_stack_of_the_one_at_fault(run_dir: RunDir) -> None:
    hang = Verdict(Value.HUNG, "step", 61.5, 60.0, 119, "rank 2 has stood still for 61.5 s", 2)
    failure = replace(FAILURE, kind=Kind.HANG, rank=2, victims=(0, 1, 3))
    path = postmortem.write(run_dir, 3, failure, AGAIN, replace(EVIDENCE, hang=hang))
    assert path is not None
    text = path.read_text()
    assert "- watch: rank 2 has stood still for 61.5 s" in text
    assert "innermost frame first:\n\n```text\n" + "\n".join(RANKS[2].stack) + "\n```" in text
    assert "It left no pulse." in text


def test_what_ranks_left_is_copied_within_bounds(run_dir: RunDir) -> None:
    (run_dir.worker(3, 0, 0) / "stacks.txt").write_text("a stack")
    (run_dir.worker(3, 0, 1) / "error.json").write_bytes(b"\xff" * 10**7 + b"the end")
    (run_dir.worker(3, 0, 1) / "stacks.txt").touch()
    (run_dir.worker(3, 0, 2) / "error.json").mkdir()
    assert postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE)
    copies = {each.name: each.read_bytes() for each in run_dir.postmortem(3).glob("n*")}
    assert set(copies) == {"n0000-r00000-stacks.txt", "n0000-r00001-error.json"}
    assert copies["n0000-r00000-stacks.txt"] == b"a stack"
    assert copies["n0000-r00001-error.json"].endswith(b"the end")
    assert len(copies["n0000-r00001-error.json"]) <= 256 << 10
    for each in RANKS:
        (run_dir.worker(3, 0, each.rank) / "py-spy.txt").write_bytes(b"x" * 10**6)
    many = replace(EVIDENCE, ranks=tuple(replace(RANKS[0], rank=n) for n in range(64)))
    for n in range(64):
        run_dir.worker(4, 0, n).mkdir(parents=True)
        (run_dir.worker(4, 0, n) / "stacks.txt").write_bytes(b"x" * 10**6)
    assert postmortem.write(run_dir, 4, FAILURE, AGAIN, many)
    assert sum(each.stat().st_size for each in run_dir.postmortem(4).glob("n0000-*")) <= 4 << 20


def test_nodes_do_not_collide(run_dir: RunDir) -> None:
    assert postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE)
    elsewhere = replace(EVIDENCE, node=1, ranks=(replace(RANKS[0], rank=4),))
    (run_dir.worker(3, 1, 4)).mkdir(parents=True)
    (run_dir.worker(3, 1, 4) / "stacks.txt").write_text("a stack")
    path = postmortem.write(run_dir, 3, FAILURE, AGAIN, elsewhere)
    assert path is not None
    assert path.name == "n0001-report.md"
    assert "It ran on node 0, whose own report is beside this one." in path.read_text()
    postmortem.append_restart(run_dir, 3, {"stop": 1.0}, 5, node=1)
    facts = {each.name: json.loads(each.read_text()) for each in run_dir.postmortem(3).glob("*.json")}
    assert {name: fact["restart"] is None for name, fact in facts.items()} == {
        "failure.json": True,
        "n0001-failure.json": False,
    }
    assert (run_dir.postmortem(3) / "n0001-r00004-stacks.txt").exists()


def test_the_restart_is_added(run_dir: RunDir) -> None:
    path = postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE)
    assert path is not None
    before = path.read_text()
    postmortem.append_restart(run_dir, 3, {"notice": 0.002, "stop": 0.125, "first step": 0.1}, 1)
    assert path.read_text() == before + (
        "\n## The restart\n\nTraining went on after 0.227 s. 1 step had to be done again.\n\n"
        "| part | seconds |\n|---|---:|\n| notice | 0.002 |\n| stop | 0.125 |\n| first step | 0.100 |\n"
    )
    facts = json.loads((run_dir.postmortem(3) / "failure.json").read_text())
    assert facts["restart"]["seconds"] == {"notice": 0.002, "stop": 0.125, "first step": 0.1}
    assert facts["restart"]["total"] == pytest.approx(0.227)
    assert facts["restart"]["lost_steps"] == 1
    assert facts["failure"]["rank"] == 1


def test_nothing_is_raised_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "postmortem").write_text("in the way")
    run_dir = RunDir(tmp_path)
    assert postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE) is None
    postmortem.append_restart(run_dir, 3, {"stop": 1.0}, 0)
    assert (tmp_path / "postmortem").read_text() == "in the way"


def test_a_full_disk_costs_the_report_only(run_dir: RunDir) -> None:
    run_dir.postmortem(3).mkdir(parents=True)
    (run_dir.postmortem(3) / ".failure.json.tmp").touch()
    os.symlink("/dev/full", run_dir.postmortem(3) / f".failure.json.{os.getpid()}.tmp")
    assert postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE) is None
    assert not (run_dir.postmortem(3) / "failure.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"3"])
def test_a_broken_failure_json_is_left_as_it_is(run_dir: RunDir, content: bytes) -> None:
    path = postmortem.write(run_dir, 3, FAILURE, AGAIN, EVIDENCE)
    assert path is not None
    (run_dir.postmortem(3) / "failure.json").write_bytes(content)
    postmortem.append_restart(run_dir, 3, {"stop": 1.0}, 2)
    assert (run_dir.postmortem(3) / "failure.json").read_bytes() == content
    assert "2 steps had to be done again" in path.read_text()


def test_without_a_report_none_is_begun(run_dir: RunDir) -> None:
    postmortem.append_restart(run_dir, 3, {"stop": 1.0}, 2)
    assert not run_dir.postmortem(3).exists()


def test_text_that_is_no_text(run_dir: RunDir) -> None:
    wild = "a\ud800b\x00\x1b[2J|\n# not a title"
    rank = replace(RANKS[1], error=ErrorRecord(wild, wild), last_lines=(wild,), stack=(wild,), exited_at=math.inf)
    failure = replace(FAILURE, message=wild, why=(wild,))
    path = postmortem.write(
        run_dir, 3, failure, AGAIN, replace(EVIDENCE, ranks=(rank,), kernel=(wild,)), [(NOON, wild)]
    )
    assert path is not None
    assert b"\x00" not in path.read_bytes()
    assert b"\x1b" not in path.read_bytes()
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", path.read_text())
    assert "\n# not a title" not in outside
    json.loads((run_dir.postmortem(3) / "failure.json").read_text())


def test_from_real_files_to_a_report(run_dir: RunDir) -> None:
    """The whole way, with nothing made by hand: directories, evidence, failure, report."""
    ranks = []
    for n, message in enumerate(["RuntimeError: Connection closed by peer", "ZeroDivisionError: division by zero"]):
        place = run_dir.worker(3, 0, n)
        pulse.create(place / "pulse")
        (place / "stderr.log").write_text(f"Traceback (most recent call last):\n{message}\n")
        (place / "error.json").write_text(json.dumps({"message": {"message": message, "extraInfo": {}}}))
        ranks.append(LiveRank(n, n, 0, 1, time.time(), place))
    collector = Collector(Sources(kernel=KernelLog(Path("/nowhere")), memory=None))
    evidence = collector.collect(ranks, time.time(), thorough=False)
    failure = explain(evidence)
    path = postmortem.write(run_dir, 3, failure, STOP, evidence)
    assert path is not None
    assert failure.rank == 1
    assert "division by zero" in path.read_text()
    assert "## Rank 1, at fault" in path.read_text()
