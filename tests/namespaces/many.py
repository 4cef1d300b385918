"""Many tiny agents at once: forked from one process that has imported torch, each on a node of its own.

    python many.py NODES [--rounds N] [--host | --both]    one JSON object a line: how long the survivors of a kill took

As programs of their own, a hundred agents would take minutes to import torch, and more memory than there is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from namespaces import Net

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _MS_BIND, _MS_REC_PRIVATE = 0x20000, 0x1000, 0x4000 | 0x40000
_TICKS = os.sysconf("SC_CLK_TCK")


class Forked:
    """A forked agent.

    Attributes:
        pid: its process.
        out: where it writes.
    """

    def __init__(self, holder: int, hosts: Path, out: Path, main: Callable[[], object]) -> None:
        self.out = out
        out.touch()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _become(holder, hosts, out, parent, main)
        self._read = 0
        self._lines: list[dict[str, Any]] = []
        self._over = False

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it has said so far."""
        with self.out.open() as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text.rpartition("\n")[0]
        if whole:
            self._read += len(whole.encode()) + 1
            self._lines += [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return self._lines

    @property
    def last(self) -> dict[str, Any]:
        """The last round that it was in; empty before the first."""
        return next((each for each in reversed(self.lines) if each["what"] == "round"), {})

    def cpu(self) -> float:
        """Seconds of processor time that it has used; 0 when it is gone."""
        try:
            values = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(values[11]) + int(values[12])) / _TICKS

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal."""
        if not self._over:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill and reap it."""
        if not self._over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._over = True


def _require(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(holder: int, hosts: Path, out: Path, parent: int, main: Callable[[], object]) -> NoReturn:
    """In the child: go where a node is, and be its agent."""
    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for kind in ("net", "uts"):
            with Path(f"/proc/{holder}/ns/{kind}").open() as namespace:
                _require(libc.setns(namespace.fileno(), 0))
        # Not the node's own files: its /proc knows nothing of a process that was forked elsewhere.
        _require(libc.unshare(_CLONE_NEWNS))
        _require(libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
        _require(libc.mount(str(hosts).encode(), b"/etc/hosts", None, _MS_BIND, None))
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


class Many:
    """A net whose nodes run forked agents. Node 1 has the endpoint's address.

    Args:
        nodes: how many.
        options: of the agents, as of ``tiny_agent.py``.
    """

    def __init__(self, nodes: int, *options: str) -> None:
        # Before anything is forked: what all of them share.
        import torch.distributed.elastic.utils.store  # noqa: F401

        import ftrun.rendezvous.handler  # noqa: F401

        self._options = options
        self.nodes = nodes
        self.agents: dict[int, Forked] = {}
        self.net = Net(nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self.agents.values():
            each.close()
        self.net.close()

    def start(self) -> float:
        """Start all agents and wait until they have met. Returns the seconds that it took."""
        began = time.monotonic()
        for number in range(1, self.nodes + 1):
            node = self.net.node(number)
            hosts, out = self.net.output(f"hosts-{number}"), self.net.output(f"agent-{number}.txt")
            self.agents[number] = Forked(node.holder, hosts, out, self._agent)
        self.meet(list(self.agents), 0)
        return max(each.last["at"] for each in self.agents.values()) - began

    def _agent(self) -> None:
        from namespaces import tiny_agent

        sys.argv = ["tiny_agent.py", "node1:29400", "2", str(self.nodes), *self._options]
        tiny_agent.main()

    def meet(self, numbers: list[int], after: int) -> int:
        """Wait until these are in one round after a generation. Returns its generation."""
        deadline = time.monotonic() + _SECONDS
        while True:
            rounds = [self.agents[number].last for number in numbers]
            met = all(each and len(each["members"]) == len(numbers) for each in rounds)
            found = {each.get("generation", 0) for each in rounds}
            if met and len(found) == 1 and (generation := int(found.pop())) > after:
                return generation
            if time.monotonic() >= deadline:
                late = [number for number in numbers if self.agents[number].last.get("generation", 0) <= after]
                raise TimeoutError(
                    f"generations {found}, late {late}:\n" + self.agents[(late or numbers)[0]].out.read_text()
                )
            time.sleep(0.05)

    def cores(self, seconds: float) -> float:
        """How many processor cores all agents together keep busy while nothing happens."""
        before, began = sum(each.cpu() for each in self.agents.values()), time.monotonic()
        time.sleep(seconds)
        return (sum(each.cpu() for each in self.agents.values()) - before) / (time.monotonic() - began)

    def lose(self, number: int) -> dict[str, Any]:
        """Kill one, and wait until all others have met again. Returns what it took."""
        others = [each for each in self.agents if each != number]
        generation = max(self.agents[each].last["generation"] for each in others)
        used = sum(self.agents[each].cpu() for each in others)
        began = time.monotonic()
        self.agents[number].close()
        self.meet(others, generation)
        rounds = [self.agents[each].last["at"] - began for each in others]
        used = sum(self.agents[each].cpu() for each in others) - used
        del self.agents[number]
        return {"first": round(min(rounds), 2), "last": round(max(rounds), 2), "cpu": round(used, 2)}


def main() -> None:
    """Kill some of many, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int)
    parser.add_argument("--rounds", type=int, default=1, help="how many are killed, one after the other")
    parser.add_argument("--host", action="store_true", help="kill the host of the rendezvous each time")
    parser.add_argument("--both", action="store_true", help="kill a member and the host in turn")
    parser.add_argument("--steady", type=float, default=2.0, help="seconds for which nothing happens beforehand")
    arguments = parser.parse_args()
    with Many(arguments.nodes, "last_call_timeout=60") as many:
        print(json.dumps({"nodes": arguments.nodes, "up": round(many.start(), 2)}), flush=True)
        print(json.dumps({"steady cores": round(many.cores(arguments.steady), 3)}), flush=True)
        kinds = ["member", "host"] if arguments.both else ["host" if arguments.host else "member"]
        for what in kinds * arguments.rounds:
            members = many.agents[max(many.agents)].last["members"]
            victim = members[0] if what == "host" else members[len(members) // 2]
            print(json.dumps({"what": what, **many.lose(int(victim.removeprefix("node")))}), flush=True)


if __name__ == "__main__":
    main()
