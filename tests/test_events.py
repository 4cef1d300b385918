"""What happened, how far it is, and where it is kept: events, the pulse page and the run directory."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
from conftest import eventually
from hypothesis import given
from hypothesis import strategies as st

from ftrun import events, pulse, rundir
from ftrun.contract import Every, Fault, WorkerContract
from ftrun.errors import RunDirError
from ftrun.pulse import Phase, Pulse
from ftrun.rundir import RunDir

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

# --- events


def made_by(kind: type[events.Event]) -> st.SearchStrategy[events.Event]:
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    return st.builds(kind, **{name: _of(hints[name]) for name in names})


def _of(hint: object) -> st.SearchStrategy[object]:
    finite = st.floats(allow_nan=False, allow_infinity=False)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=5), _of(typing.get_args(hint)[1]), max_size=3)
    if typing.get_origin(hint) is list:
        return st.lists(_of(typing.get_args(hint)[0]), max_size=3)
    if hint is float:
        return finite
    if hint in (int | None, str | None, float | None):
        return st.none() | _of(typing.get_args(hint)[0])
    return {int: st.integers(), str: st.text(), bool: st.booleans(), typing.Any: st.text()}[hint]


@given(
    st.sampled_from(sorted(events.KINDS)).flatmap(lambda kind: made_by(events.KINDS[kind])),
    st.integers(0, 10**16).map(lambda microseconds: microseconds / 1e6),
    st.integers(0, 10**6),
    st.none() | st.integers(0, 10**6),
)
def test_every_event_comes_back(event: events.Event, at: float, attempt: int, rank: int | None) -> None:
    line = events.encode(event, at, attempt, rank)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert events.decode(line) == events.Record(at, attempt, rank, event)
    assert json.loads(line)["v"] == events.SCHEMA_VERSION
    assert not set(json.loads(line)).intersection({"time", "event"})


def test_the_head_of_a_line_is_never_taken_by_a_field() -> None:
    for kind in events.KINDS.values():
        assert not {each.name for each in dataclasses.fields(kind)} & {"v", "t", "kind", "attempt", "rank"}


def test_numbers_that_json_lacks_become_null() -> None:
    event = events.Step(3, {"loss": float("nan"), "a": float("inf"), "b": -float("inf"), "c": 1.5})
    record = events.decode(events.encode(event, 1.0, 1, 0))
    assert record is not None
    assert record.event.metrics == {"loss": None, "a": None, "b": None, "c": 1.5}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"3",
        b'"text"',
        b"[]",
        b"{}",
        b'{"kind":"step","t":1.0,"att',
        b"\xff\xfe\x00",
        b'{"kind":"of a later version","t":1,"attempt":1,"rank":0}',
        b'{"kind":["step"],"t":1,"attempt":1,"rank":0}',
        b'{"kind":"step","t":1,"attempt":1,"rank":0}',  # a step without its number
        b'{"kind":"step","step":1,"attempt":1,"rank":0}',  # without its time
        b'{"kind":"step","step":1,"t":"noon","attempt":1,"rank":0}',
        b'{"kind":"step","step":1,"t":1,"attempt":null,"rank":0}',
        b'{"kind":"step","step":1,"t":1,"attempt":Infinity,"rank":0}',
        b'{"kind":' + b"[" * 100_000,
    ],
    ids=lambda line: repr(line[:40]),
)
def test_lines_that_say_nothing(line: bytes) -> None:
    assert events.decode(line) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_an_event_or_nothing(line: bytes) -> None:
    record = events.decode(line)
    assert record is None or isinstance(record.event, events.Event)


def test_fields_of_a_later_version_are_passed_over() -> None:
    line = b'{"v":9,"t":2,"kind":"step","attempt":1,"rank":0,"step":4,"weather":"fine"}'
    assert events.decode(line) == events.Record(2.0, 1, 0, events.Step(4))


def test_reading_leaves_out_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = [events.encode(events.Step(step), float(step), 1, 0) for step in (1, 2, 3)]
    path.write_bytes(good[0] + good[1][:20] + b"\n" + b"\0\0\n\n" + good[2] + good[0][:-9])
    assert [record.event for record in events.read(path)] == [events.Step(1), events.Step(3)]
    assert list(events.read(tmp_path / "none.jsonl")) == []


def test_a_log_says_when_and_who(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = time.time()
    events.EventLog(path, attempt=3, rank=5).write(events.Step(1))
    events.EventLog(path).write(events.RunEnded("finished", 0))
    worker, agent = events.read(path)
    assert (worker.attempt, worker.rank) == (3, 5)
    assert (agent.attempt, agent.rank) == (0, None)
    assert before - 1e-5 <= worker.time <= agent.time <= time.time() + 1e-5


def test_writing_never_raises_into_training(tmp_path: Path) -> None:
    events.EventLog(tmp_path / "no" / "directory.jsonl").write(events.Step(1))
    events.EventLog(tmp_path).write(events.Step(1))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_event_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    text = (
        "import signal, sys; from pathlib import Path; from ftrun import events\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "log = events.EventLog(Path(sys.argv[1]))\n"
        "for step in range(100): log.write(events.Step(step))\n"
        "print('trained on')"
    )
    limit = 1000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", text, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limited)
    assert done.stdout == "trained on\n", done.stderr
    assert path.stat().st_size <= limit
    assert [record.event.step for record in events.read(path)][:5] == [0, 1, 2, 3, 4]


WRITES = """
import sys
from pathlib import Path
from ftrun import events

rank = int(sys.argv[2])
log = events.EventLog(Path(sys.argv[1]), attempt=1, rank=rank)
for step in range(int(sys.argv[3])):
    log.write(events.Step(step, {"loss": 1.0} | {f"m{i}": float(i) for i in range(rank * 20)}))
"""


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path, count = tmp_path / "events.jsonl", 200
    writers = [subprocess.Popen([sys.executable, "-c", WRITES, path, str(rank), str(count)]) for rank in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    records = list(events.read(path))
    # An empty line is what a writer puts behind one that another had not quite finished.
    lines = [line for line in path.read_bytes().splitlines() if line]
    assert len(records) == len(lines) == 3 * count
    for rank in range(3):
        assert [each.event.step for each in records if each.rank == rank] == list(range(count))


# --- the contract


def test_the_contract_comes_back() -> None:
    contract = WorkerContract(
        run_dir="/runs/a b\n'\"ü",
        run_id="a/b",
        root="/root",
        attempt=3,
        epoch=7,
        resume="e1",
        node=2,
        worker_dir="/w",
        since=4,
        every=Every(seconds=2.5),
        keep_last=9,
        allow_new_total=True,
        faults=(Fault(1, 0, "kill"), Fault(2, 1, "hang")),
        callbacks=("a.b", "c"),
        agent=123,
    )
    variables = contract.to_environment()
    assert list(variables) == [WorkerContract.VARIABLE]
    assert WorkerContract.from_environment({"OTHER": "x", **variables}) == contract
    least = WorkerContract("/r", "r", "/c", 1, None, None, 0, "/w")
    assert WorkerContract.from_environment(least.to_environment()) == least
    assert WorkerContract.from_environment({}) is None
    assert WorkerContract.from_environment({WorkerContract.VARIABLE: ""}) is None


# --- the pulse page


def test_a_new_page_says_nothing_yet(tmp_path: Path) -> None:
    pulse.create(tmp_path / "pulse")
    beat = pulse.read(tmp_path / "pulse")
    assert beat == pulse.Beat(step=0, base=0, total=None, phase=Phase.START, owned=False, time=0.0, first_step=0.0)
    assert not beat.made_a_step


def test_a_page_follows_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    pulse.create(path)
    page = Pulse(path)

    def seen() -> pulse.Beat:
        beat = pulse.read(path)
        assert beat is not None
        return beat

    before = time.time()
    page.phase(Phase.RESTORE)
    assert seen().phase is Phase.RESTORE
    assert before <= seen().time <= time.time()
    assert not page.owned
    page.own(base=40, total=100)
    assert (seen().step, seen().base, seen().total, seen().owned, seen().made_a_step) == (40, 40, 100, True, False)
    assert seen().first_step == 0.0
    page.step(41)
    assert (seen().step, seen().phase, seen().made_a_step) == (41, Phase.STEP, True)
    first = seen().first_step
    assert before <= first <= time.time()
    page.step(42)
    assert (seen().step, seen().first_step) == (42, first)
    page.phase(Phase.SAVE)
    page.expect(2**40)
    assert (seen().step, seen().phase, seen().total) == (42, Phase.SAVE, 2**40)
    page.expect(None)
    assert seen().total is None
    assert Pulse(path).owned  # another view of the same page


def test_the_page_outlives_a_killed_worker(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    pulse.create(path)
    text = (
        "import os, signal, sys; from pathlib import Path; from ftrun.pulse import Pulse\n"
        "page = Pulse(Path(sys.argv[1])); page.own(base=0)\n"
        "for step in range(1, 8): page.step(step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", text, str(path)], timeout=60).returncode == -9
    beat = pulse.read(path)
    assert beat is not None
    assert beat.step == 7


@pytest.mark.parametrize("content", [None, b"", b"FTPULSE1", b"x" * 4096, b"FTPULSE1" + b"\xff" * 4087])
def test_what_is_no_page(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "pulse").write_bytes(content)
    assert pulse.read(tmp_path / "pulse") is None
    assert pulse.read(tmp_path) is None


def test_a_page_with_an_unknown_phase_is_still_read(tmp_path: Path) -> None:
    page = bytearray(4096)
    page[:8] = b"FTPULSE1"
    page[8], page[32] = 5, 99
    (tmp_path / "pulse").write_bytes(page)
    beat = pulse.read(tmp_path / "pulse")
    assert beat is not None
    assert (beat.step, beat.phase) == (5, Phase.START)


# --- the run directory


def test_paths_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs/llama"))
    base = tmp_path / "runs" / "llama"
    assert list(tmp_path.iterdir()) == []  # naming it makes nothing
    assert run.path == Path(os.fspath(run)) == base
    assert run.events(3) == base / "events" / "n0003.jsonl"
    assert run.worker(7, 2, 11) == base / "attempts" / "0007" / "n0002" / "r00011"
    assert (run.resolved, run.job_yaml) == (base / "job.resolved.json", base / "job.yaml")
    assert (run.control, run.checkpoints) == (base / "control", base / "checkpoints")
    monkeypatch.chdir("/")
    assert run.path == base


def test_making_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "deep" / "run")
    assert not run.exists()
    run.create({"run_id": "run", "n": 1})
    assert run.exists()
    assert run.identity() == {"run_id": "run", "n": 1}
    run.create({"run_id": "run", "n": 2})  # again is no error: a run that continues
    assert run.identity()["n"] == 2
    assert sorted(item.name for item in run.path.iterdir()) == ["attempts", "control", "events", "job.resolved.json"]


def test_a_run_that_another_node_makes_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, listed = RunDir(tmp_path / "run"), Path.iterdir
    (run.path / "events").mkdir(parents=True)

    def later(path: Path) -> Iterator[Path]:
        if path == run.path:
            run.create({"run_id": "run"})
            run.events().write_text("")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", later)
    assert run.exists()


@pytest.mark.parametrize("blocked", ["run", "parent", "inside"])
def test_a_place_that_cannot_be_written(tmp_path: Path, blocked: str) -> None:
    path = tmp_path / "parent" / "run"
    file = {"run": path, "parent": path.parent, "inside": path / "attempts"}[blocked]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    with pytest.raises(RunDirError, match=r"can't be written: .*--run-dir"):
        RunDir(path).create({})


def test_attempts_are_numbered_and_never_reused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.attempt_numbers() == []
    run.create({})
    assert [run.next_attempt() for _ in range(3)] == [1, 2, 3]
    (run.attempts / "0002").rmdir()
    (run.attempts / "notes").mkdir()
    (run.attempts / "²").mkdir()
    assert run.next_attempt() == 4
    assert (run.attempts / "latest").resolve() == run.attempt(4)
    assert os.readlink(run.attempts / "latest") == "0004"
    assert run.attempt_numbers() == [1, 3, 4]
    (run.attempts / "12345").mkdir()
    assert run.next_attempt() == 12346


def test_racing_launchers_never_share_an_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create({})
    text = (
        "import sys; from pathlib import Path; from ftrun.rundir import RunDir\n"
        "print(*[RunDir(Path(sys.argv[1])).next_attempt() for _ in range(25)])"
    )
    command = [sys.executable, "-c", text, str(run.path)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    taken = [int(number) for racer in racers for number in racer.communicate(timeout=60)[0].split()]
    assert sorted(taken) == list(range(1, 76))


def test_setting_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.set_aside() is None
    names = set()
    for content in ("first", "second", "third"):
        run.create({"content": content})
        aside = run.set_aside()
        assert aside is not None
        assert not run.path.exists()
        assert aside.parent == tmp_path
        assert RunDir(aside).identity() == {"content": content}
        names.add(aside.name)
    assert len(names) == 3
    assert all(name.startswith("run.aside-") for name in names)


HOLD = (
    "import sys, time; from pathlib import Path; from ftrun import rundir\n"
    "with rundir.locked(Path(sys.argv[1]), shared_by_nodes=sys.argv[2] == 'shared'):\n"
    "    print('held', flush=True); sys.stdin.read()"
)


@pytest.mark.parametrize("shared", ["alone", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_run_is_held_by_one_launcher_at_a_time(tmp_path: Path, shared: str) -> None:
    path = tmp_path / "runs" / "run"
    assert not rundir.in_use(path)
    command = [sys.executable, "-c", HOLD, str(path), shared]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert rundir.in_use(path)
        for _ in range(
            2
        ):  # looking doesn't blur who it is; nor may one of several nodes join a run of one, or the reverse
            for kind in (True, False):
                with pytest.raises(RunDirError, match=rf"in use by another launcher \(pid {holder.pid} on "):
                    rundir.hold(path, shared_by_nodes=kind)
        assert not path.exists()  # the lock is beside it, so that --fresh can move the directory
        holder.kill()  # however it dies
        eventually(lambda: not rundir.in_use(path), what="the lock to be free")
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    with rundir.locked(path, shared_by_nodes=shared == "shared"):
        assert rundir.in_use(path)
        RunDir(path).create({})
        assert RunDir(path).set_aside() is not None
        assert rundir.in_use(path)
    assert not rundir.in_use(path)


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"can't be written: .*--run-dir"):
        rundir.hold(tmp_path / "file" / "run")
