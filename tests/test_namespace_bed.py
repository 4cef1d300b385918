"""The test bed itself: nodes reach each other, are cut, healed and powered off, and nothing of a net is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from namespaces import Net
from namespaces.processes import MARKER
from namespaces.skipping import NET

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = NET

SECONDS = 60.0

_PING = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7), float(sys.argv[2])) as connection:
    connection.sendall(b"x")
    answer = connection.recv(1)
    print(time.monotonic() - began)
    sys.exit(answer != b"x")
"""
_ECHO = """
import socket
with socket.create_server(("::", 7), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("listening", flush=True)
    while True:
        connection = server.accept()[0]
        connection.sendall(connection.recv(1))
"""


def reaches(net: Net, one: int, other: str, seconds: float = 0.25) -> bool:
    process = net.node(one).start(sys.executable, "-S", "-c", _PING, other, str(seconds))
    return process.wait(60) == 0


def took(net: Net, one: int, other: str) -> float:
    """Seconds until one has reached another, and has its answer."""
    process = net.node(one).start(sys.executable, "-S", "-c", _PING, other, "60")
    assert process.wait(90) == 0, process.text()
    return float(process.text())


def echo(net: Net, *numbers: int) -> None:
    started = [net.node(number).start(sys.executable, "-S", "-c", _ECHO) for number in numbers]
    soon(lambda: all("listening" in each.text() for each in started))


def leftovers(pid: int) -> list[str]:
    """Processes with the marker of one that made nets."""
    mark = f"{MARKER}={pid}:".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_nodes_have_names_and_reach_each_other_until_they_are_cut() -> None:
    with Net(3) as net:
        echo(net, 1, 2, 3)
        assert net.node(2).run("hostname").strip() == "node2"
        assert reaches(net, 1, "node2", SECONDS)
        assert reaches(net, 2, "fd00:77::1", SECONDS)
        net.cut(2)
        assert not reaches(net, 1, "node2")
        assert not reaches(net, 2, "node3")
        assert reaches(net, 1, "node3", SECONDS)
        net.heal(2)
        assert reaches(net, 1, "node2", SECONDS)
        net.part([1], [2, 3])
        assert not reaches(net, 1, "node3")
        assert reaches(net, 2, "node3", SECONDS)
        net.heal_all()
        assert reaches(net, 3, "node1", SECONDS)
    soon(lambda: not leftovers(os.getpid()))  # what nobody waits for takes a moment to die


def test_one_way_is_lost_and_the_other_arrives() -> None:
    with Net(2) as net:
        echo(net, 1, 2)
        assert reaches(net, 1, "node2", SECONDS)
        net.cut_one_way(1, 2)
        # Neither can speak with the other, as each needs an answer; what 2 sends does arrive at 1.
        assert not reaches(net, 2, "node1")
        half_open = [line.split()[3] for line in net.node(1).run("cat", "/proc/net/tcp6").splitlines()].count("03")
        assert half_open == 1
        net.heal_all()
        assert reaches(net, 2, "node1", SECONDS)


def test_packets_take_their_time_and_are_lost() -> None:
    with Net(2, slow=True) as net:
        echo(net, 1, 2)
        assert reaches(net, 1, "node2", SECONDS)
        assert reaches(net, 2, "fd00:77::1", SECONDS)
        net.weather(delay=0.3)
        assert took(net, 1, "node2") >= 4 * 0.3  # there and back, twice
        net.weather(loss=1.0)
        assert not reaches(net, 1, "node2", 0.5)
        net.weather()
        assert reaches(net, 1, "node2", SECONDS)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_power_and_signals() -> None:
    with Net(2, own_name="127.0.1.1") as net:
        node = net.node(2)
        sleeper = node.start("sh", "-c", "sleep 1000 & wait")
        assert "127.0.1.1 node2" in node.run("cat", "/etc/hosts")
        sleeper.stop()
        # What has started it stops when it hears of that: if it heard of the end before, it would stop for good.
        soon(lambda: state(sleeper.pid) == state(sleeper._wrapper.pid) == "T")
        sleeper.resume()
        sleeper.kill(signal.SIGTERM)
        assert sleeper.wait() == -signal.SIGTERM
        other = node.start("sleep", "1000")
        node.power_off()
        assert other.poll() is not None
        assert not Path(f"/proc/{other.pid}").exists()
        node.power_on()
        echo(net, 2)
        assert reaches(net, 1, "node2", SECONDS)


def test_nothing_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        textwrap.dedent("""
            import time
            from namespaces import Net
            net = Net(2)
            net.node(1).start("sleep", "1000")
            print("made", flush=True)
            time.sleep(1000)
        """)
    )
    maker = subprocess.Popen(
        [sys.executable, tmp_path / "made.py"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    with maker.stdout:
        assert maker.stdout.readline() == "made\n"
    assert leftovers(maker.pid)
    maker.kill()
    maker.wait(60)
    soon(lambda: not leftovers(maker.pid))
