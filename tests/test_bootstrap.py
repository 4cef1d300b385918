"""A script under the bootstrap behaves as under plain Python, and leaves its last words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from conftest import NO_COMPILER, eventually
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from ftrun import error_file, events, inject, pulse
from ftrun.contract import Fault, WorkerContract
from ftrun.error_file import ErrorRecord
from ftrun.errors import CorruptCheckpoint, StateMismatch
from ftrun.pulse import Phase
from ftrun.rundir import RunDir

BOOTSTRAP = ("-m", "ftrun.session.bootstrap")
_FOREIGN = ("FTRUN_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "PYTHON")


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | more


@dataclass(frozen=True)
class Ended:
    out: str
    err: str
    code: int


def start(cwd: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", *arguments],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], stdin: str = "") -> Ended:
    try:
        out, err = process.communicate(stdin, timeout=60)
    finally:
        process.kill()
    return Ended(out, err, process.returncode)


def both(cwd: Path, *command: str, stdin: str = "", **env: str) -> tuple[Ended, Ended]:
    """Under plain Python, and under the bootstrap."""
    plain, ours = start(cwd, *command, **env), start(cwd, *BOOTSTRAP, *command, **env)
    return ended(plain, stdin), ended(ours, stdin)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


LOOK = """
    import builtins, os, sys
    print(__name__, __file__, sys.argv, sys.path, __spec__, __package__, __doc__, __cached__)
    print(__builtins__ is builtins, type(__loader__), __loader__.name, __loader__.path, sorted(globals()))
    print(sys.modules["__main__"].__dict__ is globals(), __annotations__, sys.flags, os.getcwd())
"""

LOOK_AS_MODULE = """
    import sys
    from . import helper
    from .helper import VALUE
    print(__name__, __file__, sys.argv, sys.path, __package__, VALUE, helper.__name__)
    print(__spec__.name, __spec__.origin, __spec__.loader.path, __cached__, sorted(globals()))
"""

# name: (the script, what it must print when it runs at all, so that two equal failures don't pass)
SCRIPTS = {
    "docstring_and_future": ('"""About it."""\nfrom __future__ import annotations\nprint(__doc__)', "About it."),
    "no_inherited_future": (
        "import typing\ndef f(x: int): ...\nprint(f.__annotations__['x'] is int)",
        "True",
    ),
    "latin_1": ("# -*- coding: latin-1 -*-\nprint(len('\u00e9'))", "2"),
    "pickle": (
        """
        import pickle, sys
        class Thing:
            pass
        loaded = pickle.loads(pickle.dumps(Thing()))
        print(type(loaded) is Thing, Thing.__module__, sys.modules["__main__"].Thing is Thing)
        """,
        "True __main__ True",
    ),
    "spawn": (
        """
        import multiprocessing, sys
        class Thing:
            def __init__(self, value): self.value = value
        def work(thing, queue): queue.put((thing.value + 1, __name__, type(thing).__module__, sys.argv))
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            process = context.Process(target=work, args=(Thing(41), queue))
            process.start()
            print(queue.get())
            process.join()
            print(process.exitcode)
        """,
        "(42, '__mp_main__', '__mp_main__'",
    ),
    "uncaught": (
        """
        def deep(n):
            if n == 0:
                raise ValueError("at the bottom")
            deep(n - 1)
        print("before")
        deep(5)
        """,
        "before",
    ),
    "recursion_error": ("print('before')\ndef f(): f()\ntry:\n f()\nexcept RecursionError:\n raise", "before"),
    "chained": (
        """
        print("before")
        try:
            try:
                {}["key"]
            except KeyError as error:
                raise RuntimeError("explicitly") from error
        except RuntimeError:
            int("implicitly")
        """,
        "before",
    ),
    "exception_group": (
        "print('before')\nraise ExceptionGroup('two', [ValueError('a'), TypeError('b')])",
        "before",
    ),
    "syntax_error": ("print('never')\nx = = 1\n", ""),
    "import_error": ("print('before')\nimport no_such_module_here", "before"),
    "exit_number": ("import sys\nprint('before')\nsys.exit(3)", "before"),
    "exit_text": ("import sys\nprint('before')\nsys.exit('the reason')", "before"),
    "exit_none": ("import sys\nprint('before')\nsys.exit(None)", "before"),
    "exit_while_handling": (
        "import sys\nprint('before')\ntry:\n 1/0\nexcept ZeroDivisionError:\n sys.exit('over')",
        "before",
    ),
    "os_exit": (
        "import atexit, os\natexit.register(print, 'never')\nprint('before')\nos._exit(7)",
        "before",
    ),
    "killed": ("import os\nprint('before')\nos.kill(os.getpid(), 15)", "before"),
    "keyboard_interrupt": (
        "import atexit\natexit.register(print, 'handler')\nprint('before')\nraise KeyboardInterrupt",
        "before\nhandler",
    ),
    "sigint": ("import os, signal\nprint('before')\nos.kill(os.getpid(), signal.SIGINT)\nprint(1)", "before"),
    "exit_handler_uses_globals": (
        """
        import atexit
        LATER = "still here"
        def say(): print(LATER, __name__, helper())
        def helper(): return len(LATER)
        atexit.register(say)
        """,
        "still here __main__ 10",
    ),
    "exit_handler_after_exception": (
        "import atexit\nX = 'kept'\natexit.register(lambda: print(X))\nraise OSError(5, 'gone')",
        "kept",
    ),
    "thread_outlives_the_script": (
        """
        import threading
        DONE = threading.Event()
        RESULT = [1, 2, 3]
        def work():
            threading.main_thread().join()
            print(sum(RESULT), DONE.is_set(), __name__)
        threading.Thread(target=work).start()
        DONE.set()
        """,
        "6 True __main__",
    ),
    "exception_in_a_thread": (
        """
        import threading
        def work(): raise ValueError("in a thread")
        thread = threading.Thread(target=work, name="other")
        thread.start(); thread.join()
        print("after")
        """,
        "after",
    ),
    "own_excepthook": (
        """
        import sys, traceback
        def hook(kind, error, trace):
            print("hook", kind.__name__, error, [f.name for f in traceback.extract_tb(trace)])
        sys.excepthook = hook
        def fail(): raise ValueError("seen")
        fail()
        """,
        "hook ValueError seen ['<module>', 'fail']",
    ),
    "excepthook_that_exits": (
        "import sys\nsys.excepthook = lambda *_: (print('hook'), sys.exit(9))\n1/0",
        "hook",
    ),
    "interrupt_with_own_excepthook": (
        "import sys\nsys.excepthook = lambda kind, *_: print('hook', kind.__name__)\nraise KeyboardInterrupt",
        "hook KeyboardInterrupt",
    ),
    "stdin": ("import sys\nprint(sys.stdin.readline().strip(), input(), sys.stdin.read())", "one two three"),
    "children_get_their_own_start": (
        """
        import subprocess, sys
        code = "import __main__, sys; print(sys.argv, __main__.__name__)"
        print(subprocess.check_output([sys.executable, "-c", code], text=True))
        """,
        "['-c'] __main__",
    ),
    "inspect_and_warnings": (
        """
        import inspect, warnings
        def function(): return 1
        print(inspect.getsource(function), inspect.stack()[0].lineno)
        print(inspect.getmodule(function))
        warnings.warn("look here")
        """,
        "def function(): return 1",
    ),
    "shadows_what_the_launcher_uses": ("import filelock, psutil\nprint(filelock.MINE, psutil.MINE)", "mine mine"),
    "typing_get_type_hints": (
        """
        from __future__ import annotations
        import dataclasses, typing
        @dataclasses.dataclass
        class Options:
            inner: Inner
        class Inner: ...
        print(typing.get_type_hints(Options)["inner"] is Inner)
        """,
        "True",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_behaves_as_under_python(tmp_path: Path, name: str) -> None:
    text, expected = SCRIPTS[name]
    path = write(tmp_path / "script.py", text)
    for module in ("filelock", "psutil"):
        write(tmp_path / f"{module}.py", "MINE = 'mine'")
    plain, ours = both(tmp_path, path.name, "--lr", "3e-4", stdin="one\ntwo\nthree")
    if name == "recursion_error":  # how deep one gets differs by the bootstrap's few frames
        plain, ours = (replace(each, err=re.sub(r"repeated \d+ more", "", each.err)) for each in (plain, ours))
    assert ours == plain
    assert expected in plain.out
    assert "never" not in plain.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("look.py",),
        ("./look.py", "-m", "--nproc", "2", "", "a b", "--"),
        ("sub/../look.py", "-c", "x"),
        ("sub/look.py",),
        ("with 'quotes' and \"spaces\"/lo ok.py", "x"),
        ("link.py",),
        ("linked/look.py",),
        ("linked/../beside.py",),
        ("no_suffix",),
        ("{cwd}/sub/look.py",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_script_sees_what_it_would_see_under_python(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for place in ("look.py", "sub/look.py", "with 'quotes' and \"spaces\"/lo ok.py", "no_suffix", "deep/er/look.py"):
        write(tmp_path / place, LOOK)
    write(tmp_path / "deep" / "beside.py", LOOK)  # what linked/../beside.py is
    (tmp_path / "linked").symlink_to("deep/er")
    (tmp_path / "link.py").symlink_to("deep/er/look.py")
    plain, ours = both(tmp_path, *(each.format(cwd=tmp_path) for each in arguments))
    assert ours == plain
    assert plain.code == 0, plain.err
    assert str(list(arguments[1:]))[1:-1] in plain.out


def test_without_a_place_of_its_own_in_the_path(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "look.py", LOOK)
    root = str(Path(error_file.__file__).parents[1])
    plain, ours = both(tmp_path, "sub/look.py", PYTHONSAFEPATH="1", PYTHONPATH=root)
    assert ours == plain
    assert f"'{tmp_path}/sub'" not in plain.out


MODULES = {
    "pkg.mod": (("pkg.mod", "x", "-m"), "__main__"),
    "a package": (("pkg",), "the package"),
    "top level": (("top", "y"), "True"),
    "raises": (("pkg.bad",), "before"),
    "syntax error": (("pkg.broken",), ""),
    "exits": (("pkg.leaves",), "before"),
    "unknown": (("pkg.nope",), ""),
    "no __main__": (("bare",), ""),
    "package raises": (("sick.mod",), "sick"),
    "interrupted": (("pkg.interrupted",), "before"),
    "spawn": (("pkg.spawns",), "pkg.spawns 1"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_behaves_as_under_python_m(tmp_path: Path, name: str) -> None:
    arguments, expected = MODULES[name]
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "__main__.py", "print('the package', __spec__.name)")
    write(tmp_path / "pkg" / "helper.py", "VALUE = 5")
    write(tmp_path / "pkg" / "mod.py", LOOK_AS_MODULE)
    write(tmp_path / "pkg" / "bad.py", "print('before')\ndef f(): 1/0\nf()")
    write(tmp_path / "pkg" / "broken.py", "x = = 1")
    write(tmp_path / "pkg" / "leaves.py", "import sys\nprint('before')\nsys.exit(4)")
    write(tmp_path / "pkg" / "interrupted.py", "print('before')\nraise KeyboardInterrupt")
    write(
        tmp_path / "pkg" / "spawns.py",
        """
        import multiprocessing
        from . import helper
        def work(queue): queue.put((__spec__.name, __name__))
        if __name__ == "__main__":
            queue = multiprocessing.get_context("spawn").SimpleQueue()
            multiprocessing.get_context("spawn").Process(target=work, args=(queue,)).start()
            print(queue.get()[0], helper.VALUE - 4)
        """,
    )
    write(tmp_path / "bare" / "__init__.py", "")
    write(tmp_path / "sick" / "__init__.py", "print('sick')\nraise OSError('sick')")
    write(tmp_path / "sick" / "mod.py", "")
    write(tmp_path / "top.py", "import sys\nprint(__name__, __file__, sys.argv, __package__ == '', sys.path)")
    plain, ours = both(tmp_path, "-m", *arguments)
    assert ours == plain
    assert expected in plain.out


def test_a_zipped_application(tmp_path: Path) -> None:
    import zipapp

    write(tmp_path / "source" / "__main__.py", "import sys, part\nprint(__file__, sys.argv, sys.path[0], part.X)\n1/0")
    write(tmp_path / "source" / "part.py", "X = 1")
    zipapp.create_archive(tmp_path / "source", tmp_path / "app.pyz", interpreter="/usr/bin/env python3")
    plain, ours = both(tmp_path, "app.pyz", "x")
    assert ours == plain
    assert "['app.pyz', 'x']" in plain.out


def test_a_script_that_is_gone_is_named(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, "gone.py")
    assert ours.err == plain.err
    assert ours.code == 1  # Python's own 2 would be taken for a usage error of ftrun


def test_the_bootstrap_brings_no_module_that_a_script_could_miss_or_meet(tmp_path: Path) -> None:
    write(tmp_path / "modules.py", "import sys\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))")
    plain, ours = both(tmp_path, "modules.py")
    assert plain.code == ours.code == 0
    more = set(ours.out.split()) - set(plain.out.split())
    assert more - set(sys.stdlib_module_names) == {"ftrun"}


# --- the error file


def error_of(tmp_path: Path, script: str, **env: str) -> tuple[Ended, Path]:
    write(tmp_path / "script.py", script)
    target = tmp_path / "error.json"
    result = ended(start(tmp_path, *BOOTSTRAP, "script.py", TORCHELASTIC_ERROR_FILE=str(target), **env))
    return result, target


def test_the_error_file_has_the_shape_of_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def f(): raise ValueError('a\\nb')\nf()"
    began = time.time()
    _, target = error_of(tmp_path, text)
    ended_by = time.time()
    ours = json.loads(target.read_text())
    other = tmp_path / "theirs.json"
    monkeypatch.setenv(error_file.VARIABLE, str(other))
    try:
        exec(compile(text, "script.py", "exec"), {})
    except ValueError as error:
        ErrorHandler().record_exception(error)
    theirs = json.loads(other.read_text())
    assert ours["message"].keys() == theirs["message"].keys()
    assert ours["message"]["extraInfo"].keys() == theirs["message"]["extraInfo"].keys()
    for document in (ours, theirs):
        extra = document["message"]["extraInfo"]
        assert isinstance(extra["timestamp"], str)
        assert extra["timestamp"].isdigit()
        assert extra["py_callstack"].startswith("Traceback")
    assert ours["message"]["message"] == theirs["message"]["message"] == "ValueError: a\nb"
    ErrorHandler().dump_error_file(str(target))  # torch's own reader; it raises for what it doesn't know
    read = error_file.read(target)
    assert read is not None
    assert "bootstrap" not in read.traceback
    assert began - 1 <= read.time <= ended_by
    theirs_read = error_file.read(other)
    assert theirs_read is not None
    assert theirs_read.message == "ValueError: a\nb"
    assert theirs_read.time > 1e9


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("import sys\nsys.exit('why')", "SystemExit: why"),
        ("import sys\nsys.exit(0)", None),
        ("import sys\nsys.exit(75)", None),
        ("pass", None),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("class Odd(Exception):\n def __str__(self): raise OSError\nraise Odd", "Odd: <its text can't be made>"),
        ("x = = 1", "SyntaxError: invalid syntax (script.py, line 1)"),
    ],
)
def test_last_words(tmp_path: Path, script: str, message: str | None) -> None:
    _, target = error_of(tmp_path, script)
    read = error_file.read(target)
    assert (read and read.message) == message
    assert [path.name for path in tmp_path.glob("error*")] == ([target.name] if message else [])
    assert read is None or "bootstrap.py" not in read.traceback


def test_the_scripts_own_error_file_is_kept(tmp_path: Path) -> None:
    _, target = error_of(tmp_path, "open('error.json', 'w').write('{\"message\": \"mine\"}')\n1/0")
    assert error_file.read(target) == ErrorRecord("mine")


def test_a_place_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "1/0")
    result = ended(start(tmp_path, *BOOTSTRAP, "script.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "no" / "dir")))
    assert result.code == 1
    assert result.err.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("script", "code", "kind", "attempt"),
    [
        ("from ftrun.errors import *\nraise StateMismatch('shapes differ')", 2, "usage", ""),
        ("from ftrun.errors import *\nraise CorruptCheckpoint('crc', 'e1')", 1, "corrupt_checkpoint", "e1"),
        ("from ftrun.errors import *\nraise LostSnapshot('gone')", 1, "lost_snapshot", ""),
    ],
)
def test_what_the_launcher_explains_is_not_shown_by_every_rank(
    tmp_path: Path, script: str, code: int, kind: str, attempt: str
) -> None:
    result, target = error_of(tmp_path, script)
    read = error_file.read(target)
    assert read is not None
    assert (result.code, read.kind, read.attempt) == (code, kind, attempt)
    assert result.err == ""


def test_kinds_of_error(tmp_path: Path) -> None:
    for number, (error, kind) in enumerate(
        [(StateMismatch("x"), "usage"), (CorruptCheckpoint("y", "e1"), "corrupt_checkpoint"), (OSError(), "exception")]
    ):
        target = tmp_path / f"{number}.json"
        error_file.write(error, {error_file.VARIABLE: str(target)})
        read = error_file.read(target)
        assert read is not None
        assert read.kind == kind
    error_file.write(OSError(), {})  # nobody asked for one
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"message": {"mess',
        bytes(range(256)),
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"message": null}',
        b'{"message": {}}',
        b'{"message": {"message": "x", "extraInfo": 3}}',
        b'{"message": {"message": "x", "extraInfo": {"timestamp": "noon"}}}',
        b'{"message": {"message": "x"}, "ftrun": []}',
        b"[" * 200_000,
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_broken_error_file_is_evidence(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(raw)
    assert error_file.read(path) == ErrorRecord(f"unreadable error file ({len(raw)} bytes)")


def test_a_huge_error_file_is_not_taken_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that nobody could read whole
    assert error_file.read(path) == ErrorRecord(f"unreadable error file ({1 << 40} bytes)")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "null", "0"])
def test_a_time_that_is_none_is_unknown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(f'{{"message": {{"message": "x"}}, "ftrun": {{"time": {text}}}}}')
    assert error_file.read(path) == ErrorRecord("x", time=0.0)


def test_no_error_file(tmp_path: Path) -> None:
    assert error_file.read(tmp_path / "none.json") is None
    assert error_file.read(tmp_path) is None


# --- what a worker gets without knowing it


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    write(tmp_path / "worker.py", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)")
    write(
        tmp_path / "agent.py",
        """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-m", "ftrun.session.bootstrap", "worker.py"]).wait()
        """,
    )
    agent = start(tmp_path, "agent.py")
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    assert not gone(worker)
    agent.kill()
    eventually(lambda: gone(worker), what="the end of the worker")  # which would come after a hundred seconds
    ended(agent)


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "zombie"])
def test_a_worker_whose_agent_died_while_it_was_starting_does_not_run(tmp_path: Path, fetched: bool) -> None:
    agent = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    try:
        if fetched:
            agent.wait(30)
        else:
            eventually(lambda: psutil.Process(agent.pid).status() == psutil.STATUS_ZOMBIE, timeout=30)
        contract = worker_contract(tmp_path, agent=agent.pid)
        write(tmp_path / "worker.py", "print('ran')")
        result = ended(start(tmp_path, *BOOTSTRAP, "worker.py", **contract.to_environment()))
    finally:
        agent.wait(30)
    assert (result.code, result.out) == (-signal.SIGKILL, "")


def test_a_wrapper_between_agent_and_worker_is_fine(tmp_path: Path) -> None:
    contract = worker_contract(tmp_path, agent=os.getppid())  # alive, and not the parent of the worker
    write(tmp_path / "worker.py", "print('ran')")
    result = ended(start(tmp_path, *BOOTSTRAP, "worker.py", **contract.to_environment()))
    assert (result.code, result.out) == (0, "ran\n")


def worker_contract(tmp_path: Path, **more: object) -> WorkerContract:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create({"run_id": "run"})
    directory = run_dir.worker(1, 0, 0)
    directory.mkdir(parents=True, exist_ok=True)
    pulse.create(directory / "pulse")
    made = WorkerContract(
        run_dir=str(run_dir.path),
        run_id="run",
        root=str(run_dir.checkpoints),
        attempt=1,
        epoch=1,
        resume=None,
        node=0,
        worker_dir=str(directory),
    )
    return replace(made, **more)


OPTIMIZES = """
    import torch
    from torch import nn
    from ftrun.inject import InjectedFault

    def optimizer():
        return torch.optim.SGD([nn.Parameter(torch.zeros(1, requires_grad=True))], lr=0.1)

    first, second = optimizer(), optimizer()
    for _ in range(4):
        first.step()
        second.step()
    try:
        first.step()
    except InjectedFault as fault:
        print(fault)
    first.step()
    del first
    third = optimizer()
    for _ in range(2):
        third.step()
        second.step()
"""


def test_steps_of_a_plain_script_are_counted_and_a_fault_fires_once(tmp_path: Path) -> None:
    faults = (Fault(at_step=3, rank=1, do="kill"), Fault(at_step=5, rank=0, do="raise"))
    contract = worker_contract(tmp_path, faults=faults)
    write(tmp_path / "train.py", OPTIMIZES)
    variables = contract.to_environment() | {"RANK": "0", "PYTHONPATH": str(NO_COMPILER)}
    result = ended(start(tmp_path, *BOOTSTRAP, "train.py", **variables))
    assert result == Ended("scripted fault: raise at step 5 on rank 0\n", "", 0)
    beat = pulse.read(Path(contract.worker_dir) / "pulse")
    assert beat is not None
    # Four before the fault, one after it; the second optimizer is not counted, and the third takes over from the
    # first when that is gone.
    assert (beat.step, beat.base, beat.phase, beat.owned) == (7, 0, Phase.STEP, False)
    seen = [record.event for record in events.read(RunDir(tmp_path / "run").events())]
    # Between those that are sure there is one for each second that has passed.
    others = [events.Step(step) for step in range(2, 7)]
    began, fired = events.StepsBegan(step=0, total=None, exact=False), events.FaultInjected(step=5, do="raise")
    assert [event for event in seen if event not in others] == [
        began,
        events.Step(1),
        fired,
        events.Step(7),
    ]


def test_a_fault_fires_once_in_a_run(tmp_path: Path) -> None:
    contract = worker_contract(tmp_path, faults=(Fault(at_step=5, rank=0, do="raise"),))
    for step, rank in ((4, 0), (5, 1), (6, 0)):
        inject.fire_if_due(contract, rank, step)
    with pytest.raises(inject.InjectedFault):
        inject.fire_if_due(contract, 0, 5)
    inject.fire_if_due(replace(contract, attempt=2), 0, 5)


@pytest.mark.parametrize(("do", "code"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_faults_that_end_the_process(tmp_path: Path, do: str, code: int) -> None:
    contract = worker_contract(tmp_path, faults=(Fault(at_step=1, rank=0, do=do),))
    text = "import os\nfrom ftrun import contract, inject\n"
    text += "inject.fire_if_due(contract.WorkerContract.from_environment(os.environ), 0, 1)\nprint('ran')"
    write(tmp_path / "step.py", text)
    first, second = (ended(start(tmp_path, "step.py", **contract.to_environment())) for _ in range(2))
    assert (first.code, first.out) == (code, "")
    assert (second.code, second.out) == (0, "ran\n")
