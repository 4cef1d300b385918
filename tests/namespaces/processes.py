"""Processes that live in namespaces and never outlive whoever started them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MARKER = "FTRUN_TEST_NET"
"""In the environment of every process of a net: who made it."""

_SECONDS = 60.0
_BOUND = ("setpriv", "--pdeathsig", "KILL")
"""The kernel kills what is started this way when the thread that started it ends."""


def marked(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment with the marker of this process."""
    return {**(os.environ if environment is None else environment), MARKER: f"{os.getpid()}:{_birth(os.getpid())}"}


def sweep() -> list[int]:
    """Kill what a maker of nets has left that is gone itself. Returns the process ids."""
    swept = []
    for entry in Path("/proc").glob("[0-9]*"):
        maker = _maker(entry)
        if maker is None:
            continue
        pid, _, birth = maker.partition(":")
        if not pid.isdigit() or str(_birth(int(pid))) != birth:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
                swept.append(int(entry.name))
    return swept


def _maker(entry: Path) -> str | None:
    try:
        environment = (entry / "environ").read_bytes()
    except OSError:
        return None  # it has ended, or is nobody's business
    for line in environment.split(b"\0"):
        if line.startswith(MARKER.encode() + b"="):
            return line.partition(b"=")[2].decode()
    return None


def _birth(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was: a pid can come again, both together can't."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def hold(*command: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start a process that holds namespaces, and wait until it says that they are ready by printing a line.

    Args:
        command: program and arguments.
        stdin: as of :class:`subprocess.Popen`.

    Raises:
        RuntimeError: it couldn't make them.
    """
    process = subprocess.Popen(
        [*_BOUND, *command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=marked(),
        start_new_session=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline() if select.select([process.stdout], [], [], _SECONDS)[0] else "nothing in time\n"
    if said != "ready\n":
        end(process)
        raise RuntimeError(f"{' '.join(command[:6])}: {said.strip() or 'no word'}")
    return process


def end(process: subprocess.Popen[str]) -> None:
    """Kill and reap one."""
    process.kill()
    process.wait(_SECONDS)
    for each in (process.stdin, process.stdout):
        if each is not None:
            each.close()


def child_of(pid: int) -> int | None:
    """The first process that one has started and that still lives."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
    return None


def only_child(pid: int) -> int:
    """The process that a wrapper has forked, seen from here."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        child = child_of(pid)
        if child is not None:
            return child
        time.sleep(0.002)
    raise RuntimeError(f"process {pid} has started nothing within {_SECONDS:g} s")


class Process:
    """A command that runs on a node.

    Args:
        holder: process id of the node's first process.
        command: what to run.
        cwd: where.
        env: its environment.
        out: file for its standard output and error output.

    Attributes:
        out: that file.
        pid: its process id seen from here, for signals.
    """

    def __init__(self, holder: int, command: tuple[str, ...], cwd: Path, env: Mapping[str, str], out: Path) -> None:
        self.out = out
        inside = ("nsenter", "-t", str(holder), "-u", "-m", "-n", "-p", "--", "sh", "-c", 'cd "$0" && exec "$@"')
        with out.open("a") as stream:
            self._wrapper = subprocess.Popen(
                [*_BOUND, *inside, str(cwd), *command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                env=marked(env),
                start_new_session=True,
            )
        try:
            self.pid = self._seen()
        except BaseException:
            end(self._wrapper)
            raise

    def _seen(self) -> int:
        """Its process id; the wrapper's where it was so short that it is over."""
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline and self.poll() is None:
            child = child_of(self._wrapper.pid)
            if child is not None:
                return child
            time.sleep(0.002)
        if self.poll() is None:
            raise RuntimeError(f"process {self._wrapper.pid} has started nothing within {_SECONDS:g} s")
        return self._wrapper.pid

    def text(self) -> str:
        """What it has written so far."""
        return self.out.read_text()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """Have it stand still."""
        self.kill(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on."""
        self.kill(signal.SIGCONT)
        self._wrapper.send_signal(signal.SIGCONT)  # it stops together with what it has started

    def poll(self) -> int | None:
        """Its exit code, or None while it runs; -9 where it was killed."""
        return self._wrapper.poll()

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for its end. Returns its exit code.

        Raises:
            TimeoutError: there was none in time; the message has what it wrote.
        """
        try:
            return self._wrapper.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end after {seconds:g} s:\n{self.text()}") from None

    def close(self) -> None:
        """Kill it if it still runs, and reap it."""
        if self.poll() is None:
            self.kill()
            self.resume()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wrapper.wait(_SECONDS)  # it reaps what it has started, and ends with it
            end(self._wrapper)
