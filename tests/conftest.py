"""What tests share: running ftrun as a user does, in a directory of its own, and leaving no process behind."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest
from cache_kit import Place

import ftrun
from ftrun import events
from ftrun.__main__ import NOT_A_RUN
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.memory.tier import SHARED_MEMORY, Tier
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPTS = Path(__file__).parent / "scripts"
NO_COMPILER = Path(__file__).parent / "no_compiler"
"""Processes with this in ``PYTHONPATH`` import torch without its compiler, which takes more CPU than all else of it."""

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

    def start(self, *arguments: str | Path, standbys: bool = False, **more: Any) -> Started:
        """Start ``ftrun`` with arguments.

        Without ``standbys`` a run has none: each imports torch, seconds of CPU that only some tests have a use for.
        """
        if not standbys and arguments and str(arguments[0]) not in NOT_A_RUN:
            arguments = ("--set", "standby.enabled=false", *arguments)
        return self.start_python("-m", "ftrun", *arguments, **more)

    def start_python(
        self,
        *arguments: str | Path,
        env: dict[str, str] | None = None,
        compiler: bool = False,
        under: tuple[str | Path, ...] = (),
    ) -> Started:
        """Start Python with arguments.

        Args:
            arguments: of Python.
            env: variables on top of this process's.
            compiler: torch comes with its compiler, as it does everywhere else.
            under: a command that runs Python.
        """
        number = len(self.started)
        out, err = self.cwd / f"out-{number}.txt", self.cwd / f"err-{number}.txt"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        clean |= {"NO_COLOR": "1", "COLUMNS": "200", **(env or {})}
        if not compiler:
            clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(NO_COMPILER), clean.get("PYTHONPATH"))))
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [*map(str, under), sys.executable, *map(str, arguments)],
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

    def run(self, *arguments: str | Path, timeout: float = 120.0, **more: Any) -> Result:
        return self.start(*arguments, **more).wait(timeout)

    def python(self, *arguments: str | Path, timeout: float = 120.0, **more: Any) -> Result:
        return self.start_python(*arguments, **more).wait(timeout)

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
            each.process.wait(60)
        forget_memory(self.cwd)


def forget_memory(below: Path) -> None:
    """Remove what killed runs have left in shared memory for their next start."""
    for path in SHARED_MEMORY.glob(f"ftrun-{os.getuid()}/*/keeper.json"):
        with contextlib.suppress(OSError, ValueError):
            if Path(json.loads(path.read_text())["run_dir"]).is_relative_to(below):
                Tier(path.parent).remove()


@pytest.fixture
def memory_forgotten(tmp_path: Path) -> Iterator[None]:
    """Nothing of what runs of a test have left in shared memory stays."""
    yield
    forget_memory(tmp_path)


def kill_tree(pid: int) -> None:
    """Kill a process that a test started, and everything below it."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else is given until the block ends, and that a server which names it can listen on.

    It stays bound without listening: who asks the kernel for a free port gets another, and who names this one may
    have it beside us, since both sides say SO_REUSEADDR. A port that was only found free may be taken by anybody.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def eventually(condition: Callable[[], Any], timeout: float = 60.0, what: str = "the condition") -> Any:
    """Poll until something is true, and return it; fail at the deadline."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    pytest.fail(f"{what} did not come true within {timeout:g} s")


def pytest_configure(config: pytest.Config) -> None:
    """Have ftrun and the tests compiled once, and not by each process under test and in each run of the tests.

    Where ``PYTHONDONTWRITEBYTECODE`` is set, as in many containers, Python never does it by itself.
    """
    sys.dont_write_bytecode = False  # of this process alone: what it imports from now on are the tests
    in_worker = hasattr(config, "workerinput")  # of pytest-xdist
    if not in_worker:
        compileall.compile_dir(Path(ftrun.__file__).parent, quiet=2)
    if in_worker or not getattr(config.option, "numprocesses", None):
        # The fixtures of the Session's tests: not where others run the tests, who would wait for this to import torch.
        config.pluginmanager.import_plugin("session_kit")
    examples_take_their_time()


def examples_take_their_time() -> None:
    """How long hypothesis needs for one says what else the machine is doing."""
    usual = hypothesis.settings()
    unhealthy = [*usual.suppress_health_check, hypothesis.HealthCheck.too_slow]
    patient = hypothesis.settings(usual, deadline=None, suppress_health_check=unhealthy)
    hypothesis.settings.register_profile("any machine", patient)
    hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def _signals_of_a_terminal() -> None:
    """A shell that starts the tests in the background has them ignored, which processes under test would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """An empty root of checkpoints."""
    return Root.open(tmp_path / "root")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A remote directory and a cache of the test's own."""
    return Place(tmp_path)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()
