"""Two launchers on one host, as two nodes that meet over c10d: what stock torchrun gets wrong when members change."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest
from conftest import eventually, held_port

from ftrun import events

if TYPE_CHECKING:
    from conftest import Runner, Started

pytestmark = pytest.mark.slow

_SCRIPT = """
    import datetime as dt, os, time, torch
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    rank, world, count = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    print("world", world, "count", count, flush=True)
    while True:
        weight.grad = torch.ones(2)
        optimizer.step()
        done = torch.tensor([float(os.path.exists("done"))])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done.item():
            break
        if world == "2" and rank == "0" and os.path.exists("crash"):
            os.remove("crash")
            os._exit(7)
        time.sleep(0.05)
    dist.destroy_process_group()  # gloo's threads may abort a process that ends while they begin
"""


def _node(runner: Runner, name: str, port: int) -> Started:
    meet = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "pair")
    return runner.start(*meet, "--rdzv-conf", "last_call_timeout=1", "--run-dir", name, "node.py")


def _worlds(node: Started) -> list[str]:
    return [line for line in node.out.read_text().splitlines() if line.startswith("world")]


def test_a_node_that_joins_late_trains_with_the_others_and_counts_the_same_restarts(runner: Runner) -> None:
    (runner.cwd / "node.py").write_text(textwrap.dedent(_SCRIPT))
    with held_port() as port:
        _grow_and_fall(runner, port)


def _common(first: Started, second: Started, *, larger_than: int) -> int | None:
    """How many restarts both nodes count in the world of both. A round that the second one misses is one more."""
    one, other = _worlds(first)[-1:], _worlds(second)[-1:]
    count = int(other[0].rpartition(" ")[2]) if one == other and one[0].startswith("world 2 ") else 0
    return count if count > larger_than else None


def _begun(runner: Runner, name: str) -> int:
    """How many attempts a node has begun."""
    files = runner.cwd.glob(f"{name}/events/*")
    return sum(isinstance(each.event, events.AttemptStarted) for file in files for each in events.read(file))


def _grow_and_fall(runner: Runner, port: int) -> None:
    first = _node(runner, "a", port)
    eventually(lambda: _worlds(first) == ["world 1 count 0"], 60, "the first node trains alone")
    second = _node(runner, "b", port)
    count = eventually(lambda: _common(first, second, larger_than=0), 60, "the second node has joined")
    before = sum(_begun(runner, name) for name in "ab")
    (runner.cwd / "crash").touch()
    restarted = eventually(lambda: _common(first, second, larger_than=count), 60, "both have restarted")
    # One restart, and one more for each round that one of them missed because it came too late.
    assert restarted < count + sum(_begun(runner, name) for name in "ab") - before
    (runner.cwd / "done").touch()
    for node in (first, second):
        result = node.wait(60)
        assert result.code == 0, result
    files = [*runner.cwd.glob("a/events/*"), *runner.cwd.glob("b/events/*")]  # either may have got rank 0
    fallen = [each.event for file in files for each in events.read(file) if isinstance(each.event, events.Failed)]
    assert (0, 7) in [(each.failed_rank, each.exit_code) for each in fallen]
