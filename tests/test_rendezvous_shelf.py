"""The leader's store: what it keeps, what it does with strangers, and calls to it that end in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from rendezvous_kit import SECONDS, eventually
from rendezvous_stores import served

from ftrun.rendezvous import shelf as shelves
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.shelf import Server, Shelf
from ftrun.rendezvous.wire import HELLO, LENGTH, LONGEST, Deserted, LineDown, Silent, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as made:
        yield made
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "ftrun-store"])


def opened(server: Server, patience: float = SECONDS) -> Wire:
    wire = Wire("127.0.0.1", server.port, patience)
    wire.open()
    return wire


def test_what_is_written_in_one_go_is_read_in_one_go() -> None:
    shelf = Shelf()
    writes = [
        ("set", "a", "1"),
        ("append", "b", "x"),
        ("append", "b", "y"),
        ("first", "c", "one"),
        ("first", "c", "two"),
    ]
    assert shelf.exchange(writes, ("c", "b", "a", "nothing")) == ["one", "xy", "1", None]
    shelf.set("d", "")
    assert shelf.exchange([("first", "d", "there"), ("delete", "a", ""), ("delete", "never", "")], ("a", "d")) == [
        None,
        "there",
    ]


def test_near_and_far_are_the_same_store(server: Server) -> None:
    one, other = opened(server), opened(server)
    large = "ü" * 3_000_000
    assert one.exchange([("set", "large", large)], ("large",)) == [large]
    assert other.get("large") == large
    assert server.shelf.exchange((), ("large",)) == [large]
    assert other.get("nothing") == ""
    one.close()
    one.close()
    with pytest.raises(LineDown, match="not connected"):
        one.get("large")
    server.close()
    with pytest.raises(LineDown, match=r"connection is lost|Connection reset"):
        other.get("large")
    with pytest.raises(Deserted, match="refused"):
        opened(server)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 64,
        HELLO + b"\xff\xff\xff\xff",
        HELLO + LENGTH.pack(LONGEST + 1),
        HELLO + LENGTH.pack(3) + b"{{{",
        HELLO + LENGTH.pack(4) + b"null",
        HELLO + LENGTH.pack(10) + b"[[[1]],[]]",
        HELLO + LENGTH.pack(9) + b"[[],[{}]]",
        HELLO + LENGTH.pack(100_000) + b"[" * 100_000,
    ],
)
def test_strangers_are_hung_up_on_and_the_others_are_served(server: Server, said: bytes) -> None:
    wire = opened(server)
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as stranger:
        stranger.sendall(said)
        stranger.settimeout(SECONDS)
        while stranger.recv(100):
            pass
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as half:
        half.sendall(HELLO[:5])  # and no more
        assert wire.exchange([("set", "a", "1")], ("a",)) == ["1"]
    wire.close()


def test_one_that_never_reads_its_answers_holds_nobody_up(server: Server) -> None:
    server.shelf.set("large", "x" * 1_000_000)
    request = json.dumps([[], ["large"]]).encode()
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as deaf:
        deaf.sendall(HELLO + 20 * (LENGTH.pack(len(request)) + request))
        wire = opened(server)
        for _ in range(10):
            assert len(wire.get("large")) == 1_000_000
        wire.close()


def test_one_that_asks_and_asks_and_reads_nothing_is_hung_up_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "LONGEST", 2_000_000)
    server.shelf.set("large", "x" * 1_000_000)
    request = json.dumps([[], ["large"]]).encode()
    heard = 0
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as greedy:
        greedy.sendall(HELLO + 20 * (LENGTH.pack(len(request)) + request))
        greedy.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while data := greedy.recv(2**20):
                heard += len(data)
    assert heard < 10_000_000
    wire = opened(server)
    assert len(wire.get("large")) == 1_000_000
    wire.close()


def test_it_tells_the_time_of_its_own_process(server: Server) -> None:
    server.shelf.set(Keys.CLOCK, "never")
    wire = opened(server)
    before, told, after = time.time(), float(wire.get(Keys.CLOCK)), time.time()
    assert before <= told <= after
    wire.close()


def test_a_call_that_is_not_answered_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(Silent, match=r"no answer within 0\.3 s"):
            Wire("127.0.0.1", mute.getsockname()[1], 0.3).open()
        assert time.monotonic() - began < SECONDS


def test_something_else_that_answers() -> None:
    def greet(listens: socket.socket) -> None:
        with listens.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-something else\r\n")

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=greet, args=(other,))
        thread.start()
        wire = Wire("127.0.0.1", other.getsockname()[1], SECONDS)
        with pytest.raises(LineDown, match="something else than a rendezvous"):
            wire.open()
        thread.join(SECONDS)


_CALLER = """
import signal, sys, time, types
from ftrun.rendezvous import wire as wires
slept = 0.0
def wake(*_):
    global slept
    slept += 1000.0  # longer than its patience
signal.signal(signal.SIGCONT, wake)
wires.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + slept)
wire = wires.Wire("127.0.0.1", int(sys.argv[1]), 30.0)
wire.open()
print("open", flush=True)
for number in range(1000):
    wire.exchange([("set", "count", str(number))], ())
    time.sleep(0.01)
    if wire.get("end"):
        break
"""


@pytest.mark.slow
def test_a_caller_that_was_stopped_for_longer_than_its_patience_has_missed_nothing(server: Server) -> None:
    command = (sys.executable, "-c", _CALLER, str(server.port))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as caller:
        try:
            assert caller.stdout is not None
            assert caller.stdout.readline() == "open\n"
            for _ in range(3):
                with server.shelf._lock:  # until then it gets no answer
                    time.sleep(0.1)
                    caller.send_signal(signal.SIGSTOP)
                    time.sleep(0.3)  # longer than a slice of its wait
                    caller.send_signal(signal.SIGCONT)
                    time.sleep(0.2)
            server.shelf.set("end", "1")
            assert caller.wait(SECONDS) == 0
        finally:
            caller.kill()
