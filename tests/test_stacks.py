from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from evidence_kit import children, compiled  # noqa: F401 - a fixture

from ftrun import dump
from ftrun.launch.evidence import stacks

if TYPE_CHECKING:
    from pathlib import Path

    from evidence_kit import Children

# --- reading dumps

THREAD = """\
Thread 0x00007ffa566c16c0 (most recent call first):
  File "/lib/python3.11/threading.py", line 982 in run
  File "/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

"""
MAIN = """\
Current thread 0x00007ffa57c51b80 (most recent call first):
  File "/home/me/my script.py", line 7 in step
  File "/home/me/my script.py", line 10 in <module>
"""
FRAMES = ("/home/me/my script.py:7 in step", "/home/me/my script.py:10 in <module>")
ELSEWHERE = MAIN.replace("Current thread", "Thread")

WHOLE = {
    "one thread": MAIN,
    "main is last": THREAD + THREAD + MAIN,
    "another thread took the signal": THREAD.replace("Thread", "Current thread") + ELSEWHERE,
    "two dumps": THREAD + MAIN.replace("line 7", "line 99") + THREAD + MAIN,
    "3.12 in a collection": THREAD
    + MAIN.replace("call first):\n", "call first):\n  Garbage-collecting\n"),
    "3.13 without frames": "Thread 0x00007ffa566c16c0 (most recent call first):\n  <no Python frame>\n\n" + MAIN,
    "3.14 with names": THREAD.replace("16c0 (", "16c0 [data loader] (") + MAIN.replace("1b80 (", "1b80 [python] ("),
    "noise before": '\x00\xff garbage\n  File "x", line 1 in y\n' + MAIN,
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_the_main_thread_is_found(name: str) -> None:
    assert stacks.main_thread(WHOLE[name]) == FRAMES
    assert stacks.is_whole(WHOLE[name])


def test_python_dash_m_is_a_main_thread_too() -> None:
    text = (
        THREAD
        + MAIN
        + '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    )
    assert stacks.main_thread(text)[-1] == "<frozen runpy>:198 in _run_module_as_main"
    assert stacks.is_whole(text)


TORN = {
    "nothing": "",
    "binary": "\x00\x01\ufffd" * 1000,
    "only threads": THREAD + THREAD + "...\n",
    "within a header": THREAD + "Current thread 0x0000",
    "within a frame": THREAD + '  File "/a.py", line 1',
    "before the outermost frame": THREAD + MAIN.rpartition("  File")[0],
    "no frames": "Thread 0x00007ffa566c16c0 (most recent call first):\n",
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_dump_names_no_other_thread_as_the_main_one(name: str) -> None:
    assert stacks.main_thread(TORN[name]) == ()
    assert not stacks.is_whole(TORN[name])


def test_a_deep_stack_is_cut_where_the_interpreter_cuts_it() -> None:
    text = MAIN.splitlines()[0] + "\n" + '  File "/a.py", line 3 in deeper\n' * 100 + "  ...\n"
    assert stacks.main_thread(text) == ("/a.py:3 in deeper",) * 100
    assert not stacks.is_whole(text)  # another thread's could be cut too
    assert len(stacks.main_thread(text.replace("  ...\n", '  File "/a.py", line 3 in x\n' * 10**5 + "  ...\n"))) == 100


def test_a_crash_is_told_from_a_dump_on_request() -> None:
    crash = "Fatal Python error: Segmentation fault\n\n" + THREAD.replace("Thread", "Current thread") + ELSEWHERE
    assert stacks.crashed_thread(MAIN) == ()
    assert stacks.crashed_thread(MAIN + crash)[0] == "/lib/python3.11/threading.py:982 in run"
    more = "Current thread's C stack trace (most recent call first):\n  Binary file a, at f\n\nExtension modules: a.b\n"
    assert stacks.crashed_thread(crash + "\n" + more)[-1].endswith(" in _bootstrap")


def test_py_spy_is_read() -> None:
    text = (
        "Process 9890: python my train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        'Thread 9892 (idle): "Thread-1 (foo)"\n    wait (threading.py:327)\n'
        'Thread 9890 (active+gil): "MainThread"\n    Module.forward (my (odd) model.py:3)\n    native (lib.so)\n'
        "    <module> (train.py:6)\n"
    )
    expected = ("my (odd) model.py:3 in Module.forward", "lib.so in native", "train.py:6 in <module>")
    assert stacks.spied(text) == expected
    assert stacks.spied(text.replace(': "MainThread"', "")) == expected
    assert stacks.spied("Error: Permission denied (os error 1)\n") == ()
    assert stacks.spied("") == ()


# --- what a worker installs


def dumped(process_id: int, directory: Path) -> tuple[str, ...]:
    os.kill(process_id, dump.SIGNAL)
    file = directory / dump.FILE
    return stacks.main_thread(eventually(lambda: stacks.is_whole(file.read_text()) and file.read_text()))


@pytest.mark.parametrize(
    "body",
    [
        "ready(); time.sleep(60)",
        "lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
        "ready()\nwhile True: ctypes.PyDLL(None).sleep(60)",  # holds the GIL, so no Python code can run
        "ready()\nwhile True: pass",
        "for _ in 'abc': threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nready(); time.sleep(60)",
        "[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19, 32, 33)]; ready(); time.sleep(60)",
    ],
)
def test_a_worker_shows_its_stack_whatever_it_does(children: Children, body: str) -> None:  # noqa: F811
    process, directory = children.worker(body)
    for _ in range(2):
        frames = dumped(process.pid, directory)
        assert frames[-2].endswith(" in where_it_waits")
        (directory / dump.FILE).write_text("")
    assert process.poll() is None


def test_the_signal_is_no_signal_that_others_use() -> None:
    assert signal.SIGRTMIN < dump.SIGNAL < signal.SIGRTMAX
    assert all(each != dump.SIGNAL for each in signal.Signals)


def test_a_crash_leaves_its_stack(children: Children) -> None:  # noqa: F811
    process, directory = children.worker("ctypes.string_at(0)", until=False)
    assert process.wait(30) == -signal.SIGSEGV
    assert stacks.crashed_thread((directory / dump.FILE).read_text())[1].endswith(" in where_it_waits")
    assert not (directory / "stderr.log").read_text()


def test_the_users_own_faulthandler_is_kept(children: Children) -> None:  # noqa: F811
    process, directory = children.worker("ctypes.string_at(0)", "-X", "faulthandler", until=False)
    assert process.wait(30) == -signal.SIGSEGV
    assert "Segmentation fault" in (directory / "stderr.log").read_text()
    assert not (directory / dump.FILE).read_text()
    other, place = children.worker("ready(); time.sleep(60)", "-X", "faulthandler")
    assert dumped(other.pid, place)


def test_a_worker_runs_without_stacks_where_they_cant_be_written(children: Children) -> None:  # noqa: F811
    directory = children.directory()
    (directory / dump.FILE).mkdir()
    process, _ = children.worker("ready(); time.sleep(60)")
    assert not (1 << (dump.SIGNAL - 1)) & _caught(process.pid)


def test_a_dump_never_lands_in_a_file_of_the_users(children: Children) -> None:  # noqa: F811
    process, directory = children.worker(
        """
        os.closerange(3, 400)
        files = [open(directory / f"mine-{n}", "w") for n in range(20)]
        ready()
        time.sleep(60)
        """
    )
    assert dumped(process.pid, directory)
    assert all(not file.read_text() for file in directory.glob("mine-*"))


def test_a_low_limit_on_open_files_is_no_obstacle(children: Children) -> None:  # noqa: F811
    import resource

    directory = children.directory()
    program = "import sys, time; from pathlib import Path; from ftrun.session import stacks\n"
    program += "stacks.install(Path(sys.argv[1])); Path(sys.argv[1], 'ready').touch(); time.sleep(60)"
    process = children.start(
        sys.executable,
        "-c",
        program,
        directory,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    eventually((directory / "ready").exists)
    assert dumped(process.pid, directory)


def test_a_forked_child_that_crashes_leaves_the_parents_dump_whole(children: Children) -> None:  # noqa: F811
    process, directory = children.worker(
        """
        child = os.fork()
        if child == 0:
            ctypes.string_at(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11
        ready()
        time.sleep(60)
        """
    )
    before = (directory / dump.FILE).stat().st_size
    assert before
    os.kill(process.pid, dump.SIGNAL)
    text = eventually(lambda: stacks.is_whole(t := (directory / dump.FILE).read_text()[before:]) and t)
    assert stacks.main_thread(text)[-2].endswith(" in where_it_waits")
    assert "Fatal" not in text


def test_a_program_that_the_worker_becomes_does_not_take_the_signal(children: Children) -> None:  # noqa: F811
    process, _ = children.worker("ready(); os.execvp('sleep', ['sleep', '60'])", until=False)
    eventually(lambda: b"sleep\x0060" in _command(process.pid))
    assert not (1 << (dump.SIGNAL - 1)) & _caught(process.pid)


def _caught(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
