"""What workers write: into log files always, and onto the console as under torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import NO_COMPILER, Runner, eventually, kill_tree
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from ftrun.contract import WorkerContract
from ftrun.launch.logs import RunLogs
from ftrun.launch.output import pump as output_pump
from ftrun.launch.output import routes as output_routes
from ftrun.launch.output import source as output_source
from ftrun.launch.output.backlog import Backlog
from ftrun.launch.output.files import LogFile, name_also
from ftrun.launch.output.lines import AsWritten, Prefixed, View, WholeLines
from ftrun.launch.output.outlets import Outlets
from ftrun.launch.output.routes import Launcher, Route, Tee
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.launch.output.attempt import Output

FULL = Path("/dev/full")


# --- which way streams go


def routes_of(
    redirects: Std | dict[int, Std] | None = None,
    tee: Std | dict[int, Std] | None = None,
    *,
    show: set[int] | None = None,
    tmp: Path,
    only: set[int] | None = None,
    launcher: Launcher | None = None,
) -> dict[int, tuple[Route, ...]]:
    """Routes of two ranks, from torch's own reading of its options through ours."""
    specs = None
    if redirects is not None or tee is not None or only is not None:
        specs = DefaultLogsSpecs(str(tmp / "torch"), redirects or Std.NONE, tee or Std.NONE, only)
    logs, envs = run_logs(tmp, specs, show, ranks=2)
    destination = logs.reify(envs)
    return output_routes.settle(destination, directories(tmp, 2), Tee(), launcher or Launcher())


def run_logs(
    tmp: Path, specs: Any, show: set[int] | None, ranks: int, outlets: Outlets | None = None
) -> tuple[RunLogs, dict[int, dict[str, str]]]:
    run_dir = RunDir(tmp / "run")
    run_dir.attempts.mkdir(parents=True, exist_ok=True)
    logs = RunLogs(run_dir, specs, show, {"FROM_JOB": "1"}, outlets or Outlets(None, None, tmp))
    logs.begin(
        WorkerContract(str(run_dir.path), "r", "root", attempt=1, epoch=1, resume=None, node=0, worker_dir=""), starts=0
    )
    return logs, {rank: {"RANK": str(rank), "TORCHELASTIC_RUN_ID": "id"} for rank in range(ranks)}


def directories(tmp: Path, ranks: int) -> dict[int, Path]:
    return {rank: RunDir(tmp / "run").worker(1, 0, rank) for rank in range(ranks)}


def short(routes: tuple[Route, ...], tmp: Path) -> list[tuple[Any, ...]]:
    """Streams, whose file it is, number of further names, where it is shown, prefix."""
    return [
        (
            "+".join(each.streams),
            "own" if each.file.is_relative_to(tmp / "run") else "torch",
            len(each.links),
            each.outlet,
            each.prefix,
        )
        for each in routes
    ]


OWN = [("stdout", "own", 0, "stdout", None), ("stderr", "own", 0, "stderr", None)]
HIDDEN = [("stdout", "own", 0, None, None), ("stderr", "own", 0, None, None)]
REDIRECTED = [("stdout", "torch", 1, None, None), ("stderr", "torch", 1, None, None)]


def teed(rank: int) -> list[tuple[Any, ...]]:
    return [(each, "torch", 1, each, f"[default{rank}]:") for each in ("stdout", "stderr")]


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({}, OWN, OWN),
        ({"show": {0}}, OWN, HIDDEN),
        ({"show": set()}, HIDDEN, HIDDEN),
        ({"redirects": Std.NONE}, OWN, OWN),
        ({"redirects": Std.ALL}, REDIRECTED, REDIRECTED),
        ({"redirects": {1: Std.ALL}}, OWN, REDIRECTED),
        ({"redirects": Std.OUT}, [REDIRECTED[0], OWN[1]], [REDIRECTED[0], OWN[1]]),
        ({"redirects": Std.ERR, "show": {1}}, [HIDDEN[0], REDIRECTED[1]], [OWN[0], REDIRECTED[1]]),
        ({"tee": Std.ALL}, teed(0), teed(1)),
        ({"tee": {0: Std.ERR}}, [OWN[0], teed(0)[1]], OWN),
        ({"tee": Std.ALL, "only": {1}}, REDIRECTED, teed(1)),
        ({"only": {0}}, OWN, HIDDEN),
        ({"only": {0}, "redirects": Std.ERR}, [OWN[0], REDIRECTED[1]], [HIDDEN[0], REDIRECTED[1]]),
    ],
)
def test_each_stream_has_a_log_file_and_goes_where_torchrun_shows_it(
    tmp_path: Path, options: dict[str, Any], first: list[Any], second: list[Any]
) -> None:
    routes = routes_of(**options, tmp=tmp_path)
    assert [short(routes[rank], tmp_path) for rank in (0, 1)] == [first, second]


def test_streams_that_are_one_for_the_launcher_are_one_for_the_worker(tmp_path: Path) -> None:
    one = Launcher(out_terminal=True, err_terminal=True, one=True)
    routes = routes_of(show={0}, tmp=tmp_path, launcher=one)
    assert short(routes[0], tmp_path) == [("stdout+stderr", "own", 1, "stdout", None)]
    assert [each.terminal for each in (*routes[0], *routes[1])] == [True, False, False]
    assert short(routes[1], tmp_path) == HIDDEN
    mixed = routes_of({0: Std.ERR}, tmp=tmp_path, launcher=one)[0]
    assert short(mixed, tmp_path) == [OWN[0], REDIRECTED[1]]
    assert [each.terminal for each in mixed] == [True, False]


def test_a_terminal_is_what_the_launcher_has_there(tmp_path: Path) -> None:
    routes = routes_of(tmp=tmp_path, launcher=Launcher(err_terminal=True))
    assert [each.terminal for each in routes[1]] == [False, True]
    routes = routes_of(tee=Std.ALL, tmp=tmp_path, launcher=Launcher(out_terminal=True, err_terminal=True, one=True))
    assert [each.terminal for each in routes[1]] == [False, False]  # torch's tee is no terminal either


def test_prefixes_follow_torchs_template() -> None:
    assert Tee().prefix(3) == "[default3]:"
    assert Tee("trainer").prefix(0) == "[trainer0]:"
    assert Tee("trainer", {0: "<0> "}).prefix(0) == "<0> "
    assert Tee("trainer", {0: ""}).prefix(0) == ""


def test_the_environment_is_completed_and_the_job_files_variables_are_in_it(tmp_path: Path) -> None:
    logs, envs = run_logs(tmp_path, DefaultLogsSpecs(str(tmp_path / "torch"), Std.ALL), None, ranks=2)
    destination = logs.reify(envs)
    for rank, directory in directories(tmp_path, 2).items():
        assert envs[rank]["FROM_JOB"] == "1"
        contract = WorkerContract.from_environment(envs[rank])
        assert contract is not None
        assert contract.worker_dir == str(directory)
        error_file = Path(envs[rank]["TORCHELASTIC_ERROR_FILE"])
        assert str(error_file) == destination.error_files[rank]
        assert error_file.is_relative_to(tmp_path / "torch")
        error_file.write_text("{}")
        assert (directory / "error.json").read_text() == "{}"


def test_an_error_file_survives_the_directory_where_torchruns_options_put_it(tmp_path: Path) -> None:
    logs, envs = run_logs(tmp_path, DefaultLogsSpecs(str(tmp_path / "torch"), Std.ALL), None, ranks=2)
    output = logs.output(logs.reify(envs), Tee())
    Path(envs[1]["TORCHELASTIC_ERROR_FILE"]).write_text("{}")
    output.close()
    shutil.rmtree(tmp_path / "torch")
    assert (directories(tmp_path, 2)[1] / "error.json").read_text() == "{}"


# --- what the console shows of a stream


def shown(view: View, *pieces: bytes) -> list[bytes]:
    """What each piece brings onto the console, and what the end brings."""
    return [*(view.feed(piece) for piece in pieces), view.flush(final=True)]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], [b"one\ntwo\n", b""]),
        ([b"one\ntw", b"o\nthr"], [b"one\n", b"two\n", b"thr"]),
        ([b"\r 5%", b"\r10%", b"\r15%"], [b"\r", b" 5%\r", b"10%\r", b"15%"]),
        ([b"one\r", b"\ntwo"], [b"", b"one\r\n", b"two"]),
        ([b"x" * 70_000, b"y"], [b"x" * 70_000, b"", b"y"]),
        ([b"\xff\xfe\n\x00"], [b"\xff\xfe\n", b"\x00"]),
    ],
)
def test_several_ranks_are_shown_in_whole_lines(pieces: list[bytes], expected: list[bytes]) -> None:
    assert shown(WholeLines(), *pieces) == expected
    assert b"".join(shown(AsWritten(), *pieces)) == b"".join(pieces)
    assert shown(AsWritten(), *pieces)[:-1] == pieces


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], [b">one\n>two\n", b""]),
        ([b"on", b"e\n\nthr"], [b"", b">one\n>\n", b">thr"]),
        ([b"\r 5%", b"\r10%\r\n"], [b">\n", b"> 5%\n>10%\n", b""]),
        ([b"a\r", b"\nb\n"], [b"", b">a\n>b\n", b""]),
        ([b"caf\xc3", b"\xa9 \xff\n"], [b"", ">café �\n".encode(), b""]),
        ([b"torn \xc3"], [b"", ">torn �".encode()]),
    ],
)
def test_tee_shows_lines_as_torch_does(pieces: list[bytes], expected: list[bytes]) -> None:
    assert shown(Prefixed(">"), *pieces) == expected


@pytest.mark.parametrize("text", [b"a\nb\r\nc\rd", b"\n\n", b"x", "naïve \u2603\n".encode(), b"bad \xff\xfe\nend\n"])
def test_tee_agrees_with_torchs_own_tail(tmp_path: Path, text: bytes) -> None:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

    (tmp_path / "in").write_bytes(text)
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        TailLog("default", {0: str(tmp_path / "in")}, file, interval_sec=0.01).start().stop()
    assert b"".join(shown(Prefixed("[default0]:"), text)) == (tmp_path / "out").read_bytes()


def test_a_line_in_pieces_has_one_prefix_and_is_filtered_as_a_whole() -> None:
    view = Prefixed("[0]:", ("loss", "err"))
    assert view.feed(b"step 1 lo") == b""
    assert view.pending
    assert view.flush() == b"[0]:step 1 lo"
    assert not view.pending
    assert view.matches() == b""
    assert view.feed(b"ss 0.5\nother\nan err") == b"ss 0.5\n[0]:other\n"
    assert view.matches() == b"[0]:step 1 loss 0.5\n"
    assert view.flush(final=True) == b"[0]:an err"
    assert view.matches() == b"[0]:an err"


# --- files


def test_a_full_disk_leaves_a_gap_that_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    target = tmp_path / "log"
    log = LogFile(target, said.append)
    log.write(b"before\n")
    os.dup2(full := os.open(FULL, os.O_WRONLY), log._fd or -1)
    os.close(full)
    log.write(b"lost\n")
    log.write(b"lost too\n")
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert str(target) in said[0]
    os.dup2(good := os.open(target, os.O_WRONLY | os.O_APPEND), log._fd or -1)
    os.close(good)
    log.write(b"after\n")
    log.close()
    assert target.read_text() == ("before\n\n[ftrun: 14 bytes are missing here: No space left on device]\nafter\n")


def test_a_log_file_that_cant_be_made_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    blocked = tmp_path / "dir"
    blocked.write_text("")
    log = LogFile(blocked / "log", said.append)
    log.write(b"12345")
    assert len(said) == 1
    blocked.unlink()
    log.write(b"now\n")
    log.close()
    text = (tmp_path / "dir" / "log").read_text()
    assert "5 bytes are missing" in text
    assert text.endswith("now\n")


def test_a_further_name_keeps_the_file(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    name_also(file, other)
    assert not other.is_symlink()  # there is no file to name
    file.write_text("text")
    name_also(file, other)
    file.unlink()
    assert other.read_text() == "text"
    name_also(other, tmp_path / "b")
    assert other.read_text() == "text"


# --- a console that takes its time, or goes away


def test_a_backlog_keeps_order_through_memory_and_disk(tmp_path: Path) -> None:
    backlog = Backlog(tmp_path, in_memory=1000)
    pieces = [bytes([65 + number % 26]) * 300 for number in range(200)]
    for piece in pieces[:100]:
        backlog.put(piece)
    taken = [backlog.take() for _ in range(3)]
    for piece in pieces[100:]:
        backlog.put(piece)
    while backlog:
        taken.append(backlog.take())
    assert b"".join(taken) == b"".join(pieces)
    assert backlog.take() == b""
    assert list(tmp_path.iterdir()) == []
    backlog.close()


def test_a_backlog_without_room_says_what_it_dropped(tmp_path: Path) -> None:
    backlog = Backlog(tmp_path / "missing", in_memory=10)
    backlog.put(b"0123456789")
    backlog.put(b"abc")
    backlog.put(b"de")
    assert backlog.take() == b"0123456789"
    assert backlog
    assert backlog.take() == b"\n[ftrun: 5 bytes are not shown here]\n"
    assert not backlog


@dataclass
class Console:
    """Stands for the launcher's streams: what has been written to them so far."""

    out: int
    err: int | None
    ends: list[int]
    text: bytes = b""
    errors: bytes = b""
    outlets: list[Outlets] = field(default_factory=list)

    def read(self) -> bytes:
        """Everything on standard output so far (and on standard error, where that is the same)."""
        self.text += drain(self.ends[0])
        if len(self.ends) > 1:
            self.errors += drain(self.ends[1])
        return self.text


def drain(fd: int) -> bytes:
    pieces = []
    with contextlib.suppress(OSError):
        while select.select([fd], [], [], 0)[0]:
            piece = os.read(fd, 65536)
            if not piece:
                break
            pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture
def pipes() -> Iterator[Console]:
    """Two pipes, as in ``ftrun | a 2> >(b)``."""
    (read_out, out), (read_err, err) = os.pipe(), os.pipe()
    yield from closing(Console(out, err, [read_out, read_err]))


@pytest.fixture
def terminal() -> Iterator[Console]:
    """One terminal of 33 rows and 77 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    yield from closing(Console(theirs, None, [ours]))


def closing(console: Console) -> Iterator[Console]:
    yield console
    for outlets in console.outlets:
        outlets.close(0.0)
    for fd in {console.out, console.err, *console.ends} - {None}:
        with contextlib.suppress(OSError):
            os.close(fd)  # type: ignore[arg-type]


@dataclass
class Job:
    """Real processes with an Output of their own."""

    output: Output
    outlets: Outlets
    processes: list[subprocess.Popen[bytes]]
    tmp: Path

    def wait(self) -> None:
        for process in self.processes:
            process.wait(20)

    def settle(self) -> None:
        """All that has been written is in the files and on the console."""
        assert self.output.settle(10)
        self.outlets.flush(10)

    def end(self) -> None:
        """As the launcher does when all have ended."""
        self.wait()
        assert self.output.close(10)
        self.outlets.flush(10)

    def log(self, rank: int, stream: str = "stdout") -> bytes:
        return (directories(self.tmp, rank + 1)[rank] / f"{stream}.log").read_bytes()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def begin(
        console: Console, *programs: str, tee: Tee | None = None, specs: Any = None, show: set[int] | None = None
    ) -> Job:
        outlets = Outlets(console.out, console.err if console.err is not None else console.out, tmp_path)
        console.outlets.append(outlets)
        logs, envs = run_logs(tmp_path, specs, show, len(programs), outlets)
        output = logs.output(logs.reify(envs), tee or Tee())
        job = Job(output, outlets, [], tmp_path)
        jobs.append(job)
        for rank, program in enumerate(programs):
            out, err = output.open(rank)
            job.processes.append(
                subprocess.Popen(
                    [sys.executable, "-uc", program],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            )
        output.start()
        return job

    yield begin
    for job in jobs:
        for process in job.processes:
            kill_tree(process.pid)
            process.wait(10)
        job.output.close()


def test_all_that_a_worker_wrote_is_in_its_files_and_on_the_console(start: Any, pipes: Console) -> None:
    job = start(pipes, "import sys; print('to out'); print('to err', file=sys.stderr); print('last', end='')")
    job.end()
    assert pipes.read() == b"to out\nlast"
    assert pipes.errors == b"to err\n"
    assert (job.log(0), job.log(0, "stderr")) == (b"to out\nlast", b"to err\n")


def test_a_progress_bar_and_a_prompt_of_the_only_rank_are_there_at_once(start: Any, pipes: Console) -> None:
    job = start(pipes, "import time; print('\\r 50%', end=''); time.sleep(60)")
    eventually(lambda: pipes.read() == b"\r 50%", 20, "the bar")
    assert job.log(0) == b"\r 50%"


def test_lines_of_ranks_dont_mix_and_a_line_that_stands_is_shown(
    start: Any, pipes: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that gets no processor within a line for as long as is usual has that line shown in two pieces.
    monkeypatch.setattr(output_pump, "_HOLD", 600.0)
    program = (
        "import sys, time\n"
        "for i in range(400):\n"
        "    for part in ('<{0}', ' ' + str(i), ' {0}>\\n'): sys.stdout.write(part)\n"
        "print('{0} waits', end=''); time.sleep(60)\n"
    )
    job = start(pipes, program.format("a"), program.format("b"))
    eventually(lambda: pipes.read().count(b"\n") == 800, 60, "all lines")
    monkeypatch.setattr(output_pump, "_HOLD", 0.2)
    job.output._pump._ring()
    eventually(lambda: pipes.read().count(b"waits") == 2, 60, "lines without an end")
    text = pipes.text.decode().replace("a waits", "").replace("b waits", "")
    assert sorted(text.splitlines()) == sorted(f"<{name} {i} {name}>" for name in "ab" for i in range(400))
    assert job.log(1).count(b"\n") == 400


def test_a_line_that_never_ends_is_shown_while_it_grows(start: Any, pipes: Console) -> None:
    growing = "import time\nwhile True: print('.', end=''); time.sleep(0.01)"
    start(pipes, growing, "")
    eventually(lambda: b"...." in pipes.read(), 20, "the dots")


def test_a_rank_that_isnt_shown_has_its_log(start: Any, pipes: Console) -> None:
    job = start(pipes, "print('\\rshown', end='')", "print('hidden')", show={0})
    job.end()
    assert pipes.read() == b"\rshown"
    assert job.log(1) == b"hidden\n"


def test_a_lot_of_output_is_complete(start: Any, pipes: Console) -> None:
    job = start(pipes, "import sys\nfor i in range(100_000): sys.stdout.write(f'line {i}\\n')", show=set())
    job.end()
    assert job.log(0) == b"".join(b"line %d\n" % i for i in range(100_000))


def test_the_last_words_before_a_kill_are_kept(start: Any, pipes: Console) -> None:
    job = start(pipes, "import os, signal; os.write(2, b'w' * 50_000 + b'end'); os.kill(os.getpid(), signal.SIGKILL)")
    job.wait()
    job.settle()
    assert job.log(0, "stderr") == b"w" * 50_000 + b"end"
    pipes.read()
    assert pipes.errors == b"w" * 50_000 + b"end"


def test_settling_shows_what_a_living_rank_has_written(start: Any, pipes: Console, tmp_path: Path) -> None:
    written = tmp_path / "written"
    talker = f"import time; print('half a line', end=''); open({str(written)!r}, 'w').close(); time.sleep(60)"
    job = start(pipes, talker, "print('a line')")
    eventually(written.exists, 20, "the mark")
    job.settle()
    assert job.log(0) == b"half a line"
    assert b"half a line" in pipes.read()


def test_closing_waits_for_nobody_who_still_holds_the_stream(start: Any, pipes: Console) -> None:
    job = start(
        pipes,
        "import subprocess, sys; print('parent')\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)",
    )
    job.end()
    assert job.log(0) == b"parent\n"


@pytest.mark.skipif("filtered_stdout" not in LogsDest.__dataclass_fields__, reason="filters came with torch 2.10")
def test_tee_and_filters_of_torchrun(start: Any, pipes: Console, tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "torch"), Std.NONE, Std.OUT, {0, 1})
    program = "import sys; print('loss {0}'); print('other {0}'); print('err {0}', file=sys.stderr)"
    tee = Tee("trainer", stdout_filters=("loss",))
    job = start(pipes, *(program.format(rank) for rank in range(3)), tee=tee, specs=specs)
    job.end()
    lines = [f"[trainer{rank}]:{word} {rank}" for rank in (0, 1) for word in ("loss", "other")]
    assert sorted(pipes.read().decode().splitlines()) == sorted(lines)
    assert sorted(pipes.errors.decode().splitlines()) == ["err 0", "err 1"]
    (filtered,) = (tmp_path / "torch").rglob("filtered_stdout.log")
    assert sorted(filtered.read_text().splitlines()) == ["[trainer0]:loss 0", "[trainer1]:loss 1"]
    (torchs,) = (tmp_path / "torch").glob("*/attempt_0/2/stdout.log")
    assert torchs.read_bytes() == job.log(2) == b"loss 2\nother 2\n"
    assert job.log(2, "stderr") == b"err 2\n"


def test_a_reader_that_stands_still_holds_up_nobody(start: Any, pipes: Console) -> None:
    job = start(pipes, "import sys\nfor i in range(200_000): sys.stdout.write(f'line {i:020d}\\n')")
    job.wait()
    assert job.output.close(10)
    expected = b"".join(b"line %020d\n" % i for i in range(200_000))
    assert job.log(0) == expected
    eventually(lambda: len(pipes.read()) == len(expected), 20, "the rest")
    assert pipes.text == expected


def test_training_goes_on_when_nobody_reads_any_more(start: Any, pipes: Console) -> None:
    os.close(pipes.ends[0])
    pipes.ends[0] = os.open(os.devnull, os.O_RDONLY)
    job = start(pipes, "for i in range(20_000): print('line', i)\nprint('done')")
    job.wait()
    assert job.output.close(20)
    assert job.processes[0].returncode == 0
    assert job.log(0).endswith(b"done\n")
    job.outlets.flush(20)
    pipes.read()
    assert b"nobody reads standard output (Broken pipe)" in pipes.errors


def test_training_survives_a_full_disk_under_its_log(start: Any, pipes: Console, tmp_path: Path) -> None:
    directory = directories(tmp_path, 1)[0]
    directory.mkdir(parents=True)
    (directory / "stdout.log").symlink_to(FULL)
    job = start(pipes, "for i in range(1000): print('line', i)")
    job.end()
    assert job.processes[0].returncode == 0
    assert pipes.read().count(b"\n") == 1000
    assert pipes.errors.count(b"can't be written: No space left on device") == 1


def test_a_console_on_a_full_disk_kills_nobody(start: Any, pipes: Console) -> None:
    full = os.open(FULL, os.O_WRONLY)
    job = start(Console(full, pipes.err, pipes.ends), "for i in range(1000): print('line', i)")
    job.end()
    os.close(full)
    assert job.processes[0].returncode == 0
    assert job.log(0).count(b"\n") == 1000


# --- terminals

ASK = """
import os, sys, time
print([os.isatty(fd) for fd in (1, 2)], os.get_terminal_size(1), os.get_terminal_size(2))
"""


def test_on_a_terminal_a_worker_finds_a_terminal_of_that_size(start: Any, terminal: Console) -> None:
    job = start(
        terminal,
        # Looked at before the first line, which is the sign to change it.
        "import os\nbefore = os.get_terminal_size(1)\n"
        + ASK
        + "while os.get_terminal_size(1) == before: time.sleep(0.01)\n"
        "print('now', os.get_terminal_size(2))",
    )
    eventually(lambda: b"\n" in terminal.read(), 20, "the first line")
    fcntl.ioctl(terminal.ends[0], termios.TIOCSWINSZ, struct.pack("HHHH", 44, 99, 0, 0))
    job.end()
    text = terminal.read().decode()
    size = "os.terminal_size(columns=77, lines=33)"
    assert text.startswith(f"[True, True] {size} {size}\r\n")
    assert "now os.terminal_size(columns=99, lines=44)" in text
    assert job.log(0) == text.replace("\r\n", "\n").encode()  # the bytes as the worker wrote them


def test_on_a_terminal_the_two_streams_keep_their_order(start: Any, terminal: Console) -> None:
    job = start(terminal, "import os\nfor i in range(500): os.write(1 + i % 2, b'%d ' % i)")
    job.end()
    expected = b"".join(b"%d " % i for i in range(500))
    assert terminal.read() == expected
    assert job.log(0) == job.log(0, "stderr") == expected


def test_a_worker_that_reads_the_keyboard_from_its_output_gets_an_error(start: Any, terminal: Console) -> None:
    job = start(terminal, "import os\ntry: os.read(2, 1)\nexcept OSError as e: print(e.strerror)")
    job.end()
    assert job.log(0) == b"Bad file descriptor\n"


def test_a_terminal_end_gives_all_that_was_written_before_it_closed() -> None:
    ours, theirs = os.openpty()
    source = output_source.terminal(theirs)
    os.write(source.writer, b"last words\n")
    source.release()
    assert source.read() == b"last words\n"
    assert source.ended
    source.close()
    os.close(ours)
    os.close(theirs)


def test_a_launcher_without_streams_still_has_logs(tmp_path: Path) -> None:
    outlets = Outlets(None, None, tmp_path)
    outlets.say("nobody hears this")
    assert outlets.launcher == Launcher()
    assert outlets.get("stdout") is None
    outlets.close()


def test_what_the_launcher_says_is_in_order_with_what_workers_say(start: Any, terminal: Console) -> None:
    job = start(terminal, "print('a worker')")
    job.wait()
    assert job.output.settle(10)
    assert job.outlets.err is not None
    file = job.outlets.err.as_text()
    assert file.isatty()
    file.write("the launcher\n")
    assert job.outlets.flush(10)
    assert terminal.read() == b"a worker\r\nthe launcher\r\n"


# --- the whole launcher


@dataclass
class Seat:
    """Somebody at a terminal who has typed a command: the terminal controls the command's session."""

    process: subprocess.Popen[bytes]
    ours: int
    text: bytes = b""

    def sees(self, what: str, timeout: float = 60.0) -> None:
        eventually(lambda: what.encode() in self._read(), timeout, f"{what!r} after\n{self.text.decode()}\n")

    def _read(self) -> bytes:
        self.text += drain(self.ours)
        return self.text

    def types(self, what: str) -> None:
        os.write(self.ours, what.encode())

    def wait(self, timeout: float = 60.0) -> int:
        eventually(lambda: (self._read(), self.process.poll() is not None)[1], timeout, "the end")
        self._read()
        return self.process.returncode


TAKE_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "ftrun", *sys.argv[1:]])
"""


@pytest.fixture
def sit_down(tmp_path: Path) -> Iterator[Any]:
    seats: list[Seat] = []

    def begin(*arguments: str | Path) -> Seat:
        ours, theirs = os.openpty()

        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        process = subprocess.Popen(
            [sys.executable, "-c", TAKE_THE_TERMINAL, *map(str, arguments)],
            cwd=tmp_path,
            env=environment | {"NO_COLOR": "1", "TERM": "xterm", "PYTHONPATH": str(NO_COMPILER)},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        seats.append(Seat(process, ours))
        return seats[-1]

    yield begin
    for seat in seats:
        kill_tree(seat.process.pid)
        seat.process.wait(10)
        os.close(seat.ours)


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_breakpoint_works_at_a_terminal(sit_down: Any, tmp_path: Path) -> None:
    seat = sit_down(
        "--nproc", "1", "--name", "b", script(tmp_path, "answer = 6 * 7\nbreakpoint()\nprint('went on', answer)\n")
    )
    seat.sees("(Pdb) ")
    seat.types("p answer + 1\n")
    seat.sees("43")
    seat.types("import pydoc; pydoc.help(len)\n")
    seat.sees("number of items")  # and no pager that waits for keys
    seat.types("answer = 5\n")
    seat.types("c\n")
    assert seat.wait() == 0
    assert b"went on 5" in seat.text
    assert b"(Pdb) " in (RunDir(tmp_path / "runs/b").worker(1, 0, 0) / "stdout.log").read_bytes()


@pytest.mark.slow
def test_a_progress_bar_moves_at_a_terminal_and_ctrl_c_reaches_the_launcher(sit_down: Any, tmp_path: Path) -> None:
    bar = (
        "import sys, time, signal, os\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('worker got SIGINT from', os.getpid()), sys.exit(1)))\n"
        "print(sys.stdout.isatty(), sys.stdin.isatty())\n"
        "i = 0\n"
        "while True:\n"
        "    i += 1; sys.stderr.write(f'\\r{i:3d}%'); sys.stderr.flush(); time.sleep(0.05)\n"
    )
    seat = sit_down("--nproc", "1", "--name", "bar", script(tmp_path, bar))
    seat.sees("True True")
    seat.sees("\r  3%")
    seat.sees("\r 10%")
    seat.types("\x03")
    assert seat.wait() == 128 + signal.SIGINT
    assert seat.text.count(b"worker got SIGINT") == 1


@pytest.mark.slow
def test_a_restart_keeps_the_logs_of_every_attempt(runner: Runner) -> None:
    failing = script(
        runner.cwd,
        "import os, sys, time\n"
        "attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], int(os.environ['RANK'])\n"
        "print('attempt', attempt)\n"
        "open(f'{attempt}-{rank}', 'w').close()\n"
        "while not os.path.exists(f'{attempt}-{1 - rank}'): time.sleep(0.01)\n"
        "sys.exit(3)\n",
    )
    options = ("--max-restarts", "1", "--log-dir", "D", "--redirects", "1")
    result = runner.run("--nproc", "2", "--name", "r", *options, failing)
    assert result.code == 3, result
    for attempt in (1, 2):
        for rank in (0, 1):
            log = runner.run_dir("r").worker(attempt, 0, rank) / "stdout.log"
            assert log.read_text() == f"attempt {attempt - 1}\n"
    assert len(list((runner.cwd / "D").rglob("stdout.log"))) == 4


@pytest.mark.slow
def test_the_last_words_come_before_the_launchers(runner: Runner) -> None:
    dying = script(runner.cwd, "import os\nos.write(2, b'x\\n' * 20_000 + b'LAST WORDS\\n')\nos.abort()\n")
    result = runner.run("--nproc", "2", "--name", "l", "--max-restarts", "0", dying)
    assert result.err.count("LAST WORDS") >= 1, result
    # It says so when it couldn't wait for them any longer: its thread may have got no processor.
    late = "the end of this attempt's output may be missing" in result.err
    assert late or result.err.index("LAST WORDS") < result.err.index("attempt 1 failed"), result.err[-2000:]


@pytest.mark.slow
def test_a_pager_that_stands_still_does_not_hold_up_training(runner: Runner) -> None:
    done = runner.cwd / "done"
    chatty = script(runner.cwd, f"for i in range(100_000): print('line', i)\nopen({str(done)!r}, 'w').close()\n")
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ftrun", "--nproc", "1", "--name", "p", str(chatty)],
        cwd=runner.cwd,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(writer)
    try:
        eventually(done.exists, 60, "the end of training")
        with open(reader, "rb") as file:
            assert file.read() == b"".join(b"line %d\n" % i for i in range(100_000))
        assert process.wait(30) == 0
    finally:
        kill_tree(process.pid)
        process.wait(10)
