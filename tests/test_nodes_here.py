"""Three nodes of a run on one machine: a spare whose cache is filled, and a node that is excluded while it trains."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import textwrap
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from conftest import eventually, held_port
from filler_kit import remote  # noqa: F401 - a fixture

from ftrun.contract import ExitCode
from ftrun.data.cache.files import CachedFiles
from ftrun.data.filler.places import Pool, read_json
from ftrun.health.history import By, Excluded
from ftrun.health.nodes_file import NodesFile

if TYPE_CHECKING:
    from conftest import Runner, Started
    from filler_kit import Remote

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
STEPS, BATCH = 40, 8

# Goes as far as the file `limit` says, and writes down which rank has seen which samples in which step.
SCRIPT = """
    import json, os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import ftrun
    from ftrun.data.cache.dataset import CachedDataset
    from ftrun.data.cache.files import CachedFiles

    def number(path):
        return int(path.read_bytes()[:8])

    @ftrun.entrypoint
    def main(ft):
        urls = [f"kit://{sys.argv[1]}/f{index:04d}.bin" for index in range(BATCH * STEPS)]
        loader = ft.loader(CachedDataset(urls, number, CachedFiles(reserve_free=0)), global_batch=BATCH, shuffle=True)
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        ft.track(weight=torch.nn.ParameterList([weight]), optimizer=optimizer)
        for batch in ft.steps(loader, total=STEPS):
            deadline = time.monotonic() + 120
            while int(Path("limit").read_text() or 0) <= ft.step and time.monotonic() < deadline:
                time.sleep(0.01)
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.03)
            line = dict(step=ft.step + 1, rank=ft.rank, world=ft.world_size, ids=batch.tolist(), pid=os.getpid())
            with open("lines", "a") as file:
                file.write(json.dumps(line) + "\\n")

    main()
"""


def _node(runner: Runner, remote: Remote, port: int, letter: str) -> Started:  # noqa: F811
    # None passes for lost because this machine was busy: the spare would have its seat.
    conf = ("--rdzv-conf", "last_call_timeout=1,lost_timeout=60")
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", *conf)
    env = remote.environment | {"FTRUN_CACHE": str(runner.cwd / f"cache-{letter}")}
    return runner.start(
        *meet,
        "--name",
        "pair",
        "--nproc",
        "1",
        "train.py",
        str(remote.remote),
        env=env,
        compiler=True,
        standbys=letter == "c",
    )


def _lines(runner: Runner) -> list[dict[str, Any]]:
    path = runner.cwd / "lines"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _workers(runner: Runner, rank: int) -> set[int]:
    return {each["pid"] for each in _lines(runner) if each["rank"] == rank}


def _go(runner: Runner, limit: int) -> None:
    temporary = runner.cwd / "limit.new"
    temporary.write_text(str(limit))
    temporary.replace(runner.cwd / "limit")


def _left(runner: Runner, node: Started) -> bool:
    """Let the ranks make one step after the other until a node has left; it says so before it asks its rank to."""
    for limit in range(4, STEPS - 1):
        _go(runner, limit)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.process.wait(0.3)
            return True
    return False


def _fetched(runner: Runner, letter: str) -> set[int]:
    """The files in a node's cache, by number."""
    found = CachedFiles(runner.cwd / f"cache-{letter}", reserve_free=0).cached()
    return {int(each.url.rpartition("/f")[2].removesuffix(".bin")) for each in found}


def test_a_spare_fills_its_cache_and_an_excluded_node_saves_before_it_leaves(
    runner: Runner,
    remote: Remote,  # noqa: F811
) -> None:
    remote.fill(BATCH * STEPS)
    remote.faults(latency=0.002)
    text = textwrap.dedent(SCRIPT).replace("STEPS", str(STEPS)).replace("BATCH", str(BATCH))
    (runner.cwd / "train.py").write_text(text)
    _go(runner, 3)
    with held_port() as port:
        # Each comes when the one before has its seat: who is faster is no matter of who was started first.
        first = _node(runner, remote, port, "a")
        eventually((runner.cwd / "runs/pair/rendezvous/leader.json").exists, 60, "the first launcher")
        second = _node(runner, remote, port, "b")
        eventually(lambda: sum(each["step"] == 3 for each in _lines(runner)) == 2, 60, "three steps of two nodes")
        third = _node(runner, remote, port, "c")

        # It has no seat, and fetches what the last rank reads.
        eventually(lambda: len(_fetched(runner, "c")) > 80, 60, "what the spare has fetched")
        early = _fetched(runner, "c")
        spare = Pool.of(runner.cwd / "cache-c").run(runner.cwd / "runs/pair", f"{HOST}#3")
        pid = (read_json(spare.shown) or {})["pid"]
        assert psutil.Process(pid).ppid() == third.process.pid

        # The second is left out while it trains: all save, the spare takes its seat, and no step is done twice.
        out = Excluded(time.time(), By.USER, "loud fans", 3600.0)  # as `ftrun nodes exclude` does it
        NodesFile(runner.run_dir("pair").nodes, print).change(lambda book: book.add(f"{HOST}#2", out))
        eventually(lambda: "saving at the next step boundary" in second.err.read_text(), 60, "the node's own word")
        assert _left(runner, second)
        result = second.wait()
        assert (result.code, "loud fans" in result.err) == (ExitCode.EXCLUDED, True)
        _go(runner, STEPS - 2)
        eventually(lambda: len(_workers(runner, 1)) == 2, 60, "a step of the spare")
        # Its worker had imported torch before it was wanted.
        commands = [psutil.Process(each).cmdline() for each in _workers(runner, 1) if psutil.pid_exists(each)]
        assert ["--parked" in each for each in commands] == [True], commands
        _go(runner, STEPS)
        stayed = first.wait()
        assert [stayed.code, third.wait().code] == [0, 0]
        # Nothing has failed, and the node that stays says so.
        assert f"{HOST}#2 left: the workers here have saved and left, and the nodes meet again" in stayed.err
        assert f"after all had saved ({HOST}#2 left)" in stayed.err
        assert "after the failure" not in stayed.err

    lines = _lines(runner)
    assert Counter((each["step"], each["rank"]) for each in lines) == {
        (step, rank): 1 for step in range(1, STEPS + 1) for rank in (0, 1)
    }
    assert sorted(index for each in lines for index in each["ids"]) == list(range(BATCH * STEPS))
    assert {each["world"] for each in lines} == {2}
    last = {index for each in lines if each["rank"] == 1 for index in each["ids"]}
    assert early <= last
    # Each node has fetched what it reads once, and the one that took the seat nothing of that anew.
    reads = {int(name[1:5]): count for name, count in remote.reads().items()}
    assert sum(reads[index] for index in reads.keys() - last) <= len(reads.keys() - last) + 2  # the end may cut one off
    assert max(reads[index] for index in early) <= 2
    eventually(lambda: not psutil.pid_exists(pid), 60, "the end of the spare's filler")
    assert not spare.path.exists()
    assert not [*(runner.cwd / "runs/pair/data").glob("spares/*"), *(runner.cwd / "runs/pair/data").glob("offers")]
