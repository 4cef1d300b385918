"""One node of a net: started, powered off and on, and what runs there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from namespaces.addresses import addresses
from namespaces.processes import Process, end, hold, only_child

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from namespaces.net import Net

_SECONDS = 60.0

# As the first process of its namespace the shell must stay, and takes up what others leave behind. Memory is a node's
# own, and gone when its power is.
_NODE = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o size=1g tmpfs /dev/shm && ip link set lo up'
    " && echo ready && { sleep infinity & wait; }"
)


class Node:
    """One machine.

    Args:
        net: where it is plugged in.
        number: its number, from 1.
        nodes: how many there are.

    Attributes:
        number: its number.
        name: its host name.
        address: its IPv4 address.
        address6: its IPv6 address.
    """

    def __init__(self, net: Net, number: int, nodes: int) -> None:
        self._net = net
        self.number = number
        self.name = f"node{number}"
        self.address, self.address6 = addresses(number)
        self._numbers = range(1, nodes + 1)
        self._processes: list[Process] = []
        self._unshare: subprocess.Popen[str] | None = None
        self._start()

    @property
    def on(self) -> bool:
        """Whether it is powered on."""
        return self._unshare is not None

    def start(self, *command: str | Path, cwd: str | Path = "/", env: Mapping[str, str] | None = None) -> Process:
        """Start a command there.

        Args:
            command: program and arguments.
            cwd: where it runs; nodes see the files of the machine.
            env: its environment; that of this process by default.
        """
        out = self._net.output(f"{self.name}-{len(self._processes)}.txt")
        process = Process(self.holder, tuple(map(str, command)), Path(cwd), os.environ if env is None else env, out)
        self._processes.append(process)
        return process

    def run(self, *command: str | Path, seconds: float = _SECONDS) -> str:
        """Run a command there to its end. Returns what it wrote.

        Raises:
            RuntimeError: it failed.
        """
        process = self.start(*command)
        code = process.wait(seconds)
        if code != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit code {code}: {process.text()}")
        return process.text()

    def power_off(self) -> None:
        """Kill everything there at once, as when the power goes."""
        if self._unshare is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.holder, 9)
        end(self._unshare)
        self._unshare = None
        for process in self._processes:
            process.close()

    def power_on(self) -> None:
        """Have an empty node again, under the same name and address."""
        self._start()
        self._net.connect(self)

    def _start(self) -> None:
        assert self._unshare is None
        hosts = self._net.hosts(self.number, self._numbers)
        namespaces = ("unshare", "-u", "-m", "-n", "-p", "-f", "--kill-child", "--mount-proc")
        self._unshare = hold(*namespaces, "sh", "-c", _NODE, "sh", self.name, str(hosts))
        self.holder = only_child(self._unshare.pid)
