"""Two machines whose clocks are 20 s apart: which rank failed first is told right, by one post-mortem for both."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
from namespaces import Net
from namespaces.clock import ahead
from namespaces.job import Job
from namespaces.skipping import NET

pytestmark = [pytest.mark.slow, NET, pytest.mark.usefixtures("memory_forgotten")]

ROOT = Path(__file__).parents[1]
SECONDS = 60.0

# One rank ends by itself; the other, which waits for it, can only say that its connection was closed.
SCRIPT = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if os.uname().nodename == "node2":
        time.sleep(1.0)  # clocks have been compared
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))
"""


def test_who_failed_first_where_clocks_are_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    words = ("--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", "node1:29400", "--name", "apart")
    patient = ("--rdzv-conf", "lost_timeout=60")  # none passes for lost because this machine was busy
    more = ("--max-restarts", "0", "--set", "standby.enabled=false", "train.py")
    with Net(2) as net:
        job = Job(net, [sys.executable, "-m", "ftrun", *words, *patient, *more], tmp_path, ahead(0.0, ROOT))
        job.start(1)
        job.start(2, changed=ahead(20.0, ROOT))
        codes = {number: process.wait(SECONDS) for number, process in job.launchers.items()}
        texts = {number: process.text() for number, process in job.launchers.items()}
    for text in texts.values():
        print(text)
    assert codes == {1: 128 + 9, 2: 128 + 9}
    assert "the run was ended by node2: rank" in texts[1]
    assert "was ended by SIGKILL" in texts[1]

    directory = tmp_path / "runs/apart/postmortem/0001"
    told = json.loads((directory / "failure.json").read_text())
    assert (told["host"], told["failure"]["kind"], told["failure"]["exit_code"]) == ("node2", "killed", -9)
    assert (told["missing"], told["joined"], told["order"]) == ([], True, [])
    nodes = {each["host"]: each for each in told["nodes"]}
    (killed,), (victim,) = nodes["node2"]["ranks"], nodes["node1"]["ranks"]
    assert (killed["role"], killed["exit_code"]) == ("at fault", -9)
    assert victim["role"] in ("fell with it", "was ended for it")
    # Node 0 is the one that hosts the rendezvous, whose clock counts.
    assert nodes["node1"]["clock"] == {"seconds": 0, "uncertainty": 0}
    assert abs(nodes["node2"]["clock"]["seconds"] - 20) < 0.1
    at = [each["at"] for each in (killed, victim) if each["at"]]
    assert max(at) - min(at) < 10  # clocks that nobody compares are 20 s apart
    report = (directory / "report.md").read_text()
    said = re.search(r"the clock of node2 is (\d+\.\d+) s ahead of that of node1", report)
    assert said is not None, report
    assert abs(float(said[1]) - 20) < 0.1  # it may be 19.999 as well
    assert "| node2 |" in report
