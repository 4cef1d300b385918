"""The bridge between nodes, and what can happen to it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from namespaces.addresses import addresses, mac
from namespaces.node import Node
from namespaces.processes import end, hold, sweep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NEEDED = {"iproute2": ("ip", "bridge"), "util-linux": ("nsenter", "unshare", "setpriv")}
_SECONDS = 60.0
_FEW = 32
_TUN = "/dev/net/tun"
_SLOW_SWITCH = Path(__file__).with_name("slow_switch.py")

_SWITCH = "echo ready; exec sleep infinity"


@functools.cache
def why_not() -> str:
    """Why there can be no net here; empty where there can."""
    if os.geteuid() != 0:
        return "no network namespaces here: they need root"
    for package, programs in _NEEDED.items():
        if not all(map(shutil.which, programs)):
            return f"no network namespaces here: install {package}"
    try:
        with Net(2):
            return ""
    except (OSError, RuntimeError) as error:
        return f"no network namespaces here: {error}"


class Net:
    """A bridge and nodes on it, numbered from 1.

    Args:
        nodes: how many.
        slow: packets can take their time and be lost, see :meth:`weather`; nodes can't be powered on again.
        own_name: what a node's own name stands for in its ``/etc/hosts``: the address that others use where nothing is
            given, ``127.0.1.1`` as Debian has it, or nothing at all where it is empty. One for all, or by number.

    Raises:
        RuntimeError: it can't be made; see :func:`why_not`.
    """

    def __init__(self, nodes: int, *, own_name: str | Mapping[int, str] | None = None, slow: bool = False) -> None:
        sweep()
        self._slow: subprocess.Popen[str] | None = None
        self._own_names = (
            dict.fromkeys(range(1, nodes + 1), own_name) if own_name is None or isinstance(own_name, str) else own_name
        )
        self._directory = Path(tempfile.mkdtemp(prefix="ftrun-net-"))
        self._bent: set[tuple[int, int]] = set()
        self._nodes: dict[int, Node] = {}
        self._switch: subprocess.Popen[str] | None = None
        try:
            self._switch = hold("unshare", "-n", "sh", "-c", _SWITCH)
            self._ip(self._switch.pid, ["link add br0 type bridge", "link set br0 up"])
            self._nodes = {number: Node(self, number, nodes) for number in range(1, nodes + 1)}
            if slow:
                self._connect_slowly()
            else:
                self._connect(self._nodes.values())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Power everything off, and leave nothing."""
        for node in self._nodes.values():
            node.power_off()
        for each in (self._switch, self._slow):
            if each is not None:
                end(each)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def nodes(self) -> list[Node]:
        """All nodes, in order."""
        return list(self._nodes.values())

    def node(self, number: int) -> Node:
        """One node, by number."""
        return self._nodes[number]

    # Faults of the network

    def weather(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """What every packet of a slow net goes through from now on.

        Args:
            delay: seconds, each way.
            loss: share of packets that vanish.
        """
        assert self._slow is not None
        assert self._slow.stdin is not None
        self._slow.stdin.write(f"{1000 * delay} {loss}\n")
        self._slow.stdin.flush()

    def cut(self, number: int) -> None:
        """Take a node off the net, silently: links stay up and packets vanish."""
        self._port(number, state=0)

    def heal(self, number: int) -> None:
        """Undo :meth:`cut`."""
        self._port(number, state=3)

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """Lose, silently, whatever one node sends to another; the other way stays open."""
        self._bent.add((sender, receiver))
        nowhere = "lladdr 02:00:00:00:ff:ff nud permanent dev eth0"
        bend = [f"neigh replace {address} {nowhere}" for address in addresses(receiver)]
        self._ip(self.node(sender).holder, bend)

    def heal_one_way(self, sender: int, receiver: int) -> None:
        """Undo :meth:`cut_one_way`."""
        self._bent.discard((sender, receiver))
        self._ip(self.node(sender).holder, [f"neigh del {address} dev eth0" for address in addresses(receiver)])

    def part(self, *sides: Iterable[int]) -> None:
        """Cut all that is on one side from all that is on another."""
        for one, other in itertools.permutations([list(side) for side in sides], 2):
            for sender, receiver in itertools.product(one, other):
                self.cut_one_way(sender, receiver)

    def heal_all(self) -> None:
        """Undo everything but nodes that are off."""
        for sender, receiver in sorted(self._bent):
            if self.node(sender).on:
                self.heal_one_way(sender, receiver)
        self._bent.clear()
        for number, node in self._nodes.items():
            if node.on and self._slow is None:  # which has no ports to cut
                self.heal(number)

    # What nodes need of it

    def hosts(self, number: int, numbers: Iterable[int]) -> Path:
        """A node's ``/etc/hosts``.

        Args:
            number: the node.
            numbers: all nodes.
        """
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for each in numbers:
            own = self._own_names.get(each) if each == number else None
            address = addresses(each)[0] if own is None else own
            lines += [f"{address} node{each}"] if address else []
        path = self._directory / f"hosts-{number}"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def output(self, name: str) -> Path:
        """A file for what a process writes."""
        return self._directory / name

    def connect(self, node: Node) -> None:
        """Plug a node in that has been off."""
        assert self._switch is not None
        # The kernel takes the old cable away some time after the node has gone.
        with contextlib.suppress(RuntimeError):
            self._ip(self._switch.pid, [f"link del p{node.number}"])
        self._connect([node])

    def _connect(self, nodes: Iterable[Node]) -> None:
        nodes = list(nodes)
        assert self._switch is not None
        cables = []
        for node in nodes:
            port = f"p{node.number}"
            cables.append(f"link add {port} type veth peer name eth0 address {mac(node.number)} netns {node.holder}")
            cables.append(f"link set {port} up master br0")
        self._ip(self._switch.pid, cables)
        for node in nodes:
            four, six = addresses(node.number)
            ends = [f"addr add {four}/16 dev eth0", f"addr add {six}/64 dev eth0 nodad", "link set eth0 up"]
            self._ip(node.holder, [*ends, *self._acquaintances(node)])

    def _acquaintances(self, node: Node) -> list[str]:
        """Many nodes know each other from the start: the kernel has one table for the neighbours of them all."""
        others = self._nodes if len(self._nodes) > _FEW else ()
        known = [(addresses(each)[0], mac(each)) for each in others if each != node.number]
        return [f"neigh replace {address} lladdr {card} nud permanent dev eth0" for address, card in known]

    def _connect_slowly(self) -> None:
        cards = []
        for node in self._nodes.values():
            four, six = addresses(node.number)
            cards.append(f"{node.holder}/{mac(node.number)}/{four}/16,{six}/64 nodad")
        self._slow = hold(sys.executable, "-S", str(_SLOW_SWITCH), self._tun(), *cards, stdin=subprocess.PIPE)

    def _tun(self) -> str:
        """The device that cards are plugged into; one of our own where a container has none."""
        if os.path.exists(_TUN):
            return _TUN
        own = self._directory / "tun"
        os.mknod(own, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        return str(own)

    def _port(self, number: int, *, state: int) -> None:
        assert self._switch is not None
        _enter(self._switch.pid, "bridge", "link", "set", "dev", f"p{number}", "state", str(state))

    @staticmethod
    def _ip(pid: int, commands: list[str]) -> None:
        _enter(pid, "ip", "-batch", "-", text="".join(f"{line}\n" for line in commands))


def _enter(pid: int, *command: str, text: str = "") -> None:
    """Run a command in the network of a process."""
    inside = ("nsenter", "-t", str(pid), "-n", *command)
    done = subprocess.run(inside, input=text, text=True, capture_output=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}\n{text}")
