"""One parked process as the agent sees it: started, told what to import, promoted or killed. Standard library only.

What is said over the socket stands in :mod:`ftrun.session.parked`, which is the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ftrun.launch.standbys.script_scan import Scan

_BOOTSTRAP = "ftrun.session.bootstrap"
_CONTRACT = "FTRUN_WORKER"

# Different in each attempt, and nothing reads them when it is imported.
_PASSING = (
    *("MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
_PASSING_PREFIXES = ("TORCHELASTIC_", "FTRUN_")
# Different where nodes come and go; some libraries read them when they are imported.
_PLACE = ("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")


@dataclass(frozen=True)
class Command:
    """One worker of one attempt: what is run, where, and where its output goes.

    Attributes:
        argv: the command, ``[wrapper ...] python -u -m ftrun.session.bootstrap ...`` where it can be parked.
        env: its environment, complete.
        stdout: descriptor of its standard output; None for this process's own.
        stderr: the same for standard error.
        cwd: its working directory.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout: int | None
    stderr: int | None
    cwd: str

    @property
    def split(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The command up to the bootstrap's name, and the bootstrap's arguments; None if it runs something else."""
        head = ("-u", "-m", _BOOTSTRAP)
        for end in range(len(head) + 1, len(self.argv) + 1):
            if self.argv[end - len(head) : end] == head:
                return self.argv[:end], self.argv[end:]
        return None


@dataclass(frozen=True)
class Fit:
    """What must be the same for a parked process to stand in for a command's fresh one.

    Attributes:
        start: the command up to the bootstrap's name.
        interpreter: which file the interpreter is.
        cwd: the working directory.
        lasting: variables that must be equal.
        place: variables that must be equal if libraries are imported that may read them.
    """

    start: tuple[str, ...]
    interpreter: tuple[int, ...]
    cwd: str
    lasting: Mapping[str, str]
    place: Mapping[str, str]

    @classmethod
    def of(cls, command: Command) -> Fit | None:
        """What a command asks for; None where nothing can be parked for it."""
        split = command.split
        found = split and shutil.which(split[0][-4], path=command.env.get("PATH"))
        if split is None or found is None:
            return None
        place = {name: command.env[name] for name in _PLACE if name in command.env}
        lasting = {name: value for name, value in command.env.items() if name not in place and not _passes(name)}
        file = os.stat(found)
        stamp = (file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size)
        return cls(split[0], stamp, command.cwd, lasting, place)

    def differs(self, other: Fit, *, plain: bool) -> str | None:
        """What is not the same, in words.

        Args:
            other: what is asked for now.
            plain: nothing was imported that may read the variables of the place.
        """
        if self.start != other.start:
            return "another command"
        if self.interpreter != other.interpreter:
            return f"{self.start[-4]} has changed"
        if self.cwd != other.cwd:
            return "another working directory"
        mine, theirs = ({**each.lasting, **({} if plain else each.place)} for each in (self, other))
        names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        return f"{', '.join(names[:3])} has another value" if names else None


def _passes(name: str) -> bool:
    return name in _PASSING or name.startswith(_PASSING_PREFIXES)


@dataclass(frozen=True)
class Warmth:
    """What a parked process imports.

    Attributes:
        modules: their names, in order.
        exclude: packages that none of them may bring along.
        scan: what the script's text said when the modules were chosen.
    """

    modules: tuple[str, ...]
    exclude: tuple[str, ...]
    scan: Scan | None


class Parked:
    """A parked process. Started on the thread that its life hangs on: the kernel kills it when that thread ends.

    Attributes:
        command: what it was started for.
        fit: what that asks for.
        since: when, by the monotonic clock.
        warmth: what it was told to import.
        here: its control loop runs.
        warm: it has imported everything.
        over: why it is of no use any more, or None.
        promoted: it is the worker that it was asked to become.
    """

    def __init__(self, command: Command, fit: Fit, warmth: Warmth) -> None:
        self.command = command
        self.fit = fit
        self.since = time.monotonic()
        self.warmth = warmth
        self.here = self.warm = False
        self.over: str | None = None
        self.promoted = False
        self._text = b""
        self._env = {name: value for name, value in command.env.items() if name != _CONTRACT}
        # A process keeps the environment it began with where others look for it; the guard looks there for its family.
        self._env["FTRUN_PARKED"] = command.env.get(_CONTRACT) or f'"agent": {os.getpid()},'
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        # Nobody reads what imports print. It is a pipe because the worker's streams will be: Python asks only once
        # whether a stream can seek.
        self._nowhere, nowhere = os.pipe()
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [*fit.start, "--parked", str(theirs.fileno())],
                env=self._env,
                cwd=fit.cwd,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(nowhere)
        self._send(b"W", {"modules": warmth.modules, "exclude": warmth.exclude})

    def fileno(self) -> int:
        """The descriptor that becomes readable when it has said something."""
        return self._socket.fileno()

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.since

    @property
    def culprit(self) -> str | None:
        """The module whose import has made it useless."""
        kind, _, rest = (self.over or "").partition(": ")
        return rest.partition(": ")[0] if kind == "unusable" else None

    def promote(self, command: Command, arguments: Iterable[str]) -> None:
        """Make it the worker of a command; the answer comes later, to :meth:`listen`."""
        document = {
            "argv": tuple(arguments),
            "environment": dict(command.env),
            "parked_with": self._env,
            "cwd": command.cwd,
        }
        streams = (1 if command.stdout is None else command.stdout, 2 if command.stderr is None else command.stderr)
        self._send(b"P", document, *streams)

    def listen(self) -> None:
        """Take in what it has said; waits for nothing."""
        while self.over is None and not self.promoted:
            try:
                said = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError as error:
                self.over = f"it is gone ({error.strerror})"
                return
            if not said:
                self.over = "it is gone"
            *lines, self._text = (self._text + said).split(b"\n")
            for line in lines:
                self._heard(line.decode(errors="replace"))

    def _heard(self, line: str) -> None:
        if line == "hello":
            self.here = True
        elif line == "warm":
            self.warm = True
        elif line == "ok":
            self.promoted = True
        else:
            self.over = line

    def _send(self, kind: bytes, document: Any, *files: int) -> None:
        # The text goes as a file: the socket never fills up, however busy the process is.
        with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else _memory_file() as file:
            file.write(json.dumps(document).encode())
            file.seek(0)
            try:
                socket.send_fds(self._socket, [kind], [file.fileno(), *files])
            except OSError as error:
                self.over = f"it is gone ({error.strerror})"

    def release(self) -> subprocess.Popen[bytes]:
        """Hand the process over to whoever wanted the worker."""
        self._close()
        return self.process

    def kill(self) -> None:
        """Kill it, with whatever an import has started; :meth:`reap` follows."""
        self._close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _close(self) -> None:
        self._socket.close()
        if self._nowhere >= 0:
            os.close(self._nowhere)
            self._nowhere = -1

    def reap(self, timeout: float) -> None:
        """Wait for its end. One in uninterruptible sleep is left behind."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)


def _memory_file() -> Any:
    return os.fdopen(os.memfd_create("ftrun"), "w+b")
