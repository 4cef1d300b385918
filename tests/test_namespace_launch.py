"""The launcher on several nodes, each in namespaces of its own: lost, joined, asked to leave, failed, refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from namespaces import Net
from namespaces.clock import ahead
from namespaces.skipping import NET

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from namespaces import Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), NET]

SECONDS = 60.0
SAMPLES, BATCH = 120, 6
PATIENT = ",lost_timeout=60"
"""Where no node is lost none may pass for it because this machine was busy."""

# Goes as far as the file `limit` says, and writes down who saw which samples in which step.
SCRIPT = """
    import json, os, time
    import torch
    import torch.distributed as dist
    import ftrun

    def limit():
        with open("limit") as file:
            return int(file.read() or 0)

    @ftrun.entrypoint
    def main(ft):
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        samples = torch.utils.data.TensorDataset(torch.arange({samples}, dtype=torch.float32).reshape(-1, 1))
        loader = ft.loader(samples, global_batch={batch}, shuffle=True, seed=3)
        ft.track(model=model, optimizer=optimizer)
        for (batch,) in ft.steps(loader, total={total}):
            deadline = time.monotonic() + 120
            while limit() <= ft.step and time.monotonic() < deadline:
                time.sleep(0.01)
            {extra}
            loss = model(batch / {samples}).square().sum()
            optimizer.zero_grad()
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()
            line = dict(step=ft.step + 1, host=os.uname().nodename, ids=[int(each) for each in batch.flatten()],
                        rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]), at=time.monotonic(),
                        count=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            with open("lines", "a") as file:
                file.write(json.dumps(line) + "\\n")

    main()
"""


class Launchers:
    """``ftrun`` on the nodes of a net, all in one directory."""

    def __init__(
        self,
        net: Net,
        directory: Path,
        *options: str,
        total: int = 200,
        extra: str = "pass",
        batch: int = BATCH,
        conf: str = "",
    ) -> None:
        self.net = net
        self.directory = directory
        self.options = options
        self.conf = conf
        self.process: dict[int, Process] = {}
        text = SCRIPT
        for name, value in {"samples": SAMPLES, "total": total, "extra": extra, "batch": batch}.items():
            text = text.replace(f"{{{name}}}", str(value))
        (directory / "train.py").write_text(textwrap.dedent(text))
        (directory / "lines").touch()
        self.go(0)

    def start(self, *numbers: int, more: tuple[str, ...] = (), changed: dict[str, str] | None = None) -> None:
        root = str(Path(__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **(changed or {})}
        # However late one of them comes on a busy machine, the first round has all of them.
        where = ("--rdzv-endpoint", "node1:29400", "--rdzv-conf", f"last_call_timeout=30{self.conf}")
        for number in numbers:
            words = (sys.executable, "-m", "ftrun", *where, *self.options, *more, "--rdzv-id", "together", "train.py")
            self.process[number] = self.net.node(number).start(*words, cwd=self.directory, env=env)

    def go(self, limit: int) -> None:
        """Let the ranks make steps up to this one."""
        temporary = self.directory / "limit.new"
        temporary.write_text(str(limit))
        temporary.replace(self.directory / "limit")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "lines").read_text().splitlines()]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() >= deadline:
                self.show()
                pytest.fail(f"not in time: {what}")
            time.sleep(0.1)

    def reach(self, step: int, hosts: set[str]) -> None:
        """Wait until the ranks of exactly these nodes have made a step."""
        self.go(step)

        def reached() -> bool:
            there = [each for each in self.lines if each["step"] == step]
            last = max((each["count"] for each in there), default=0)
            return {each["host"] for each in there if each["count"] == last} == hosts

        self.until(reached, f"step {step} on {hosts}")

    def require_once(self, before: int) -> None:
        """No step was made twice since so many lines."""
        steps = [(each["step"], each["rank"]) for each in self.lines[before:]]
        if len(steps) != len(set(steps)):
            self.show()
            pytest.fail(f"steps were made twice: {sorted(steps)}")

    @property
    def step(self) -> int:
        """The last one that was made."""
        return max((int(each["step"]) for each in self.lines), default=0)

    def go_on_until(self, condition: Callable[[], object], what: str) -> None:
        """One step after the other, for ranks leave at a step's end only."""

        def came() -> object:
            self.go(self.step + 1)
            return condition()

        self.until(came, what)

    def codes(self) -> dict[int, int]:
        """Exit codes of all that run."""
        try:
            return {number: process.wait(SECONDS) for number, process in self.process.items()}
        except TimeoutError:
            self.show()
            raise

    def stood_still(self, what: str, since: float) -> None:
        times = [since, *sorted(each["at"] for each in self.lines if each["at"] > since)]
        print(f"{what}: {max(after - before for before, after in itertools.pairwise(times)):.2f} s without a step")

    def events(self, kind: type[events.Event]) -> list[Any]:
        files = sorted(self.directory.glob("runs/train/together/events/*"))
        return [each.event for file in files for each in events.read(file) if isinstance(each.event, kind)]

    def show(self) -> None:
        for number, process in self.process.items():
            print(f"--- node {number}, exit code {process.poll()}\n{process.text()}")


def _hosts(*numbers: int) -> set[str]:
    return {f"node{number}" for number in numbers}


def _require_exact(lines: list[dict[str, Any]], total: int) -> None:
    """Every step has seen the samples that are its own, however many ranks there were and however often it was made."""
    seen: dict[tuple[int, int], list[int]] = {}
    for each in lines:
        seen.setdefault((each["step"], each["count"]), []).extend(each["ids"])
    by_step: dict[int, set[tuple[int, ...]]] = {}
    for (step, _), ids in seen.items():
        by_step.setdefault(step, set()).add(tuple(sorted(ids)))
    whole = {step: next(each for each in found if len(each) == BATCH) for step, found in by_step.items()}
    assert sorted(whole) == list(range(1, total + 1))
    assert all(set(ids) <= set(whole[step]) for step, found in by_step.items() for ids in found)
    epoch = SAMPLES // BATCH
    for start in range(0, total, epoch):
        ids = itertools.chain.from_iterable(whole[step] for step in range(start + 1, start + epoch + 1))
        assert sorted(ids) == list(range(SAMPLES))


def test_nodes_are_lost_come_back_leave_and_finish_at_the_exact_sample(tmp_path: Path) -> None:
    every = ("--set", "checkpoint.every=5 steps", "--nproc", "1")
    with Net(3) as net:
        nodes = Launchers(net, tmp_path, "--nnodes", "2:3", *every)
        # Their clocks are 20 s apart, which must not matter.
        for number, seconds in ((1, 0.0), (2, 20.0), (3, -20.0)):
            nodes.start(number, changed=ahead(seconds))
        nodes.reach(12, _hosts(1, 2, 3))

        # Nobody talks when the power goes: it is the rendezvous that notices. The host of the rendezvous is lost.
        since = time.monotonic()
        net.node(1).power_off()
        nodes.reach(22, _hosts(2, 3))
        nodes.stood_still("the host is powered off", since)

        # It comes back by the endpoint that it was started with, and finds the others; nothing is lost by that.
        before = len(nodes.lines)
        net.node(1).power_on()
        since = time.monotonic()
        nodes.start(1)
        nodes.until(lambda: "joins" in nodes.process[2].text() + nodes.process[3].text(), "node 1 joins")
        nodes.go_on_until(lambda: any(each["host"] == "node1" for each in nodes.lines[before:]), "it takes part")
        nodes.reach(nodes.step + 2, _hosts(1, 2, 3))
        nodes.stood_still("a node comes back", since)
        nodes.require_once(before)

        # One is asked to leave: all save with it, and the others go on from there.
        before = len(nodes.lines)
        since = time.monotonic()
        nodes.process[3].kill(signal.SIGTERM)
        nodes.go_on_until(lambda: nodes.process[3].poll() is not None, "it leaves at a boundary")
        nodes.reach(nodes.step + 2, _hosts(1, 2))
        nodes.stood_still("a node is asked to leave", since)
        nodes.require_once(before)

        nodes.go(1000)
        assert nodes.codes() == {1: 0, 2: 0, 3: 75}
        # What each restart is counted from: one node has failed, the others came and went in order.
        since = re.findall(r"training again: .* after (the failure|all had saved \(.*\))", nodes.process[2].text())
        assert since == ["the failure", "all had saved (node1 joins)", "all had saved (node3 left)"], since
        _require_exact(nodes.lines, 200)
        fallen = nodes.events(events.Failed)
        assert {(each.cause, each.failed_rank, each.restart) for each in fallen} == {("membership", -1, True)}, fallen
        reasons = [each.message for each in fallen]
        assert [any(part in each for each in reasons) for part in ("node1 is lost", "node3 left")] == [True, True]
        generations = {each.generation for each in nodes.events(events.Met)}
        assert generations == set(range(1, max(generations) + 1))
        # The same number in the workers' environment, of the same members.
        members = {each.generation: each.nodes for each in nodes.events(events.Met)}
        assert all(each["host"] in members[each["count"] + 1] for each in nodes.lines)
        assert all(each["world"] == len(members[each["count"] + 1]) for each in nodes.lines)


def test_one_node_decides_for_all_and_all_say_the_same(tmp_path: Path) -> None:
    extra = "assert ft.step != 6 or os.environ['RANK'] != '1', 'this is the cause'"
    with Net(2) as net:
        options = ("--nnodes", "2", "--nproc", "1", "--max-restarts", "1")
        nodes = Launchers(net, tmp_path, *options, extra=extra, conf=PATIENT)
        nodes.start(1, 2)
        nodes.go(1000)
        assert nodes.codes() == {1: 1, 2: 1}
        texts = {number: process.text() for number, process in nodes.process.items()}
        (guilty,) = [number for number, text in texts.items() if "not restarted" in text]
        (other,) = {1, 2} - {guilty}
        assert f"the run was ended by node{guilty}: rank 1: AssertionError: this is the cause" in texts[other]
        assert {each["count"] for each in nodes.lines} == {0, 1}
        reports = sorted(path.parent.name for path in tmp_path.glob("runs/train/together/postmortem/*/*report.md"))
        assert reports == ["0001", "0002"]


def test_workers_meet_whatever_their_hosts_names_mean_elsewhere(tmp_path: Path) -> None:
    # As Debian has it; nothing at all; another network, which the others don't reach.
    own_names = {1: "127.0.1.1", 2: "", 3: "10.99.0.3", 4: "10.99.0.4"}
    with Net(4, own_name=own_names) as net:
        for number in (3, 4):
            card = f"ip link add eth1 type veth peer name eth1x && ip addr add {own_names[number]}/24 dev eth1"
            net.node(number).run("sh", "-c", f"{card} && ip link set eth1 up && ip link set eth1x up")
        nodes = Launchers(net, tmp_path, "--nnodes", "4", "--nproc", "1", total=4, batch=4, conf=PATIENT)
        nodes.go(1000)
        nodes.start(1, 2)
        nodes.start(3, more=("--local-addr", net.node(3).address))
        nodes.start(4, changed={"FTRUN_INTERFACE": "eth0"})
        assert nodes.codes() == {1: 0, 2: 0, 3: 0, 4: 0}
        assert {each["world"] for each in nodes.lines} == {4}
