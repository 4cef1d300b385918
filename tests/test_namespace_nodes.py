"""Nodes that are left out of a real run and come back: by hand, and for what the kernel log says of a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from namespaces import Net
from namespaces.skipping import NET

from ftrun import events
from ftrun.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from namespaces import Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), NET]

SECONDS = 60.0

# Says who it is, and waits until all may end. Nothing of torch: what is looked at here are the launchers.
SCRIPT = """\
import json, os, time
from pathlib import Path
line = {"host": os.uname().nodename, "pid": os.getpid(), "world": int(os.environ["WORLD_SIZE"]),
        "count": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
with open("lines", "a") as file:
    file.write(json.dumps(line) + "\\n")
deadline = time.monotonic() + 180
while not Path("done").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""
XID = "NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


class Nodes:
    """``ftrun`` on the nodes of a net, each with a kernel log of its own."""

    def __init__(self, net: Net, directory: Path) -> None:
        self.net = net
        self.directory = directory
        self.environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "NO_COLOR": "1"}
        self.process: dict[int, Process] = {}
        self.count = -1
        (directory / "train.py").write_text(SCRIPT)
        (directory / "lines").touch()
        for node in net.nodes:
            (directory / f"kmsg-{node.name}").touch()

    def start(self, *numbers: int) -> None:
        words = (
            "--nnodes",
            "1:3",
            "--nproc",
            "1",
            "--rdzv-endpoint",
            "node1:29400",
            "--rdzv-id",
            "job",
            "--name",
            "job",
        )
        # None passes for lost because this machine was busy.
        conf = ("--rdzv-conf", "last_call_timeout=20,lost_timeout=60", "--set", "standby.enabled=false", "train.py")
        for number in numbers:
            node = self.net.node(number)
            environment = {**self.environment, "FTRUN_KMSG": str(self.directory / f"kmsg-{node.name}")}
            self.process[number] = node.start(
                sys.executable, "-m", "ftrun", *words, *conf, cwd=self.directory, env=environment
            )

    def nodes(self, *arguments: str) -> str:
        """What ``ftrun nodes`` says."""
        command = [sys.executable, "-m", "ftrun", "nodes", *arguments]
        done = subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        return {each["host"]: each["state"] for each in json.loads(self.nodes("--json"))["nodes"]}

    def world(self, *hosts: str) -> dict[str, int]:
        """Wait until exactly these make up a new world. Returns their workers' process ids."""

        def latest() -> dict[str, int] | None:
            lines = [json.loads(line) for line in (self.directory / "lines").read_text().splitlines()]
            count = max((each["count"] for each in lines), default=-1)
            if count <= self.count:
                return None
            here = {each["host"]: each["pid"] for each in lines if each["count"] == count}
            whole = {each["world"] for each in lines if each["count"] == count} == {len(hosts)}
            if not whole or set(here) != set(hosts):
                return None
            self.count = count
            return here

        return self.until(latest, f"a world of {hosts}")

    def until(self, condition: Callable[[], dict[str, int] | None], what: str) -> dict[str, int]:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if (found := condition()) is not None:
                return found
            time.sleep(0.05)
        for number, process in self.process.items():
            print(f"--- node {number}, exit code {process.poll()}\n{process.text()}")
        pytest.fail(f"not in time: {what}")

    def told(self) -> list[tuple[str, str, str]]:
        """What the run's events say of who is left out: kind, host, and by whom; in no order, for some come at once."""
        kinds = events.NodeExcluded, events.NodeAdmitted, events.ExclusionRefused
        found = [each.event for each in events.read(self.directory / "runs/job/events/n0000.jsonl")]
        return sorted((each.kind, each.host, getattr(each, "by", "")) for each in found if isinstance(each, kinds))

    def code(self, number: int) -> int:
        code = self.process[number].wait(SECONDS)
        print(f"--- node {number}, exit code {code}\n{self.process[number].text()}")
        return code

    def fall(self, number: int) -> None:
        """A GPU of this node is gone, and takes the worker with it."""
        with (self.directory / f"kmsg-node{number}").open("a") as file:
            file.write(XID)
        self.net.node(number).run("sh", "-c", f"kill -{signal.SIGKILL:d} $(pgrep -f 'train\\.py$' | tail -1)")


def test_nodes_are_left_out(tmp_path: Path) -> None:
    with Net(4) as net:
        run = Nodes(net, tmp_path)
        run.start(1, 2, 3)
        run.world("node1", "node2", "node3")
        assert run.states() == dict.fromkeys(("node1", "node2", "node3"), "fine")
        run.start(4)
        run.until(lambda: {} if "is a spare" in run.process[4].text() else None, "a spare")

        # By hand, while it runs: it leaves, a spare takes its seat, and it can't come back.
        began = time.monotonic()
        run.nodes("exclude", "node3", "--for", "1h", "--reason", "loud fans")
        assert run.code(3) == ExitCode.EXCLUDED
        assert "loud fans" in run.process[3].text()
        run.world("node1", "node2", "node4")
        print(f"excluded by hand: {time.monotonic() - began:.2f} s to the world with the spare")
        run.start(3)

        # For what its kernel log says; but one of four is out, and a second would be too many.
        run.fall(2)
        run.until(lambda: {} if run.states()["node2"] == "suspect" else None, "a mark on node2")
        run.world("node1", "node2", "node4")
        run.until(lambda: {} if "node2 stays: Xid 79" in run.process[2].text() else None, "a word on node2")
        assert "1 of 4 nodes are excluded" in run.nodes()
        assert run.code(3) == ExitCode.EXCLUDED
        assert "`ftrun nodes admit node3` lets it in" in run.process[3].text()

        run.nodes("admit", "node3")
        began = time.monotonic()
        run.fall(2)
        assert run.code(2) == ExitCode.EXCLUDED
        assert "Xid 79" in run.process[2].text()
        run.world("node1", "node4")
        print(f"excluded by the policy: {time.monotonic() - began:.2f} s to the world without it")
        assert run.states() == {"node1": "fine", "node2": "excluded", "node3": "fine", "node4": "fine"}
        (tmp_path / "done").touch()
        assert [run.code(1), run.code(4)] == [0, 0]
        assert run.told() == [
            ("exclusion_refused", "node2", ""),
            ("node_admitted", "node3", "user"),
            ("node_excluded", "node2", "policy"),
            ("node_excluded", "node3", "user"),
        ]
