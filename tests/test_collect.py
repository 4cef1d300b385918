from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from evidence_kit import (  # children is a fixture
    Children,
    children,  # noqa: F401
    compiled,
    in_state,
    rank_of,
    takes_no_signal,
)

from ftrun import dump, pulse
from ftrun.launch.evidence import cgroup, process_state, pyspy
from ftrun.launch.evidence import collect as collecting
from ftrun.launch.evidence.collect import Collector, LiveRank, Sources
from ftrun.launch.evidence.kernel_log import KernelLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.launch.evidence.model import Evidence, RankEvidence


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are seconds there are many: a machine that stands still for a few is no rank that gives no answer."""
    monkeypatch.setattr(collecting, "_HANG", replace(collecting._HANG, dumps=60.0, settle=60.0, spies=60.0))


def collect(*ranks: LiveRank, thorough: bool = True, py_spy: str | None = None) -> Sequence[RankEvidence]:
    collector = Collector(Sources(kernel=KernelLog(Path("/nowhere")), memory=None, py_spy=py_spy))
    collector.baseline()
    evidence = collector.collect(ranks, 1000.0, thorough=thorough)
    assert [each.rank for each in evidence.ranks] == [each.rank for each in ranks]
    return evidence.ranks


# --- processes in every state


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("ready(); time.sleep(60)", "S"),
        ("lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()", "S"),
        ("ready()\nwhile True: ctypes.PyDLL(None).sleep(60)", "S"),
        ("ready()\nwhile True: pass", "R"),
        ("[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 10, 12, 15)]; ready(); time.sleep(60)", "S"),
    ],
)
def test_a_living_rank_tells_where_it_is(children: Children, body: str, state: str, thorough: bool) -> None:  # noqa: F811
    process, directory = children.worker(body)
    in_state(process.pid, state)
    # In a hurry the answer may come too late, on a machine that has no time for it.
    rank = eventually(lambda: (found := collect(rank_of(process, directory), thorough=thorough)[0]).stack and found)
    assert (rank.pid, rank.exit_code, rank.exited_at) == (process.pid, None, 0.0)
    assert rank.state in (state, "R")
    assert rank.stack[-2].endswith(" in where_it_waits")
    assert bool(rank.waits_in) == (rank.state == "S")
    assert process.poll() is None


def test_a_stopped_rank_stays_stopped_and_holds_nobody_up(children: Children) -> None:  # noqa: F811
    stopped, first = children.worker("ready(); time.sleep(60)")
    os.kill(stopped.pid, signal.SIGSTOP)
    in_state(stopped.pid, "T")
    running, second = children.worker("ready(); time.sleep(60)")
    still, alive = collect(rank_of(stopped, first), rank_of(running, second, 1))
    assert (still.state, still.stack) == ("T", ())
    assert alive.stack
    assert process_state.letter(stopped.pid) == "T"
    os.kill(stopped.pid, signal.SIGCONT)
    in_state(stopped.pid, "S")
    assert not (first / dump.FILE).read_text()  # no signal was left behind for it


def test_a_rank_that_is_stuck_in_the_kernel_is_said_to_be(children: Children, tmp_path: Path) -> None:  # noqa: F811
    # The parent of a vfork waits uninterruptibly until the child is done.
    source = "#include <unistd.h>\nvoid stick(void) { if (vfork() == 0) { for (;;) pause(); } }\n"
    library = compiled(source, tmp_path / "stick.so", "-shared", "-fPIC")
    process, directory = children.worker(f"ready(); ctypes.CDLL({str(library)!r}).stick()")
    in_state(process.pid, "D")
    (rank,) = collect(rank_of(process, directory))
    assert (rank.state, rank.stack) == ("D", ())
    assert rank.waits_in


def test_a_dead_rank_that_nobody_has_seen_yet(children: Children) -> None:  # noqa: F811
    process, directory = children.worker("pass", until=False)
    in_state(process.pid, "Z")
    (rank,) = collect(rank_of(process, directory))
    assert (rank.state, rank.stack, rank.exit_code) == ("Z", (), None)


def test_a_rank_that_has_vanished(children: Children) -> None:  # noqa: F811
    process, directory = children.worker("pass", until=False)
    process.wait(30)
    (rank,) = collect(rank_of(process, directory / "not-there"))
    assert (rank.state, rank.waits_in, rank.stack, rank.beat, rank.error, rank.last_lines) == (
        "",
        "",
        (),
        None,
        None,
        (),
    )


def test_a_program_without_our_handler_is_not_killed_by_the_question(children: Children) -> None:  # noqa: F811
    sleeper = children.start("sleep", "60")
    python = children.start(sys.executable, "-c", "import time; time.sleep(60)")
    for process in (sleeper, python):
        in_state(process.pid, "S")
        (rank,) = collect(rank_of(process, children.path / "r00000"))
        assert (rank.state, rank.stack) == ("S", ())
        takes_no_signal(process.pid)
        assert process.poll() is None


def test_a_rank_that_dies_while_it_is_asked(children: Children) -> None:  # noqa: F811
    # Its handler is there by the kernel's word, and leaves no dump: it ends the process.
    process, directory = children.worker(
        "faulthandler.unregister(45); signal.signal(45, lambda *_: os._exit(3)); ready(); time.sleep(60)"
    )
    in_state(process.pid, "S")  # it says that it is ready a moment before it sleeps
    (rank,) = collect(rank_of(process, directory))
    assert (rank.state, rank.stack) == ("S", ())
    assert process.wait(60) == 3


def test_a_crash_shows_where(children: Children) -> None:  # noqa: F811
    process, directory = children.worker("ctypes.string_at(0)", until=False)
    code = process.wait(30)
    (rank,) = collect(rank_of(process, directory, exit_code=code), thorough=False)
    assert (rank.exit_code, rank.exited_at, rank.state) == (-signal.SIGSEGV, 1000.25, "")
    assert rank.stack[1].endswith(" in where_it_waits")
    # The same file may tell of a child's crash: it isn't where this rank was when it was killed.
    assert collect(rank_of(process, directory, exit_code=-signal.SIGKILL))[0].stack == ()


# --- files in every state


def lone(tmp_path: Path) -> LiveRank:
    return LiveRank(3, 1, 0, 1, 1000.5, tmp_path)


def test_what_a_rank_left_is_read(tmp_path: Path) -> None:
    pulse.create(tmp_path / "pulse")
    page = pulse.Pulse(tmp_path / "pulse")
    page.own(base=5, total=10)
    page.step(6)
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "ValueError: no", "extraInfo": {}}}))
    (tmp_path / "stderr.log").write_text(
        "one\n\n 0%|   |\r50%|## |\rdone|###|\n\x1b[31mred\x1b[0m\n" + "x" * 9999 + "\n"
    )
    (rank,) = collect(lone(tmp_path))
    assert rank.beat is not None
    assert rank.beat.step == 6
    assert rank.error is not None
    assert rank.error.message == "ValueError: no"
    assert rank.last_lines[:3] == ("one", "done|###|", "red")
    assert len(rank.last_lines[3]) < 1000


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00" * 100, b"[" * 10**6, b"x" * (9 << 20), b'{"message": 3}'])
def test_broken_error_files_are_evidence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "error.json").write_bytes(content)
    (rank,) = collect(lone(tmp_path))
    assert rank.error is not None
    assert rank.error.message == f"unreadable error file ({len(content)} bytes)"


@pytest.mark.parametrize("content", [b"\x00\xff\x1b" * 10**6, b"\r" * 10**6, b"x" * (9 << 20), b"\n" * 10**6])
def test_broken_logs_are_bounded(tmp_path: Path, content: bytes) -> None:
    for name in ("stderr.log", dump.FILE, "pulse"):
        (tmp_path / name).write_bytes(content)
    (rank,) = collect(LiveRank(0, 0, 0, -signal.SIGSEGV, 1.0, tmp_path))
    assert len(rank.last_lines) <= 30
    assert sum(map(len, rank.last_lines)) < 20_000
    assert not any(set(line) & {"\x00", "\x1b", "\n", "\r"} for line in rank.last_lines)
    assert (rank.stack, rank.beat) == ((), None)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stderr.log")
    (tmp_path / dump.FILE).mkdir()
    (rank,) = collect(LiveRank(0, 0, 0, -signal.SIGSEGV, 1.0, tmp_path))
    assert (rank.stack, rank.last_lines) == ((), ())


# --- py-spy


def test_py_spy_sees_what_does_not_answer(children: Children, tmp_path: Path) -> None:  # noqa: F811
    program = tmp_path / "spy"
    program.write_text(
        '#!/bin/sh\necho "Thread $5 (idle): \\"MainThread\\""; echo "    f (a.py:1)"; echo $@ > $0.args\n'
    )
    program.chmod(0o755)
    process = children.start("sleep", "60")
    (rank,) = collect(rank_of(process, children.path / "r00000"), py_spy=str(program))
    assert rank.stack == ("a.py:1 in f",)
    options = ["dump", "--nonblocking", "--full-filenames"]
    assert (tmp_path / "spy.args").read_text().split() == [*options, "--pid", str(process.pid)]
    (rank,) = collect(rank_of(process, children.path / "r00000"), py_spy=str(program), thorough=False)
    assert rank.stack == ()


def test_a_py_spy_that_hangs_is_ended(
    children: Children,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collecting, "_HANG", replace(collecting._HANG, spies=1.0))
    program = tmp_path / "spy"
    program.write_text("#!/bin/sh\necho $$ > $0.pid; exec sleep 60\n")
    program.chmod(0o755)
    process, directory = children.worker("ready(); time.sleep(60)")
    said = tmp_path / "spy.pid"

    def seen() -> bool:
        (rank,) = collect(rank_of(process, directory), py_spy=str(program))
        assert rank.stack
        return said.exists() and said.read_text() != ""

    eventually(seen, what="one that began within its second")
    # What is killed and gets no processor for it is left to the interpreter.
    eventually(lambda: process_state.letter(int(said.read_text())) in ("", "Z"), what="its end")


def test_a_py_spy_that_cant_be_started(children: Children) -> None:  # noqa: F811
    process, directory = children.worker("ready(); time.sleep(60)")
    assert collect(rank_of(process, directory), py_spy="/nowhere/py-spy")[0].stack


def test_the_real_py_spy(children: Children) -> None:  # noqa: F811
    program = pyspy.find()
    if program is None:
        pytest.skip("py-spy isn't installed")
    process, directory = children.worker("ready(); time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    in_state(process.pid, "T")
    (rank,) = collect(rank_of(process, directory), py_spy=program)
    if "MainThread" not in (directory / pyspy.FILE).read_text():
        pytest.skip("py-spy may not read other processes here")
    assert rank.state == "T"
    assert any(frame.endswith(" in where_it_waits") for frame in rank.stack)


# --- memory


V1 = ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n")
V2 = ("memory.events", "low 0\nhigh 0\nmax 4\noom 2\noom_kill {}\noom_group_kill 0\n")


@pytest.mark.parametrize(("version", "file"), [(1, V1), (2, V2)])
def test_kills_for_memory_are_counted_from_the_attempts_start(
    tmp_path: Path, version: int, file: tuple[str, str]
) -> None:
    name, text = file
    (tmp_path / name).write_text(text.format(7))
    collector = Collector(Sources(kernel=KernelLog(Path("/nowhere")), memory=cgroup.MemoryGroup(tmp_path, version)))
    collector.baseline()
    assert collector.collect([], 0.0, thorough=False).oom_kills == 0
    (tmp_path / name).write_text(text.format(9))
    assert collector.collect([], 0.0, thorough=False).oom_kills == 2
    collector.baseline()
    (tmp_path / name).write_text("oom_kill nonsense\n")
    assert collector.collect([], 0.0, thorough=False).oom_kills == 0
    (tmp_path / name).unlink()
    assert collector.collect([], 0.0, thorough=False).oom_kills == 0


def test_how_full_the_group_is(tmp_path: Path) -> None:
    for name, text in {
        "memory.events": "max 2\noom_kill 0\n",
        "memory.current": "1500000000\n",
        "memory.max": "2000000000\n",
    }.items():
        (tmp_path / name).write_text(text)
    collector = Collector(Sources(kernel=KernelLog(Path("/nowhere")), memory=cgroup.MemoryGroup(tmp_path, 2)))
    collector.baseline()

    def told() -> str:
        return collector.collect([], 0.0, thorough=False).memory

    assert told() == "the control group uses 1.50 GB of memory, with a limit of 2.00 GB"
    (tmp_path / "memory.events").write_text("max 5\noom_kill 0\n")
    assert told().endswith(", hit 3 times in this attempt")
    (tmp_path / "memory.max").write_text("max\n")
    assert told() == "the control group uses 1.50 GB of memory, with no limit"
    (tmp_path / "memory.current").unlink()
    assert told() == ""
    collector = Collector(Sources(kernel=KernelLog(Path("/nowhere")), memory=None))
    assert told() == ""


@pytest.mark.parametrize(
    ("membership", "mount", "version", "inside"),
    [
        ("4:memory:/a/b\n0::/\n", "35 31 0:32 / {root} rw - cgroup cgroup rw,memory", 1, "a/b"),
        ("4:cpu,memory:/a/b\n", "35 31 0:32 / {root} rw shared:9 - cgroup cgroup rw,cpu,memory", 1, "a/b"),
        # Docker under v1: the path is the host's, and what is mounted is the group itself.
        ("4:memory:/docker/ab\n", "35 31 0:32 /docker/ab {root} ro - cgroup cgroup rw,memory", 1, ""),
        ("0::/user.slice/x\n", "35 31 0:32 / {root} rw - cgroup2 cgroup2 rw", 2, "user.slice/x"),
        ("0::/\n", "35 31 0:32 / {root} rw - cgroup2 cgroup2 rw", 2, ""),
        # The path says more than what is mounted.
        ("0::/../../host/path\n", "35 31 0:32 / {root} rw - cgroup2 cgroup2 rw", 2, ""),
    ],
)
def test_the_control_group_is_found(tmp_path: Path, membership: str, mount: str, version: int, inside: str) -> None:
    root = tmp_path / "with space"
    (root / inside).mkdir(parents=True)
    (root / inside / (V1 if version == 1 else V2)[0]).write_text("oom_kill 3\n")
    (tmp_path / "cgroup").write_text(membership)
    escaped = str(root).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"1 0 0:1 / /proc rw - proc proc rw\nnonsense\n{mount.format(root=escaped)}\n")
    group = cgroup.find(tmp_path / "cgroup", tmp_path / "mounts")
    assert group == cgroup.MemoryGroup(root / inside, version)
    assert group.read().oom_kills == 3


def test_a_group_without_the_controller_is_accounted_for_above(tmp_path: Path) -> None:
    (tmp_path / "top/leaf").mkdir(parents=True)
    (tmp_path / "top/memory.events").write_text("oom_kill 1\n")
    (tmp_path / "cgroup").write_text("0::/top/leaf\n")
    (tmp_path / "mounts").write_text(f"35 31 0:32 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    assert cgroup.find(tmp_path / "cgroup", tmp_path / "mounts") == cgroup.MemoryGroup(tmp_path / "top", 2)


@pytest.mark.parametrize("membership", ["", "nonsense\n", "0::/\n", "4:memory:/\n"])
def test_no_control_group_is_no_error(tmp_path: Path, membership: str) -> None:
    (tmp_path / "cgroup").write_text(membership)
    assert cgroup.find(tmp_path / "cgroup", tmp_path / "mounts") is None
    (tmp_path / "mounts").write_text("1 0 0:1 / /sys rw - cgroup cgroup rw,cpu\n")
    assert cgroup.find(tmp_path / "cgroup", tmp_path / "mounts") is None


def test_a_real_kill_for_memory(children: Children) -> None:  # noqa: F811
    """A rank in a small control group of its own takes more than that allows, and the kernel kills it."""
    group = small_group(64 << 20)
    try:
        collector = Collector(Sources(kernel=KernelLog(), memory=group))
        collector.baseline()
        process, directory = children.worker(
            f"Path({str(group.directory / 'cgroup.procs')!r}).write_text(str(os.getpid())); keep = b'x' * (512 << 20)",
            until=False,
        )
        code = process.wait(60)
        assert code == -signal.SIGKILL

        def said() -> bool:
            ended = rank_of(process, directory, exit_code=code)
            evidence = collector.collect([ended], time.time(), thorough=False)
            assert evidence.oom_kills == 1
            return any(f"Killed process {process.pid} " in line for line in evidence.kernel)

        if not said() and can_read_kernel_log():
            eventually(said, what="the kernel's word")  # what it has no time left to read comes at the next look
        collector.close()
    finally:
        eventually(lambda: removed(group.directory), what="the end of the control group")


def small_group(limit: int) -> cgroup.MemoryGroup:
    """A control group with a limit on memory below the test's own, or a skip."""
    own = cgroup.find()
    if own is None:
        pytest.skip("no memory controller to be seen")
    directory = own.directory / f"ftrun-test-{os.getpid()}"
    try:
        directory.mkdir()
        (directory / ("memory.limit_in_bytes" if own.version == 1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        removed(directory)
        pytest.skip(f"no control group can be made below {own.directory}: {error.strerror}")
    return cgroup.MemoryGroup(directory, own.version)


def removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def can_read_kernel_log() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


# --- all of it together


def test_a_group_with_a_dead_rank(children: Children, tmp_path: Path) -> None:  # noqa: F811
    log = tmp_path / "kernel.log"
    log.write_text("[1.0] Out of memory: Killed process 1 (old)\n")
    collector = Collector(Sources.of_this_host({"FTRUN_KMSG": str(log)}, node=2))
    collector.baseline()
    dead, first = children.worker("sys.exit(3)", until=False)
    living, second = children.worker("ready(); time.sleep(60)")
    code = dead.wait(30)
    with log.open("a") as file:
        file.write("[2.0] NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.\n[2.1] usb 1-1: new device\n")
    evidence: Evidence = collector.collect(
        [rank_of(dead, first, 0, code), rank_of(living, second, 1)], 1234.5, thorough=True
    )
    assert (evidence.node, evidence.time, evidence.hang) == (2, 1234.5, None)
    assert evidence.host
    assert evidence.kernel == ("NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.",)
    assert [each.exit_code for each in evidence.ranks] == [3, None]
    assert [bool(each.stack) for each in evidence.ranks] == [False, True]
    assert subprocess.Popen.poll(living) is None
