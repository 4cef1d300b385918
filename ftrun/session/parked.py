"""A parked worker: Python is up and the imports are done; the script, its arguments and environment come later.

The agent holds the other end of a unix socket. It sends single bytes with files attached: ``W`` with modules to
import, ``P`` with what to become and the new standard output and error. The answers are lines: ``hello``, ``warm``,
``unusable: MODULE: ...``, ``ok``, ``stale: ...``. Standard input is the script's and isn't touched; what the imports
print goes where the agent had it go at the start, to nowhere.

After the promotion the script must not be able to tell this process from a fresh one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import socket
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ftrun.session import imports, lifeline, script

if TYPE_CHECKING:
    from pathlib import Path

_BOOTSTRAP = "ftrun.session.bootstrap"
_GPU = "/dev/nvidia"
_DESCRIPTORS = "/proc/self/fd"


def note_imports(directory: Path) -> None:
    """Write ``imports.json`` into the worker's directory, for standbys. Once, at the first step; never raises."""
    imports.note(directory)


class _Promotion(NamedTuple):
    """What this process is to become: what the agent's ``Command`` says, and the streams' files."""

    argv: list[str]
    environment: dict[str, str]
    parked_with: dict[str, str]
    cwd: str
    stdout: int
    stderr: int


def wait(descriptor: int, cold: frozenset[str]) -> list[str]:
    """Park until the agent wants a worker. Does not return if it never does.

    Args:
        descriptor: the inherited end of the socket.
        cold: names of the modules that the bootstrap of any worker has imported.

    Returns:
        The bootstrap's arguments.
    """
    lifeline.die_with_parent()
    line = _Line(descriptor)
    line.say("hello")
    # What modules are made of stays: going through it again and again is a third of the time that imports take.
    # Not by gc.disable(): a library that calls that when it is imported means it, and is to have it in the script, too.
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    promotion, stamps = _warm_up(line)
    reason = _outdated(promotion, stamps, cold)
    if reason is not None:
        line.leave(f"stale: {reason}")
    line.say("ok")
    line.close()
    _become(promotion)
    gc.freeze()  # nor need the script's own collections, or the end of the process, go through it
    if gc.get_threshold()[0] == 0:  # no import has set another one
        gc.set_threshold(*thresholds)
    return promotion.argv


class _Line:
    """This end of the socket. At the end of the other one, this process ends too."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def waits(self) -> bool:
        """Whether the agent has said something, or is gone."""
        return bool(self._poll.poll(0))

    def hear(self) -> dict[str, list[str]] | _Promotion:
        """The next thing the agent says: modules to import, or what to become."""
        try:
            kind, files, _, _ = socket.recv_fds(self._socket, 1, 3)
        except OSError:
            os._exit(0)
        if not kind:
            os._exit(0)
        with open(files[0], encoding="utf-8") as text:
            document: Any = json.load(text)
        if kind == b"P":
            return _Promotion(**document, stdout=files[1], stderr=files[2])
        wanted: dict[str, list[str]] = document
        return wanted

    def say(self, text: str) -> None:
        try:
            self._socket.sendall(f"{text}\n".encode(errors="replace"))
        except OSError:
            os._exit(0)

    def leave(self, text: str) -> NoReturn:
        """Say why, and end without the exit handlers of what was imported: nothing of the script's has begun."""
        self.say(text)
        os._exit(0)

    def close(self) -> None:
        self._socket.close()


def _warm_up(line: _Line) -> tuple[_Promotion, imports.Stamps]:
    """Import what the agent asks for, until it wants a worker."""
    modules: deque[str] = deque()
    barred: list[str] = []
    stamps = imports.Stamps()
    stamps.take()
    place = [] if sys.flags.safe_path else [sys.path.pop(0)]  # the bootstrap's own must not hide a library
    while True:
        if modules and not line.waits():
            _bring_in(modules.popleft(), barred, line, stamps)
        else:
            heard = line.hear()
            if isinstance(heard, _Promotion):
                sys.path[:0] = place
                return heard, stamps
            modules.extend(heard["modules"])
            barred.extend(heard["exclude"])
        if not modules:
            line.say("warm")


def _bring_in(name: str, barred: list[str], line: _Line, stamps: imports.Stamps) -> None:
    if name in sys.modules:
        return
    reason = imports.bring_in(name) or _unfit() or next((f"it imports {b}" for b in barred if b in sys.modules), None)
    stamps.take()
    if reason is not None:
        line.leave(f"unusable: {name}: {reason}")


def _unfit() -> str | None:
    """What an import has left behind that a script may not find: a thread, a GPU in use."""
    threads = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if threads:
        return f"it started the thread {threads[0].name}"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "it started CUDA"
    return "it opened a GPU" if _has_opened_a_gpu() else None


def _has_opened_a_gpu() -> bool:
    for each in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with contextlib.suppress(OSError):  # the descriptor by which the directory was read is closed again
            if os.readlink(f"{_DESCRIPTORS}/{each}").removeprefix(_GPU).isdigit():
                return True
    return False


def _outdated(promotion: _Promotion, stamps: imports.Stamps, cold: frozenset[str]) -> str | None:
    """Why a fresh process would import something else than this one has."""
    file = stamps.changed()
    if file is not None:
        return f"{file} has changed"
    try:
        os.chdir(promotion.cwd)
    except OSError as error:
        return f"{promotion.cwd}: {error.strerror}"
    way, *rest = promotion.argv
    if way == "-m" and rest[0] in sys.modules:
        return f"{rest[0]} is imported, not run"
    if way == "--run-path":
        return None
    if way != "-m" and script.is_archive(way):
        return "the script is an archive"
    place = os.getcwd() if way == "-m" else os.path.dirname(os.path.realpath(way))
    name = _hidden(place, {each.partition(".")[0] for each in sys.modules if each not in cold})
    return f"{name} in {place} goes before the library" if name is not None else None


def _hidden(place: str, names: set[str]) -> str | None:
    """An imported top-level module of which the script's directory has one of its own."""
    try:
        entries = os.listdir(place)
    except OSError:
        return None
    for entry in entries:
        stem, _, suffix = entry.partition(".")
        if stem in names and (suffix or os.path.isfile(os.path.join(place, stem, "__init__.py"))):
            return entry
    return None


def _become(promotion: _Promotion) -> None:
    ctypes.CDLL(None).fflush(None)  # what C code has printed so far goes where the rest of it went
    _redirect(1, promotion.stdout, sys.stdout)
    _redirect(2, promotion.stderr, sys.stderr)
    environment = promotion.environment | _own_changes(promotion)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = promotion.argv
    words = sys.orig_argv
    sys.orig_argv = [*words[: words.index(_BOOTSTRAP) + 1], *promotion.argv]
    importlib.invalidate_caches()


def _own_changes(promotion: _Promotion) -> dict[str, str]:
    """Variables that the interpreter's start or an import has set, as it would have in a fresh process."""
    given, new = promotion.parked_with, promotion.environment
    return {
        name: value
        for name, value in os.environ.items()
        if given.get(name) != value and new.get(name) == given.get(name)
    }


def _redirect(number: int, file: int, stream: Any) -> None:
    """Put a file under a standard stream. The stream object stays: what was imported may hold it."""
    stream.flush()
    os.dup2(file, number)
    os.close(file)
    old = stream.buffer
    if isinstance(old, io.FileIO):  # as python -u makes it: no buffer. The old one remembers what its file could do.
        new: Any = io.FileIO(number, "wb", closefd=False)
        new.name = old.name
        stream.__init__(new, stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through)
