"""What scripts/bench data makes of its measurements, one cheap figure from end to end, and the slow mount it reads."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_kit import BENCHMARKS, imported  # noqa: F401 - the fixture "bench"
from conftest import eventually
from slow_mount import Counts, SlowMount, why_not

needs_fuse = pytest.mark.skipif(bool(why_not()), reason=why_not())


def results(bench: Any, **series: list[float]) -> Any:
    lines = [
        {"name": name.replace("_", " "), "cycle": cycle, "value": value}
        for name, values in series.items()
        for cycle, value in enumerate(values)
    ]
    return bench("checkpoint_results").Results([lines])


def test_quotients_pair_what_was_measured_in_the_same_cycle(bench: Any) -> None:
    made = results(bench, ftrun=[8.0, 9.0, 30.0], torch=[10.0, 10.0])
    assert bench("data_jobs").pairs(made, "ftrun", "torch") == [0.8, 0.9]
    assert bench("data_jobs").every(made, "nobody") == []


def test_resuming_is_judged_by_the_last_point_over_the_first(bench: Any) -> None:
    names = {"x at 1000": 0.002, "x at 100000": 0.002, "x at 10000000": 0.005, "x again": 0.003}
    lines = [{"name": name, "cycle": cycle, "value": value} for name, value in names.items() for cycle in range(3)]
    case = bench("data_resume")._case(bench("checkpoint_results").Results([lines]), "x")
    assert (case.value, case.control, case.n) == (2.5, 1.5, 3)
    assert bench("data_resume")._case(results(bench), "x").value is None


@pytest.mark.parametrize(
    ("expected", "found", "wrong"),
    [
        ([[[0, 0.1], [1, 0.2]]], [[[0, 0.1], [1, 0.2]]], (0, 0, 0, 0)),
        ([[[0, 0.1], [1, 0.2]]], [[[0, 0.1], [0, 0.1]]], (1, 1, 1, 0)),
        ([[[0, 0.1], [1, 0.2]]], [[[1, 0.2], [0, 0.1]]], (0, 0, 2, 0)),
        ([[[0, 0.1], [1, 0.2]]], [[[0, 0.1], [1, 0.3]]], (0, 0, 0, 1)),
    ],
)
def test_runs_are_compared_sample_by_sample(bench: Any, expected: Any, found: Any, wrong: tuple[int, ...]) -> None:
    counts = bench("data_lives")._compared(expected, found)
    assert tuple(counts[name] for name in ("duplicates", "misses", "moved", "augmentations")) == wrong


def test_without_a_mount_the_figures_say_why(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = bench("peers").Absent("the data peers", "not installed: no network")
    monkeypatch.setattr(bench("data_peers"), "python", lambda: absent)
    settings = bench("common").Settings(quick=True, work=tmp_path)
    for figure in (*bench("data_files").wait(settings), *bench("data_files").warm(settings)):
        assert figure.value is None
        assert figure.notes == ["not installed: no network"]
    assert bench("data_jobs").run_peers(settings, "data_lives_peers.py").problem == "not installed: no network"


@pytest.mark.slow
def test_a_figure_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS), "data", "--quick", "--only", "data.kill_storm"]
    done = subprocess.run([*command, "--json", "made.json"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    print(done.stdout, done.stderr)
    made = json.loads((tmp_path / "made.json").read_text())
    assert made.keys() == {"data.kill_storm"}
    figure = made["data.kill_storm"]
    assert figure.keys() == {"value", "control", "n", "reference"}
    assert (figure["value"], figure["n"]) == (0, 25)
    assert figure["reference"]["corrupt reads"] == figure["reference"]["orphans after 5 s"] == 0
    assert done.returncode == 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "the source"
    made.mkdir()
    (made / "a.bin").write_bytes(os.urandom(3_000_000))
    return made


@needs_fuse
def test_a_mount_shows_and_counts_what_is_read(source: Path, tmp_path: Path) -> None:
    with SlowMount(source, tmp_path / "a mount's") as mount:
        assert os.listdir(mount.path) == ["a.bin"]
        for _ in range(2):
            assert (mount.path / "a.bin").read_bytes() == (source / "a.bin").read_bytes()
        counts = mount.counts()
        assert (counts.opens, counts.bytes) == (2, 6_000_000)
        assert counts - counts == Counts()
        assert mount.opened() == ["a.bin", "a.bin"]
        (source / "b").write_text("new")
        assert (mount.path / "b").read_text() == "new"
        with pytest.raises(OSError, match="Read-only"):
            (mount.path / "c").write_text("no")
    assert not mount.path.exists()


@needs_fuse
def test_a_mount_fails_truncates_and_hangs_on_request(source: Path, tmp_path: Path) -> None:
    with SlowMount(source, tmp_path / "mnt", error=errno.EIO) as mount:
        file = mount.path / "a.bin"
        with pytest.raises(OSError, match="Input/output"):
            file.read_bytes()
        mount.set(error=0, truncate=1000)
        assert file.stat().st_size == 3_000_000
        assert file.read_bytes() == (source / "a.bin").read_bytes()[:1000]
        mount.set(truncate=-1, hang=True)
        read: list[int] = []
        reader = threading.Thread(target=lambda: read.append(len(file.read_bytes())))
        reader.start()
        reader.join(0.2)
        assert reader.is_alive()
        mount.set(hang=False)
        reader.join(20)
        assert read == [3_000_000]


@needs_fuse
def test_closing_a_mount_frees_whoever_hangs_in_it(source: Path, tmp_path: Path) -> None:
    errors: list[OSError] = []

    def read(file: Path) -> None:
        try:
            file.read_bytes()
        except OSError as error:
            errors.append(error)

    with SlowMount(source, tmp_path / "mnt", hang=True) as mount:
        reader = threading.Thread(target=read, args=(mount.path / "a.bin",))
        reader.start()
        reader.join(0.2)
        assert reader.is_alive()
    reader.join(20)
    assert len(errors) == 1
    assert not os.path.ismount(mount.path)


_HOLDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slow_mount import SlowMount
with SlowMount(Path(sys.argv[2]), Path(sys.argv[3]), hang=len(sys.argv) > 4) as mount:
    print(mount.pid, mount._state, flush=True)
    time.sleep(100)
"""


@needs_fuse
@pytest.mark.parametrize("hang", [(), ("hang",)])
def test_a_mount_ends_with_the_process_that_made_it(source: Path, tmp_path: Path, hang: tuple[str, ...]) -> None:
    mount = tmp_path / "mnt"
    arguments = [str(Path(__file__).parent), str(source), str(mount), *hang]
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, *arguments], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    pid, state = holder.stdout.readline().split()
    if hang:
        threading.Thread(target=lambda: _read_badly(mount / "a.bin"), daemon=True).start()
    holder.send_signal(signal.SIGKILL)
    holder.wait(20)
    holder.stdout.close()
    eventually(lambda: not _is_there(mount) and not Path(state).exists(), 20, "the mount's end")
    eventually(lambda: not psutil.pid_exists(int(pid)) or _is_dead(int(pid)), 20, "its server's end")


def _read_badly(file: Path) -> None:
    try:
        file.read_bytes()
    except OSError:
        return


def _is_there(mount: Path) -> bool:
    try:
        return mount.exists()
    except OSError:  # it is just being taken away
        return True


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@needs_fuse
def test_a_server_that_was_killed_leaves_no_mount(source: Path, tmp_path: Path) -> None:
    with SlowMount(source, tmp_path / "mnt") as mount:
        os.kill(mount.pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"not connected|abort"):
            eventually(lambda: (mount.path / "a.bin").read_bytes() == b"", 20)
    assert not mount.path.exists()
