"""Children in the states that evidence is collected of."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import TYPE_CHECKING

import pytest
from conftest import eventually, kill_tree

from ftrun.launch.evidence import process_state
from ftrun.launch.evidence.collect import LiveRank

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORKER = """\
import ctypes, faulthandler, os, signal, sys, threading, time
from pathlib import Path
from ftrun.session import stacks
directory = Path(sys.argv[1])
stacks.install(directory)
def ready():
    (directory / "ready").touch()
def where_it_waits():
{body}
where_it_waits()
"""


@dataclass
class Children:
    """Starts children, each with a directory of its own."""

    path: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def directory(self) -> Path:
        made = self.path / f"r{len(self.started):05d}"
        made.mkdir(exist_ok=True)
        return made

    def start(self, *command: str | Path, directory: Path | None = None, **options: object) -> subprocess.Popen[bytes]:
        place = directory or self.directory()
        with (place / "stderr.log").open("ab") as err:
            process = subprocess.Popen([*map(str, command)], stderr=err, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def worker(self, body: str, *options: str, until: bool = True) -> tuple[subprocess.Popen[bytes], Path]:
        """A Python process with our stacks installed that runs ``body`` in a function and calls ``ready()``."""
        directory = self.directory()
        program = _WORKER.format(body=indent(dedent(body).strip(), "    "))
        process = self.start(sys.executable, *options, "-c", program, directory, directory=directory)
        if until:
            eventually(lambda: (directory / "ready").exists() or process.poll() is not None, what="the worker")
            assert process.poll() is None, (directory / "stderr.log").read_text()
        return process, directory

    def close(self) -> None:
        for process in self.started:
            kill_tree(process.pid)
            process.wait(60)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    made = Children(tmp_path)
    yield made
    made.close()


def rank_of(process: subprocess.Popen[bytes], directory: Path, rank: int = 0, exit_code: int | None = None) -> LiveRank:
    return LiveRank(rank, rank, process.pid, exit_code, 0.0 if exit_code is None else 1000.25, directory)


def in_state(pid: int, *letters: str) -> None:
    eventually(lambda: process_state.letter(pid) in letters, what=f"state {letters} of process {pid}")


def compiled(source: str, target: Path, *options: str) -> Path:
    """Compile C, or skip the test."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (target.parent / f"{target.name}.c").write_text(source)
    subprocess.run([compiler, *options, "-o", target, target.parent / f"{target.name}.c"], check=True, timeout=60)
    return target


def takes_no_signal(pid: int) -> None:
    """It runs on, and no signal is on its way to it."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    assert [int(mask, 16) for mask in pending] == [0, 0]
    with contextlib.suppress(ProcessLookupError):
        assert process_state.letter(pid) in ("S", "R")
