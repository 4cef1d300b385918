"""A promoted standby is a fresh worker in all that a script can see; whatever isn't safe starts cold."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import NO_COMPILER, Runner, eventually

from ftrun.launch.standbys import early, script_scan, standby, warming
from ftrun.launch.standbys.parking import Command, Fit
from ftrun.launch.standbys.script_scan import Scan
from ftrun.launch.standbys.standby import Standbys
from ftrun.session import imports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.slow  # most of them import torch in several processes

BOOTSTRAP = ("-u", "-m", "ftrun.session.bootstrap")
ROOT = Path(script_scan.__file__).parents[2]
_FOREIGN = ("FTRUN_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "PYTHON", "OMP_")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@dataclass
class Place:
    """A directory with a site of its own, for libraries that a test makes."""

    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable

    @property
    def site(self) -> Path:
        return self.cwd / "lib" / "site-packages"

    def library(self, name: str, text: str) -> Path:
        return write(self.site / f"{name}.py", text)

    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        path = os.pathsep.join(map(str, (self.site, ROOT, NO_COMPILER)))
        return clean | {"PYTHONPATH": path, "LOCAL_RANK": "0", "RANK": "0"} | self.env

    def command(self, *arguments: str, **env: str) -> Command:
        return Command((self.python, *BOOTSTRAP, *arguments), self.environment() | env, None, None, str(self.cwd))

    def record(self, *modules: str) -> Path:
        path = self.cwd / "imports.json"
        path.write_text(json.dumps(modules))
        return path

    def to_files(self, command: Command, name: str) -> tuple[Command, list[Path]]:
        """The command with its output going to files, which the caller's process holds open."""
        paths = [self.cwd / f"{name}.out", self.cwd / f"{name}.err"]
        descriptors = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in paths]
        return replace(command, stdout=descriptors[0], stderr=descriptors[1]), paths


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    return Place(tmp_path)


@pytest.fixture
def standbys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standbys]:
    """Those that are as patient as a busy machine needs it: a process may get no processor for some seconds."""
    monkeypatch.setattr(standby, "_ANSWER_WARM", 60.0)
    with Standbys(patience=60.0) as made:
        yield made
    assert made.pids() == set()


def warm(standbys: Standbys, *commands: Command, record: Path | None = None) -> None:
    """Prepare one standby for each command, by local rank, and wait until they have imported everything."""
    if record is not None:
        standbys.learn(record)
    for local_rank, command in enumerate(commands):
        standbys.prepare(local_rank, command)

    def done() -> bool:
        standbys.tick()
        return standbys.ready() == len(commands)

    eventually(done, what="the standbys' warm-up")


def cold(command: Command) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.argv,
        env=command.env,
        stdout=command.stdout,
        stderr=command.stderr,
        cwd=command.cwd,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes], command: Command) -> int:
    for descriptor in (command.stdout, command.stderr):
        if descriptor is not None:
            os.close(descriptor)
    try:
        return process.wait(60)
    finally:
        process.kill()
        process.wait()


def promoted(standbys: Standbys, command: Command) -> subprocess.Popen[bytes]:
    taken = standbys.take({0: command})
    assert list(taken) == [0], standbys.refused
    return taken[0]


def refused(standbys: Standbys, command: Command) -> str:
    assert standbys.take({0: command}) == {}
    assert standbys.pids() == set()
    return standbys.refused[0]


# --- a promoted standby is a fresh worker

EVERYTHING = """
    import os, sys  # nothing else before the look around
    import builtins, gc, signal, threading, random
    def fds():
        return {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) < 400
                and os.path.exists(f"/proc/self/fd/{n}")}
    def stream(s):
        b = s.buffer
        return [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.seekable(),
                s.isatty(), s.fileno(), type(b).__name__, b.name, b.mode, b.closefd if hasattr(b, "closefd") else None]
    main = sys.modules["__main__"]
    seen = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "env": dict(os.environ), "order": list(os.environ), "cwd": os.getcwd(),
        "main": sorted(vars(main)), "spec": main.__spec__ and [main.__spec__.name, main.__spec__.origin],
        "file": main.__file__, "package": main.__package__,
        "builtins": __builtins__ is builtins, "warnoptions": sys.warnoptions,
        "fds": fds(), "stdout": stream(sys.stdout), "stderr": stream(sys.stderr), "same": sys.stdout is sys.__stdout__,
        "stdin": [sys.stdin.name, sys.stdin.isatty(), sys.stdin.encoding, type(sys.stdin.buffer).__name__],
        "handlers": {n: str(signal.getsignal(n)) for n in range(1, 65) if n not in (32, 33)},
        "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": [t.name for t in threading.enumerate()],
        "umask": os.umask(0o22), "nice": os.nice(0), "hooks": [str(sys.excepthook), str(sys.displayhook)],
        "session": os.getsid(0) == os.getpid() == os.getpgrp(), "parent": os.getppid(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), gc.garbage],
        "recursion": sys.getrecursionlimit(), "trace": [sys.gettrace(), sys.getprofile()],
        "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "hash": hash("x"), "child": os.popen("echo $MARK $$ > /dev/null; echo $MARK").read(),
        "getenv": os.popen(f"{sys.executable} -c 'import os; print(len(os.environ))'").read(),
        "stdin_text": sys.stdin.read(), "depth": len(__import__("inspect").stack()),
    }
    if "--torch" not in sys.argv:
        import json
        print(json.dumps(seen, sort_keys=True))
        print("to stderr", file=sys.stderr)
        sys.exit(5)
    import torch, numpy
    seen["tasks"] = len(os.listdir("/proc/self/task"))
    torch.manual_seed(1)
    seen["torch"] = [torch.get_num_threads(), torch.rand(3).tolist(), torch.is_grad_enabled(),
                     str(torch.get_default_dtype()), torch.cuda.is_initialized(), torch.get_rng_state().sum().item()]
    import json
    print(json.dumps(seen, sort_keys=True))
    print("to stderr", file=sys.stderr)
    sys.exit(5)
"""


@pytest.mark.parametrize("way", ["script", "sub/script", "-m", "--run-path"])
def test_a_promoted_process_is_a_fresh_one(
    place: Place, standbys: Standbys, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (place.cwd / "sub").mkdir()
    script = write(place.cwd / ("sub/look.py" if "sub" in way else "look.py"), EVERYTHING)
    target = (
        ["-m", "look"]
        if way == "-m"
        else ["--run-path", "look.py"]
        if way == "--run-path"
        else [str(script.relative_to(place.cwd))]
    )
    env = {"MARK": "new", "ODD": "\udc80", "PYTHONHASHSEED": "3", "PYTHONIOENCODING": "latin-1:replace"}
    with_torch = ["--torch"] if way == "script" else []
    command = place.command(*target, "--lr", "3e-4", "", *with_torch, **env)
    prepared = replace(command, env={**command.env, "FTRUN_OLD": "x", "TORCHELASTIC_RUN_ID": "old", "RANK": "7"})
    command = replace(command, env={**command.env, "MASTER_PORT": "1", "TORCHELASTIC_NEW": "y"})
    text = write(place.cwd / "stdin.txt", "to be read\nby the script")
    seen = {}
    for name in ("cold", "promoted"):
        with text.open() as stdin, standard_input(stdin.fileno()):
            if name == "promoted":
                warm(standbys, prepared, record=place.record(*(["torch"] if with_torch else []), "json", "inspect"))
            each, (out, err) = place.to_files(command, "worker")
            process = cold(each) if name == "cold" else promoted(standbys, each)
            assert finish(process, each) == 5, err.read_text()
            assert err.read_text() == "to stderr\n"
            seen[name] = json.loads(out.read_text())
    assert seen["promoted"] == seen["cold"]
    assert seen["cold"]["stdin_text"] == "to be read\nby the script"
    assert seen["cold"]["env"]["MARK"] == "new"
    assert seen["cold"]["child"] == "new\n"


@contextlib.contextmanager
def standard_input(descriptor: int) -> Iterator[None]:
    kept = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_terminal_reaches_a_promoted_script(place: Place, standbys: Standbys) -> None:
    write(place.cwd / "ask.py", "import sys\nprint(sys.stdin.isatty(), sys.stdout.isatty(), input('name? '))")
    master, slave = pty.openpty()
    with standard_input(slave):
        warm(standbys, place.command("ask.py"), record=place.record("json"))
        process = promoted(standbys, replace(place.command("ask.py"), stdout=slave, stderr=slave))
    os.write(master, b"me\n")
    said = ""
    deadline = time.monotonic() + 60
    while "True True me" not in said and time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            said += os.read(master, 4096).decode()
    assert "name? " in said
    assert "True True me" in said
    assert process.wait(20) == 0
    os.close(master)
    os.close(slave)


def test_a_pipe_stays_a_pipe(place: Place, standbys: Standbys) -> None:
    write(place.cwd / "pipe.py", "import os, sys\nprint(sys.stdout.seekable(), flush=False)\nos._exit(0)")
    warm(standbys, place.command("pipe.py"), record=place.record("json"))
    read, write_end = os.pipe()
    process = promoted(standbys, replace(place.command("pipe.py"), stdout=write_end))
    os.close(write_end)
    with os.fdopen(read, "rb") as file:  # ends only if nobody else holds the other end
        assert file.read() == b"False\n"
    assert process.wait(20) == 0


def test_two_are_promoted_at_once_and_what_is_imported_is_there(place: Place, standbys: Standbys) -> None:
    place.library("slow", "import os, time\ntime.sleep(0.05)\nopen(f'{os.getpid()}.loaded', 'w').close()")
    write(place.cwd / "who.py", "import os, slow\nprint(os.environ['LOCAL_RANK'], os.environ['RANK'], os.getpid())")
    commands = [place.command("who.py", LOCAL_RANK=str(rank), RANK=str(rank)) for rank in range(2)]
    warm(standbys, *commands, record=place.record("slow"))
    pids = standbys.pids()
    assert {int(path.stem) for path in place.cwd.glob("*.loaded")} == pids
    both = [place.to_files(each, f"w{rank}") for rank, each in enumerate(commands)]
    workers = standbys.take({rank: each for rank, (each, _) in enumerate(both)})
    assert {worker.pid for worker in workers.values()} == pids
    for rank, (each, (out, _)) in enumerate(both):
        assert finish(workers[rank], each) == 0
        assert out.read_text().split() == [str(rank), str(rank), str(workers[rank].pid)]
    assert standbys.pids() == set()


def test_one_that_is_still_importing_is_promoted_when_that_import_is_over(place: Place, standbys: Standbys) -> None:
    place.library(
        "first",
        "import pathlib, time\npathlib.Path('began').touch()\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)",
    )
    place.library("second", "import pathlib\npathlib.Path('second').touch()")
    write(place.cwd / "look.py", "import sys\nprint('first' in sys.modules, 'second' in sys.modules)")
    standbys.learn(place.record("first", "second"))
    command, (out, _) = place.to_files(place.command("look.py"), "w")
    standbys.start(0, command)
    eventually((place.cwd / "began").exists)
    assert standbys.offer(0, command)
    (place.cwd / "go").touch()
    workers = standbys.settle()
    assert finish(workers[0], command) == 0
    assert out.read_text() == "True False\n"
    assert not (place.cwd / "second").exists()


# --- what isn't safe starts cold


def change_variable(place: Place, command: Command) -> Command:
    return replace(command, env={**command.env, "NEW": "1"})


def change_interpreter(place: Place, command: Command) -> Command:
    Path(place.python).unlink()
    write(Path(place.python), f'#!/bin/sh\nexec "{sys.executable}" "$@"\n').chmod(0o755)
    return command


def change_library(place: Place, command: Command) -> Command:
    place.library("thing", "VALUE = 'another'")
    return command


def change_size_only(place: Place, command: Command) -> Command:
    file = place.site / "thing.py"
    kept = file.stat()
    file.write_text("VALUE = 12345")
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    return command


def hide_library(place: Place, command: Command) -> Command:
    write(place.cwd / "thing.py", "VALUE = 'mine'")
    return command


def hide_library_by_package(place: Place, command: Command) -> Command:
    write(place.cwd / "thing" / "__init__.py", "VALUE = 'mine'")
    return command


def other_directory(place: Place, command: Command) -> Command:
    (place.cwd / "other").mkdir()
    return replace(command, cwd=str(place.cwd / "other"))


def set_before_import(place: Place, command: Command) -> Command:
    write(place.cwd / "train.py", "import os\nos.environ['THING_HOME'] = '/'\nimport thing")
    return command


def more_options(place: Place, command: Command) -> Command:
    return replace(command, argv=(command.argv[0], "-X", "dev", *command.argv[1:]))


def another_rank(place: Place, command: Command) -> Command:
    return replace(command, env={**command.env, "RANK": "3"})


def another_local_rank(place: Place, command: Command) -> Command:
    return replace(command, env={**command.env, "LOCAL_RANK": "3"})


def archive(place: Place, command: Command) -> Command:
    shutil.make_archive(str(place.cwd / "app"), "zip", place.cwd / "lib")
    return replace(command, argv=(*command.argv[:4], "app.zip"))


def module_itself(place: Place, command: Command) -> Command:
    return replace(command, argv=(*command.argv[:4], "-m", "thing"))


UNSAFE = {
    change_variable: "NEW",
    change_interpreter: "has changed",
    change_library: "thing.py has changed",
    change_size_only: "thing.py has changed",
    hide_library: "thing.py in",
    hide_library_by_package: "thing in",
    other_directory: "directory",
    set_before_import: "before it imports thing",
    more_options: "another kind",
    another_rank: "RANK",
    another_local_rank: "LOCAL_RANK",
    archive: "archive",
    module_itself: "thing",
}


@pytest.mark.parametrize("change", UNSAFE, ids=lambda change: change.__name__)
def test_a_standby_that_no_longer_fits_is_not_used(place: Place, standbys: Standbys, change: object) -> None:
    place.python = str(write(place.cwd / "python", f'#!/bin/sh\nexec "{sys.executable}"  "$@"\n'))
    Path(place.python).chmod(0o755)
    place.library("thing", "VALUE = 1")
    write(place.cwd / "train.py", "import thing")
    command = place.command("train.py")
    warm(standbys, command, record=place.record("thing"))
    assert UNSAFE[change] in refused(standbys, change(place, command))  # type: ignore[index, operator]


def test_the_same_with_nothing_changed_is_used(place: Place, standbys: Standbys) -> None:
    """What the refusals above are measured against; the namespace directory and the wrapper change nothing."""
    place.python = str(write(place.cwd / "python", f'#!/bin/sh\nADDED=1 exec "{sys.executable}"  "$@"\n'))
    Path(place.python).chmod(0o755)
    place.library("thing", "import os\nVALUE = 1\nos.environ['BY_THING'] = '1'")
    (place.cwd / "thing").mkdir()
    write(place.cwd / "train.py", "import os, thing\nprint(thing.VALUE, os.environ['ADDED'], os.environ['BY_THING'])")
    command, (out, err) = place.to_files(place.command("train.py"), "w")
    warm(standbys, command, record=place.record("thing"))
    assert finish(promoted(standbys, command), command) == 0, err.read_text()
    assert out.read_text() == "1 1 1\n"


def test_one_that_was_killed_is_not_used(place: Place, standbys: Standbys) -> None:
    command = place.command("train.py")
    warm(standbys, command, record=place.record("json"))
    (pid,) = standbys.pids()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert "gone" in refused(standbys, command)


def test_one_that_was_stopped_is_not_waited_for_for_ever(place: Place) -> None:
    with Standbys(patience=0.3) as standbys:
        command = place.command("train.py")
        warm(standbys, command, record=place.record("json"))
        (pid,) = standbys.pids()
        os.kill(pid, signal.SIGSTOP)
        assert "in time" in refused(standbys, command)
        assert not psutil.pid_exists(pid)


def test_one_that_hangs_in_an_import_is_given_up(place: Place) -> None:
    place.library("hangs", "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(1000)")
    with Standbys(patience=0.3) as standbys:
        standbys.learn(place.record("hangs"))
        command = place.command("train.py")
        standbys.start(0, command)
        (pid,) = standbys.pids()
        eventually((place.cwd / "began").exists)
        assert "in time" in refused(standbys, command)
        assert not psutil.pid_exists(pid)


def test_switched_off_and_what_cannot_be_parked(place: Place, standbys: Standbys) -> None:
    command = place.command("train.py")
    for each in (
        replace(command, argv=("/bin/echo", "x")),
        replace(command, argv=("no-such-python", *command.argv[1:])),
    ):
        standbys.learn(place.record("json"))
        standbys.prepare(0, each)
        standbys.tick()
        assert standbys.pids() == set()
    with Standbys(enabled=False) as off:
        off.start(0, command)
        assert off.pids() == set()
    standbys.start(0, command)
    assert standbys.pids()
    standbys.configure(enabled=False)
    assert standbys.pids() == set()


# --- what is imported


def test_nothing_of_an_import_reaches_the_console_and_its_failure_is_the_scripts(
    place: Place, standbys: Standbys, capfd: pytest.CaptureFixture[str]
) -> None:
    place.library(
        "loud",
        "import os, sys\nprint('loud')\nos.write(1, b'loud')\nsys.stderr.write('loud')\n"
        "import ctypes\nctypes.CDLL(None).printf(b'loud')",
    )
    place.library("fails", "import os\nprint('loud')\nraise RuntimeError('at ' + os.environ['RANK'])")
    place.library("leaves", "import sys\nsys.exit('loud')")
    write(place.site / "half" / "__init__.py", "import half.part, fine\n1/0")
    write(place.site / "half" / "part.py", "")
    place.library("fine", "")
    write(
        place.cwd / "train.py",
        """
        import sys
        assert "loud" in sys.modules and "fine" in sys.modules
        assert not {"fails", "leaves", "half", "half.part", "no_such_module"} & set(sys.modules)
        try:
            import half
        except ZeroDivisionError:
            print("half")
        import fails
        """,
    )
    command, (out, err) = place.to_files(place.command("train.py"), "w")
    warm(standbys, command, record=place.record("loud", "no_such_module", "half", "fails", "leaves"))
    assert finish(promoted(standbys, command), command) == 1
    assert out.read_text() == "half\nloud\n"
    assert err.read_text().endswith("RuntimeError: at 0\n")
    assert err.read_text().count("\n") < 12
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='mine').start()", "thread"),
        ("import barred", "barred"),
        ("import ended, os\nos.kill(os.getpid(), 9)", None),
    ],
)
def test_a_package_that_spoils_the_process_is_left_out_of_the_next(
    place: Place, standbys: Standbys, text: str, why: str | None
) -> None:
    place.library("spoils", text)
    place.library("barred", "")
    place.library("ended", "")
    place.library("fine", "")
    write(place.cwd / "train.py", "import sys\nprint('fine' in sys.modules, 'spoils' in sys.modules)")
    command, (out, _) = place.to_files(place.command("train.py"), "w")
    standbys.configure(enabled=True, exclude=["barred"])
    with standbys:
        if why is None:  # nobody says which module it was: no other one is started
            standbys.learn(place.record("fine", "spoils"))
            standbys.prepare(0, command)
            standbys.tick()
            (pid,) = standbys.pids()
            eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
            eventually(lambda: standbys.tick() or not standbys.pids())
            return
        warm(standbys, command, record=place.record("fine", "spoils"))
        assert finish(promoted(standbys, command), command) == 0
    assert out.read_text() == "True False\n"


def test_excluded_packages_are_not_imported(place: Place, standbys: Standbys) -> None:
    write(place.site / "big" / "__init__.py", "")
    write(place.site / "big" / "part.py", "")
    place.library("bigger", "")
    write(place.cwd / "train.py", "import sys\nprint('big' in sys.modules, 'bigger' in sys.modules)")
    command, (out, _) = place.to_files(place.command("train.py"), "w")
    standbys.configure(enabled=True, exclude=["big"])
    warm(standbys, command, record=place.record("big", "big.part", "bigger"))
    assert finish(promoted(standbys, command), command) == 0
    assert out.read_text() == "False True\n"


@pytest.mark.parametrize(
    ("known", "scan", "exclude", "expected"),
    [
        (None, None, (), ("torch", "numpy", "torch.distributed")),
        (None, Scan(frozenset({"os"})), (), ()),
        (None, Scan(frozenset({"lightning"})), (), ("torch", "numpy", "torch.distributed")),
        (("a", "a.b", "ab", "json"), None, ("a",), ("ab", "json")),
        (("mpi4py.MPI", "x"), None, (), ("x",)),
        (("x", "y", "json"), Scan(frozenset("xy"), ("Z",), frozenset("x")), (), ("x", "json")),
        (("torch", "torch._dynamo.eval"), Scan(frozenset(), ("TORCH_LOGS",), frozenset({"torch"})), (), ("torch",)),
        ((), None, (), ()),
    ],
)
def test_which_modules(
    known: Sequence[str] | None, scan: Scan | None, exclude: Sequence[str], expected: tuple[str, ...]
) -> None:
    assert warming.choose(known, scan, exclude) == expected


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'["a b", "../x", ""]', b"\xff", b"[[]]"])
def test_a_broken_record_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "imports.json"
    path.write_bytes(content)
    assert warming.recorded(path) in (None, ())
    assert warming.recorded(tmp_path / "none") is None


def test_what_a_script_has_imported_is_noted(place: Place) -> None:
    place.library("lib", "import lib2")
    place.library("lib2", "")
    write(place.site / "pkg" / "__init__.py", "import lib")
    write(
        place.site / "pkg" / "run.py",
        "import pkg, json; "
        + (
            note := "from pathlib import Path; "
            "from ftrun.session import parked; parked.note_imports(Path('.')); parked.note_imports(Path('no/dir'))"
        ),
    )
    write(place.cwd / "own.py", "")
    write(
        place.cwd / "train.py",
        f"import sys, types, json, lib, own; sys.modules['fake'] = types.ModuleType('fake')\n"
        f"sys.modules['alias'] = lib\nsys.modules['nothing'] = None\n{note}",
    )
    for target, more in ((("train.py",), {"lib", "lib2"}), (("-m", "pkg.run"), {"lib", "lib2"})):
        (place.cwd / "imports.json").unlink(missing_ok=True)
        each = place.command(*target)
        assert finish(cold(each), each) == 0
        noted = json.loads((place.cwd / "imports.json").read_text())
        assert more <= set(noted)
        assert not {"own", "__main__", "fake", "alias", "nothing", "pkg", "pkg.run"} & set(noted)
        assert "ftrun.session.bootstrap" not in noted
        assert noted.index("lib") < noted.index("lib2")
    second = place.command("train.py", LOCAL_RANK="1")
    (place.cwd / "imports.json").unlink()
    assert finish(cold(second), second) == 0
    assert not (place.cwd / "imports.json").exists()


@pytest.mark.parametrize(
    ("file", "own", "library"),
    [
        ("/env/site-packages/x.py", "/work", True),
        ("/work/x.py", "/work", False),
        ("/work/env/site-packages/x.py", "/work", False),
        ("/env/site-packages/pkg/x.py", "/env/site-packages/pkg", False),
        ("/env/site-packages/other/x.py", "/env/site-packages/pkg", True),
        ("/env/site-packages-not/x.py", "/work", False),
    ],
)
def test_a_library_or_the_scripts_own(file: str, own: str, library: bool) -> None:
    assert imports.is_library(file, ["/env/site-packages"], own) is library


# --- what the script's text says


@pytest.mark.parametrize(
    ("text", "variables", "before"),
    [
        ("import torch\n", (), {"torch"}),
        ("import os\nos.environ['A_B'] = '1'\nimport torch", ("A_B",), {"os"}),
        ("import os, torch as t\nos.environ['A_B'] = '1'\nimport numpy", ("A_B",), {"os", "torch"}),
        ("from os import environ\nenviron.setdefault('X', '1')", ("X",), {"os"}),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch", (), {"os", "torch"}),
        ("import os\nif os.environ['X'] == '1': pass\nprint(os.environ.get('Y'))\nimport torch", (), {"os", "torch"}),
        ("import os\nos.environ[name] = '1'", ("?",), {"os"}),
        ("import os\nos.environ.update(x)", ("?",), {"os"}),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", ("?",), {"dotenv"}),
        ("import own\nimport torch", ("FROM_OWN",), {"os"}),
        ("from own import x\nimport torch", ("FROM_OWN",), {"os"}),
        ("from pack import deep\nimport torch", ("FROM_DEEP",), {"os"}),
        ("import torch.nn, pack.deep", ("FROM_DEEP",), {"torch", "os"}),
    ],
)
def test_scan(tmp_path: Path, text: str, variables: tuple[str, ...], before: set[str]) -> None:
    write(tmp_path / "own.py", "import os, train\nos.environ['FROM_OWN'] = 'x'")
    write(tmp_path / "pack" / "__init__.py", "from . import deep")
    write(tmp_path / "pack" / "deep.py", "import os\nos.putenv('FROM_DEEP', 'x')")
    write(tmp_path / "train.py", text)
    for arguments in (("train.py", "x"), ("-m", "train"), ("--run-path", "train.py")):
        found = script_scan.scan(arguments, str(tmp_path))
        assert found is not None
        assert (found.variables, found.before) == (variables, before)
        assert not found.outdated
    (tmp_path / "train.py").write_text("import other_things")
    assert found.outdated


@pytest.mark.parametrize("arguments", [("none.py",), ("-m", "none.at.all"), ("-m",), (), ("pack",)])
def test_a_script_that_cannot_be_read_says_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "pack").mkdir()
    assert script_scan.scan(arguments, str(tmp_path)) is None


def test_a_script_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(bytes(range(256)))
    found = script_scan.scan(("train.py",), str(tmp_path))
    assert found is not None
    assert found.packages == frozenset()


# --- leaving nothing behind


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("importing", [False, True])
def test_parked_processes_die_with_an_agent_that_is_killed(place: Place, importing: bool) -> None:
    place.library("hangs", "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(1000)")
    place.record("hangs" if importing else "json")
    command = place.command("train.py")
    text = f"""
        import sys, time
        from pathlib import Path
        from ftrun.launch.standbys.standby import Command, Standbys
        standbys = Standbys()
        standbys.learn(Path("imports.json"))
        standbys.start(0, Command({command.argv!r}, {dict(command.env)!r}, None, None, {command.cwd!r}))
        while not standbys.ready() and not Path("began").exists():
            standbys.tick()
            time.sleep(0.01)
        print(*standbys.pids(), flush=True)
        time.sleep(1000)
    """
    write(place.cwd / "agent.py", text)
    agent = subprocess.Popen(
        [sys.executable, "agent.py"], cwd=place.cwd, env=place.environment(), stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    assert psutil.pid_exists(pid)
    agent.kill()
    agent.wait(10)
    agent.stdout.close()
    eventually(lambda: gone(pid))


def test_descriptors_of_the_agent_do_not_leak(place: Place, standbys: Standbys) -> None:
    gc.collect()  # what other tests have left open isn't closed meanwhile
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        command, _ = place.to_files(place.command("-c"), "w")
        warm(standbys, command, record=place.record("json"))
        finish(promoted(standbys, command), command)
        warm(standbys, command, record=place.record("json"))
        standbys.discard("enough")
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- the first start


def guessed(tmp_path: Path, *argv: str, **env: str) -> early.Guess | None:
    return early.guess(argv, {"PATH": os.environ["PATH"], **env}, str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "env", "workers", "script"),
    [
        (["train.py"], {}, 1, ("train.py",)),
        (["run", "--nproc", "2", "train.py", "--help", "--nproc", "9"], {}, 2, ("train.py",)),
        (["--nproc-per-node=3", "train.py"], {}, 3, ("train.py",)),
        (["--nproc_per_node", "3", "--standalone", "train.py"], {}, 3, ("train.py",)),
        (["train.py"], {"PET_NPROC_PER_NODE": "4"}, 4, ("train.py",)),
        (["--nproc", "2", "train.py"], {"PET_NPROC_PER_NODE": "4"}, 2, ("train.py",)),
        (["-m", "--name", "x", "pkg.train", "y"], {}, 1, ("-m", "pkg.train")),
        (["pkg.train"], {"PET_MODULE": "1"}, 1, ("-m", "pkg.train")),
        (["--run-path", "train.py"], {}, 1, ("--run-path", "train.py")),
        (["-c", "job.yaml"], {}, 5, ("train.py",)),
        (["-cjob.yaml", "--nproc", "2", "other.py"], {}, 2, ("other.py",)),
        (["-c", "job.yaml", "--set", "checkpoint.every=3 steps"], {}, 5, ("train.py",)),
    ],
)
def test_a_plain_command_line_is_guessed(
    tmp_path: Path, argv: list[str], env: dict[str, str], workers: int, script: tuple[str, ...]
) -> None:
    for name in ("train.py", "other.py"):
        write(tmp_path / name, "import torch")
    write(
        tmp_path / "job.yaml",
        "script: train.py\nlaunch: {nproc_per_node: 5}\nenv: {LR: 3e-4, ON: true}\nstandby: {exclude: [big]}",
    )
    made = guessed(tmp_path, *argv, **env)
    assert made is not None
    assert len(made.commands) == workers
    for rank, command in enumerate(made.commands):
        assert command.split is not None
        assert command.split[1] == script
        assert command.env["LOCAL_RANK"] == command.env["RANK"] == str(rank)
        assert command.env["WORLD_SIZE"] == str(workers)
        assert ("OMP_NUM_THREADS" in command.env) == (workers > 1)
        if "job.yaml" in " ".join(argv):
            assert (command.env["LR"], command.env["ON"], made.exclude) == ("3e-4", "true", ("big",))


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ([], {}),
        (["status"], {}),
        (["--help"], {}),
        (["-h", "train.py"], {}),
        (["--dry-run", "train.py"], {}),
        (["--no-python", "train.py"], {}),
        (["--no_python", "train.py"], {}),
        (["--nproc", "gpu", "train.py"], {}),
        (["--nproc", "0", "train.py"], {}),
        (["--nproc", "1000", "train.py"], {}),
        (["--nproc", "\u00b2", "train.py"], {}),
        (["--numa-binding=node", "train.py"], {}),
        (["--signals-to-handle", "SIGTERM", "train.py"], {}),
        (["--virtual-local-rank", "train.py"], {}),
        (["none.py"], {}),
        (["train.py"], {"PYTHON_EXEC": "/usr/bin/python3"}),
        (["train.py"], {"PET_NUMA_BINDING": "node"}),
        (["--set", "standby.enabled=false", "train.py"], {}),
        (["--set=env.X=1", "train.py"], {}),
        (["-c", "off.yaml"], {}),
        (["-c", "list.yaml"], {}),
        (["-c"], {}),
    ],
    ids=" ".join,
)
def test_what_is_not_plain_is_not_guessed(tmp_path: Path, argv: list[str], env: dict[str, str]) -> None:
    write(tmp_path / "train.py", "import torch")
    write(tmp_path / "off.yaml", "script: train.py\nstandby: {enabled: false}")
    write(tmp_path / "list.yaml", "- script")
    try:
        assert guessed(tmp_path, *argv, **env) is None
    except OSError:
        assert argv == ["-c"]  # which begin() takes for the same


def test_the_first_start_takes_processes_that_are_still_importing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started in the background by a script, too, whose shell has SIGINT and SIGQUIT ignored."""
    write(
        place.cwd / "train.py",
        "import os, signal, torch\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], torch.ones(1))\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL",
    )
    monkeypatch.chdir(place.cwd)
    environment = place.environment()
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    monkeypatch.setattr(early, "_PATIENCE", 120.0)
    monkeypatch.setattr(standby, "_ANSWER_WARM", 60.0)
    with early.begin(["--nproc", "2", "train.py", "x"], environment) as standbys:
        assert len(standbys.pids()) == 2
        both = []
        for rank in range(2):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank)}
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "2")
            env = {"OMP_NUM_THREADS": "1", "MASTER_PORT": "1", **ranks, **sizes, "GROUP_WORLD_SIZE": "1"}
            both.append(place.to_files(place.command("train.py", "x", **env), f"w{rank}"))
        workers = standbys.take({rank: each for rank, (each, _) in enumerate(both)})
        assert len(workers) == 2, standbys.refused
        for rank, (each, (out, _)) in enumerate(both):
            assert finish(workers[rank], each) == 0
            assert out.read_text() == f"{rank} 2 tensor([1.])\n"


def lives_in(directory: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["usage error", "killed"])
def test_a_launcher_that_ends_early_leaves_nothing_behind(runner: Runner, how: str) -> None:
    write(runner.cwd / "train.py", "import torch, time\ntime.sleep(600)")
    options = ["--nproc", "2", "--max-restarts", "many"] if how == "usage error" else ["--nproc", "2"]
    started = runner.start(*options, "train.py", standbys=True)
    # The one with the error may have ended before it was looked at.
    ended = started.process.poll
    eventually(lambda: len(lives_in(runner.cwd)) >= 3 or ended() is not None, what="two parked processes")
    if how == "killed":
        started.process.kill()
    assert started.wait().code == (2 if how == "usage error" else -signal.SIGKILL)
    eventually(lambda: not lives_in(runner.cwd), what="the end of all")


@pytest.mark.parametrize("argv", [["-c", "none.yaml"], ["--nproc", "2", "plain.py"]])
def test_nothing_is_started_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    write(tmp_path / "plain.py", "print('no torch in here')")
    monkeypatch.chdir(tmp_path)
    with early.begin(argv, dict(os.environ)) as standbys:
        assert standbys.pids() == set()


def test_the_imports_of_the_run_that_goes_on_are_known(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import torch")
    for run in ("llama", "train/20250101-000000", "train/20260101-000000"):
        write(tmp_path / "runs" / run / "attempts" / "0001" / "n0000" / "r00000" / "imports.json", "[]")
        (tmp_path / "runs" / run / "attempts" / "latest").symlink_to("0001")
    for argv, run in (
        (["--name", "llama", "train.py"], "llama"),
        (["train.py"], "train/20260101-000000"),
        (["--run-dir", "runs/llama", "train.py"], "llama"),
        (["--name", "new", "train.py"], None),
    ):
        made = guessed(tmp_path, *argv)
        assert made is not None
        assert (made.record and str(made.record).split("runs/")[1].split("/attempts")[0]) == run


def test_fit_says_what_differs(place: Place) -> None:
    command = place.command("train.py", A="1")
    fit = Fit.of(command)
    other = Fit.of(replace(command, env={**command.env, "A": "2", "B": "", "RANK": "5", "MASTER_ADDR": "x"}))
    assert fit is not None
    assert other is not None
    assert fit.differs(fit, plain=False) is None
    assert fit.differs(other, plain=True) == "A, B has another value"
    assert fit.differs(other, plain=False) == "A, B, RANK has another value"
