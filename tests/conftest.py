"""What tests share: running ftrun as a user does, in a directory of its own, and leaving no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from session_kit import here, launch  # noqa: F401 - fixtures of the Session's tests

from ftrun import events
from ftrun.checkpoint.memory.tier import SHARED_MEMORY, Tier
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPTS = Path(__file__).parent / "scripts"

# What a surrounding launcher or an earlier test may have left must not reach the processes under test.
_FOREIGN = ("FTRUN_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "LOGLEVEL")


@dataclass
class Result:
    """How one command ended."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass
class Started:
    """A command that is running."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    def wait(self, timeout: float = 120.0) -> Result:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"no end after {timeout:g} s\n--- stdout\n{self.out.read_text()}\n--- stderr\n{self.err.read_text()}")
            raise
        result = Result(code, self.out.read_text(), self.err.read_text())
        print(result)  # pytest shortens what it shows of an assertion, but not what was printed
        return result


@dataclass
class Runner:
    """Runs commands in one directory."""

    cwd: Path
    started: list[Started] = field(default_factory=list)

    def start(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Started:
        """Start ``ftrun`` with arguments."""
        return self.start_python("-m", "ftrun", *arguments, env=env)

    def start_python(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Started:
        number = len(self.started)
        out, err = self.cwd / f"out-{number}.txt", self.cwd / f"err-{number}.txt"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        clean |= {"NO_COLOR": "1", "COLUMNS": "200", **(env or {})}
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=self.cwd,
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self.started.append(Started(process, out, err))
        return self.started[-1]

    def run(self, *arguments: str | Path, timeout: float = 120.0, env: dict[str, str] | None = None) -> Result:
        return self.start(*arguments, env=env).wait(timeout)

    def python(self, *arguments: str | Path, timeout: float = 120.0, env: dict[str, str] | None = None) -> Result:
        return self.start_python(*arguments, env=env).wait(timeout)

    def json(self, *arguments: str | Path) -> Any:
        result = self.run(*arguments)
        assert result.code == 0, result
        return json.loads(result.out)

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.cwd / "runs" / name)

    def events(self, name: str) -> list[events.Record]:
        return list(events.read(self.run_dir(name).events()))

    def close(self) -> None:
        for each in self.started:
            kill_tree(each.process.pid)
            each.process.wait(10)
        forget_memory(self.cwd)


def forget_memory(below: Path) -> None:
    """Remove what killed runs have left in shared memory for their next start."""
    for path in SHARED_MEMORY.glob(f"ftrun-{os.getuid()}/*/keeper.json"):
        with contextlib.suppress(OSError, ValueError):
            if Path(json.loads(path.read_text())["run_dir"]).is_relative_to(below):
                Tier(path.parent).remove()


def kill_tree(pid: int) -> None:
    """Kill a process that a test started, and everything below it."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def eventually(condition: Callable[[], Any], timeout: float = 60.0, what: str = "the condition") -> Any:
    """Poll until something is true, and return it; fail at the deadline."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    pytest.fail(f"{what} did not come true within {timeout:g} s")


@pytest.fixture(autouse=True, scope="session")
def _signals_of_a_terminal() -> None:
    """A shell that starts the tests in the background has them ignored, which processes under test would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()
