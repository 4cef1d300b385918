"""The filler in whole runs: every file once, through the death of ranks, filler and launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from conftest import SCRIPTS, Runner, eventually
from filler_kit import remote  # noqa: F401 - a fixture

from ftrun.data.filler import page
from ftrun.data.filler.places import Pointer
from ftrun.events import DataRead

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Started
    from filler_kit import Remote

SCRIPT = SCRIPTS / "filled.py"
FILES = 480


@pytest.fixture
def place(tmp_path: Path, remote: Remote) -> Remote:  # noqa: F811
    remote.fill(FILES)
    return remote


def begin(runner: Runner, place: Remote, steps: int, *, ranks: int = 2, workers: int = 0, name: str = "run") -> Started:
    given = (SCRIPT, place.remote, place.root, FILES, steps, workers)
    options = ("--set", "watch.enabled=false")  # ranks that are held are no hang
    return runner.start(
        *options, "--nproc", str(ranks), "--name", name, *map(str, given), env=place.environment, compiler=True
    )


def begin_held(runner: Runner, place: Remote, steps: int, *, hold: int, ranks: int = 2) -> tuple[Started, int]:
    """Start a run that makes so many steps and goes on when it is let go, and its filler; returns both.

    Nothing of the remote is read before the filler can know the run's end: until then all files may be needed.
    """
    (runner.cwd / "hold").write_text(str(hold))
    place.faults(hang="info")
    started = begin(runner, place, steps, ranks=ranks)
    pid = eventually(lambda: shown(place, runner).get("pid"), 60, "a filler")
    eventually(lambda: knows_its_end(runner, place), 60, "the run's end")
    place.faults(latency=0.1)  # it looks now and then
    eventually(lambda: len(seen(runner)) >= 1, 60, "a step")
    place.faults(latency=0.005)
    return started, pid


def knows_its_end(runner: Runner, place: Remote) -> bool:
    pages = place.fill_dir(runner.cwd / "runs" / "run").plans.glob("*.page")
    told = list(map(page.read, pages))
    return any(each is not None and each.steps_left is not None for each in told)


def seen(runner: Runner, rank: int = 0) -> list[list[str]]:
    path = runner.cwd / f"seen-{rank}.txt"
    return [line.split() for line in path.read_text().splitlines() if line.count(" ") > 3] if path.exists() else []


def shown(place: Remote, runner: Runner, name: str = "run") -> dict[str, Any]:
    return place.shown(runner.cwd / "runs" / name)


def is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def trained_once(runner: Runner, steps: int, ranks: int) -> set[int]:
    """The samples of a run that ended, each trained in one step alone."""
    last: dict[tuple[int, int], list[str]] = {}
    for rank in range(ranks):
        for _, step, _, *samples in seen(runner, rank):
            last[rank, int(step)] = samples
    samples = [int(sample) for (_, step), each in last.items() if step < steps for sample in each]
    assert len(samples) == len(set(samples)) == 8 * steps
    return set(samples)


@pytest.mark.slow
def test_every_file_comes_once_though_ranks_and_filler_are_killed(runner: Runner, place: Remote) -> None:
    """And while the ranks restart, what they read first is fetched before they ask for it."""
    started, first = begin_held(runner, place, 40, hold=12)  # workers would read ahead, beyond the end
    eventually(lambda: len(seen(runner)) >= 3, 60, "some steps")
    kill(first)
    another = eventually(
        lambda: shown(place, runner).get("pid") not in (None, first) and shown(place, runner)["pid"], 60
    )
    eventually(lambda: len(seen(runner)) >= 8, 60, "more steps")
    for pid in {line[0] for rank in (0, 1) for line in seen(runner, rank)[-1:]}:
        with contextlib.suppress(ProcessLookupError):  # the launcher ends the second when it sees the first one dead
            kill(int(pid))
    (runner.cwd / "hold").unlink()
    assert started.wait().code == 0
    trained_once(runner, 40, 2)
    reads = place.reads()
    assert len(reads) == 320  # and nothing beyond the run's end, whoever has died
    assert sum(reads.values()) <= 320 + 16 + 2  # what a kill cuts off comes again
    eventually(lambda: is_dead(another), 60, "the filler's end")
    status = runner.json("status", "run", "--json")
    cache = status["data"]["cache"]
    assert cache["bytes"] >= 320 * 2000
    assert (cache["bypasses"], cache["pid"]) == (0, 0)
    assert cache["hits"] + cache["misses"] >= 320
    told = [each.event for each in runner.events("run") if isinstance(each.event, DataRead)][-1]
    assert (told.hits, told.misses, told.bytes) == (cache["hits"], cache["misses"], cache["bytes"])
    assert "reads hit" in runner.run("status", "run").out
    shutil.rmtree(runner.cwd / "runs" / "run" / "data")  # the cache's word on it; the launcher's own is in the events
    again = runner.json("status", "run", "--json")["data"]["cache"]
    assert (again["hits"], again["root"], again["pid"]) == (cache["hits"], "", 0)
    # A run that is over leaves nothing but the list of URLs, for the next one, and what it was told.
    assert Pointer.of(runner.cwd / "runs" / "run", 0).read() is None
    assert not place.debris()


@pytest.mark.slow
def test_a_killed_launcher_takes_the_filler_with_it_and_the_next_one_fetches_where_it_resumes(
    runner: Runner, place: Remote
) -> None:
    started, pid = begin_held(runner, place, 50, hold=20, ranks=1)
    eventually(lambda: len(seen(runner)) >= 4, 60, "some steps")
    kill(started.process.pid)
    eventually(lambda: is_dead(pid), 60, "the filler's end")
    before = len(place.reads())
    (runner.cwd / "hold").unlink()
    # Another world from here on. Nobody has a model yet when the first files are there.
    started = begin(runner, place, 50, ranks=2)
    eventually(lambda: shown(place, runner).get("pid") not in (None, pid), 60, "the next filler")
    assert started.wait().code == 0
    assert before <= len(place.reads()) == 400
    assert max(place.reads().values()) <= 2  # twice where the launcher's death cut a download off
    assert sum(place.reads().values()) <= 400 + 16


@pytest.mark.slow
def test_without_a_launcher_the_first_rank_has_a_filler_that_ends_with_it(
    runner: Runner, place: Remote, tmp_path: Path
) -> None:
    place.faults(latency=0.002)
    run = tmp_path / "alone"
    given = (SCRIPT, place.remote, place.root, FILES, 1000, 0)
    started = runner.start_python(*map(str, given), env=place.environment | {"FTRUN_RUN_DIR": str(run)}, compiler=True)
    pid = eventually(lambda: place.shown(run).get("pid"), 60, "a filler")
    assert psutil.Process(pid).ppid() == started.process.pid
    eventually(lambda: len(seen(runner)) >= 2, 60, "some steps")
    # Counted before the kill: a file that the dead process was about to read is begun again by the filler.
    reads = place.reads()
    kill(started.process.pid)
    eventually(lambda: is_dead(pid), 60, "the filler's end")
    assert max(reads.values()) == 1


PLAIN = """
import sys, time
from pathlib import Path
import ftrun
files = ftrun.CachedFiles(sys.argv[1], reserve_free=0)
for number in range(6):
    with files.open(f"{sys.argv[2]}/f{number:04d}.bin") as path:
        path.read_bytes()
Path("read").touch()
while not Path("end").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_script_that_only_opens_files_is_seen_during_the_run_and_after_it(
    runner: Runner,
    remote: Remote,  # noqa: F811
) -> None:
    remote.fill(12)
    script = runner.cwd / "plain.py"
    script.write_text(PLAIN)
    with remote.files().open(f"{remote.remote}/f0011.bin"):  # what was there before the run is not its own
        pass
    started = runner.start("--nproc", "1", "--name", "run", str(script), str(remote.root), str(remote.remote))
    run = runner.cwd / "runs" / "run"
    eventually(lambda: (runner.cwd / "read").exists() and (run / "data" / "n0000.cache.json").exists(), 60, "reads")
    cache = runner.json("status", "run", "--json")["data"]["cache"]
    assert (cache["hits"], cache["misses"], cache["bytes"], cache["root"]) == (0, 6, 12_000, str(remote.root))
    (runner.cwd / "end").touch()
    assert started.wait().code == 0
    with remote.files().open(f"{remote.remote}/f0010.bin"):
        pass
    after = runner.json("status", "run", "--json")["data"]["cache"]
    assert (after["misses"], after["bytes"]) == (6, 12_000)
    assert "0.0% of 6 reads hit" in runner.run("status", "run").out
