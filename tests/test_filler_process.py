"""The filler's process: what it fetches, what ends it, and what it takes no harm from."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cache_kit import content
from conftest import eventually
from filler_kit import SIZE, WAIT, N, Remote, Urls, berth, filler, loader, registered, remote  # noqa: F401 - a fixture
from torch.utils.data import Subset

from ftrun.data.cache.files import CachedFiles
from ftrun.data.cache.remote import CHUNK
from ftrun.data.filler import orders, registering
from ftrun.data.filler.course import Course
from ftrun.data.filler.filler import Filler
from ftrun.data.filler.lane import Bounds, Lane
from ftrun.data.filler.places import Pointer, put_json
from ftrun.data.filler.plans import FillPlan
from ftrun.data.filler.process import FillerProcess
from ftrun.data.filler.shown import of_run
from ftrun.data.order import order_of
from ftrun.data.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def names(made: Any, epoch: int, start: int, stop: int) -> set[str]:
    recipe = made.recipe
    return {f"f{index:04d}.bin" for index in order_of(recipe, epoch).take(start, stop).tolist()}


def test_it_fetches_each_file_once_as_far_as_the_run_goes_and_ends_with_its_parent(
    tmp_path: Path,
    remote: Remote,  # noqa: F811
) -> None:
    made = loader(Urls(remote.fill(), remote.files()))
    where = berth(tmp_path / "run")
    told = registered(where, made)
    told.expect(5)
    told.at(Position(0, 8))
    parent = subprocess.Popen(
        [sys.executable, "-c", SPAWN, str(told.directory.path)], env=os.environ | remote.environment
    )
    try:
        eventually(lambda: len(list(remote.files().cached())) == 40, WAIT, "forty files, whole")
        pid = eventually(lambda: remote.shown(where.run_dir).get("pid"), WAIT, "a sign of life")
    finally:
        parent.kill()
        parent.wait(60)
    eventually(lambda: _is_dead(pid), WAIT, "the filler's end")
    assert remote.reads() == dict.fromkeys(names(made, 0, 8, 48), 1)
    # And what a rank reads then is there.
    made.load_state_dict(made.state_dict() | {"samples": 8})
    batch = next(iter(made))
    assert {f"f{number:04d}.bin" for number in batch.tolist()} == names(made, 0, 8, 16)
    assert max(remote.reads().values()) == 1


def test_a_loader_whose_order_makes_no_sense_does_not_keep_others_waiting(remote: Remote) -> None:  # noqa: F811
    urls, files = remote.fill(24), remote.files()
    recipe = loader(Urls(urls, files)).recipe
    course = Course(8, 1, (0,), lambda epoch: orders.computed(recipe, epoch))
    lanes = [Lane(name, course, some, files, Bounds(), Position()) for name, some in (("a", urls[:2]), ("b", urls))]
    made = Filler(2)
    made.follow(lanes)
    try:
        eventually(lambda: len(remote.reads()) == 24, WAIT, "the other loader's files")
    finally:
        made.stop()


def test_it_compares_large_files_of_an_earlier_run_with_their_checksums(
    tmp_path: Path,
    remote: Remote,  # noqa: F811
) -> None:
    large = content(7, CHUNK + 5)
    urls = [*remote.fill(3), remote.put("large.bin", large), remote.put("sound.bin", large)]
    before = remote.files()
    for url in urls:
        before.fetch(url)
    once = remote.reads()
    (victim,) = [each.path for each in before.cached() if each.url == urls[3]]
    os.chmod(victim, 0o600)
    with open(victim, "r+b") as file:
        file.seek(CHUNK)
        file.write(b"x")
    remote.files().fetch(urls[3])  # training, which has no time for it
    assert remote.reads() == once
    made = loader(Urls(urls, remote.files()), global_batch=1)
    told = registered(berth(tmp_path / "run"), made)
    with filler(told.directory, remote):
        eventually(lambda: remote.reads()["large.bin"] == 2 * once["large.bin"], WAIT, "another download")
        eventually(lambda: made.dataset.files.has(urls[4]), WAIT, "the other one's turn")
    assert remote.reads()["sound.bin"] == once["sound.bin"]


# A parent that starts the filler as launchers do, and then only waits to be killed.
SPAWN = """
import sys, time
from pathlib import Path
from ftrun.data.filler.places import FillDir
from ftrun.data.filler.process import FillerProcess
process = FillerProcess(FillDir(Path(sys.argv[1])))
while True:
    process.ensure()
    time.sleep(0.05)
"""


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_goes_on_where_the_launcher_says_with_other_ranks_as_far_as_the_old_ones_have_said(
    tmp_path: Path,
    remote: Remote,  # noqa: F811
) -> None:
    made = loader(Urls(remote.fill(), remote.files()), rank=0, world_size=2)
    where = berth(tmp_path / "run", world=2, ranks=(0,))
    told = registered(where, made)
    told.expect(9)
    told.at(Position(0, 0))
    order = order_of(made.recipe, 0).take(0, N).tolist()
    with filler(told.directory, remote):
        eventually(lambda: len(remote.reads()) == 36, WAIT, "the first rank's share of nine steps")
        assert set(remote.reads()) == {f"f{index:04d}.bin" for index in order[0:72:2]}
        state = made.state_dict() | {"samples": 48}
        resume = {"attempt": 2, "world_size": 4, "ranks": [1, 2], "loaders": {"data": state}}
        theirs = [index for place, index in enumerate(order[:72]) if place >= 48 and place % 8 % 4 in (1, 2)]
        all_of_it = {f"f{index:04d}.bin" for index in [*order[0:72:2], *theirs]}
        put_json(told.directory.resume, resume)
        eventually(lambda: all_of_it <= set(remote.reads()), WAIT, "the next attempt's shares")
        # Whole, too: what is under way when it is killed, the next one brings in once more.
        eventually(lambda: len(list(remote.files().cached())) == len(all_of_it), WAIT, "whole files")
        eventually(lambda: remote.shown(where.run_dir).get("steps_ahead") == 3.0, WAIT, "the end of its work")
    with filler(told.directory, remote) as another:  # one that knows the old attempt by its page alone
        eventually(lambda: remote.shown(where.run_dir)["pid"] == another.pid, WAIT, "another filler")
        eventually(lambda: remote.shown(where.run_dir)["steps_ahead"] == 3.0, WAIT, "the end of its work, again")
    assert remote.reads() == dict.fromkeys(all_of_it, 1)


def test_it_is_replaced_when_it_dies_and_ends_when_asked(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    made = loader(Urls(remote.fill(8), remote.files()))
    where = berth(tmp_path / "run")
    told = registered(where, made)
    process = FillerProcess(told.directory)
    try:
        process.ensure()
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        def another() -> bool:
            process.ensure()
            return process.pid not in (None, first)

        eventually(another, WAIT, "another filler")
        assert process.pid is not None
        second = process.pid
    finally:
        process.finish()
    assert process.pid is None
    eventually(lambda: _is_dead(second), WAIT, "its end")  # it is not waited for where it gets no processor to end on


def test_a_cache_that_is_full_of_what_comes_is_left_alone(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    """Sixteen files fit; the training goes through all of them, and nothing is downloaded twice in the epoch."""
    files = remote.files(limit=16 * SIZE)
    made = loader(Urls(remote.fill(), files))
    where = berth(tmp_path / "run")
    told = registered(where, made)
    with filler(told.directory, remote):
        eventually(lambda: len(remote.reads()) >= 8, WAIT, "the first step")
        for at in range(0, 48, 8):
            told.at(Position(0, at))
            wanted = names(made, 0, at, at + 8)
            there = [f"kit://{remote.remote / name}" for name in wanted]
            eventually(lambda there=there: all(map(files.has, there)), WAIT, f"the step at {at}")
            assert remote.size() <= 16 * SIZE
    assert max(remote.reads().values()) == 1


@pytest.mark.slow
def test_a_remote_that_fails_is_not_asked_all_the_time_and_files_that_are_gone_are_counted(
    tmp_path: Path,
    remote: Remote,  # noqa: F811
) -> None:
    made = loader(Urls(remote.fill(32), remote.files()))
    where = berth(tmp_path / "run")
    told = registered(where, made)
    remote.faults(fail=10**6)
    began = time.monotonic()
    with filler(told.directory, remote):
        eventually(lambda: "unwell" in remote.shown(where.run_dir).get("waits_for", ""), WAIT, "the trouble")
        time.sleep(1.5)
        asked, seconds = len(remote.requests("read")), time.monotonic() - began
        # A file for each thread, again for those that failed before it was down, and then one after each pause of half
        # a second, one, two and so on.
        assert asked <= 16 + 3 + math.log2(seconds / 0.5 + 1)
        for number in (3, 4):
            (remote.remote / f"f{number:04d}.bin").unlink()
        remote.well()  # only now: it must not fetch them before
        there = {f"f{number:04d}.bin" for number in range(32)} - {"f0003.bin", "f0004.bin"}
        eventually(lambda: len(list(remote.files().cached())) >= len(there), 60, "all that is left")
        eventually(lambda: remote.shown(where.run_dir)["missing"] == 2, WAIT, "two files gone")
    assert of_run(where.run_dir) is not None


def test_plans_that_can_not_be_used_do_no_harm(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    made = loader(Urls(remote.fill(8), remote.files()))
    where = berth(tmp_path / "run")
    told = registered(where, made)
    told.directory.plan("torn").write_text("{")
    plan = FillPlan.read(told.directory.plan("data"))
    assert plan is not None
    put_json(told.directory.plan("no list"), plan.to_json() | {"loader": "no list", "urls": "0" * 32})
    put_json(told.directory.plan("no root"), plan.to_json() | {"loader": "no root", "files": {}})
    told.directory.resume.write_text("[]")
    with filler(told.directory, remote) as process:
        eventually(lambda: len(remote.reads()) == 8, WAIT, "the files of the good plan")
        assert process.poll() is None
        told.directory.remove()  # a cache that is cleared under it
        time.sleep(0.5)
        assert process.poll() is None


def test_two_runs_in_one_cache_don_t_mind_each_other(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    dataset = Urls(remote.fill(32), remote.files())
    one, other = berth(tmp_path / "one"), berth(tmp_path / "other")
    first, second = registered(one, loader(dataset)), registered(other, loader(dataset, seed=4))
    assert first.directory != second.directory
    with filler(first.directory, remote), filler(second.directory, remote):
        # Whole: what is under way when one is killed, the other brings in once more.
        eventually(lambda: len(list(remote.files().cached())) == 32, WAIT, "all files")
        eventually(lambda: remote.shown(one.run_dir) and remote.shown(other.run_dir), WAIT, "both")
    assert max(remote.reads().values()) == 1
    assert len(list((first.directory.pool.path / "urls").iterdir())) == 1


def test_what_is_registered(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    dataset = Urls(remote.fill(48), remote.files())
    where = berth(tmp_path / "run")
    assert registering.register(where, "plain", loader(list(range(48)))) is None
    some = Subset(dataset, list(range(47, -1, -2)))  # type: ignore[arg-type,var-annotated] # map-style enough
    told = registered(where, loader(some), "some")
    with filler(told.directory, remote):
        eventually(lambda: len(remote.reads()) == 24, WAIT, "the chosen files")
        eventually(lambda: told.final().bytes == 24 * SIZE, WAIT, "their bytes")
    assert set(remote.reads()) == {f"f{index:04d}.bin" for index in range(1, 48, 2)}
    registering.finish(where, told.directory, told.final())
    assert not told.directory.path.exists()
    last = of_run(where.run_dir)
    assert last is not None
    assert (last.bytes, last.pid) == (24 * SIZE, 0)
    assert Pointer.of(where.run_dir, 0).read() is None


def test_several_loaders_of_a_run_share_its_directory_and_its_one_cache(
    tmp_path: Path,
    remote: Remote,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = berth(tmp_path / "run")
    dataset = Urls(remote.fill(16), remote.files())
    first = registering.register(where, "first", loader(dataset))
    second = registering.register(where, "second", loader(dataset, seed=4), first)  # the first isn't written yet
    assert first is not None
    assert second is not None
    for each in (first, second):
        each.settle(WAIT)
    assert not caplog.messages
    assert all(first.directory.plan(name).exists() for name in ("first", "second"))
    elsewhere = Urls(list(dataset.urls), CachedFiles(tmp_path / "elsewhere", reserve_free=0))
    assert registering.register(where, "third", loader(elsewhere), first) is None
    assert "give both one CachedFiles" in caplog.text


def test_orders_of_torch_are_written_for_it(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    made = loader(Urls(remote.fill(64), remote.files()), order="torch")
    told = registered(berth(tmp_path / "run"), made)
    told.expect(3)
    told.at(Position(0, 16))
    with filler(told.directory, remote):
        eventually(lambda: len(remote.reads()) >= 24, WAIT, "three steps")
    assert set(remote.reads()) == names(made, 0, 16, 40)
    assert told.directory.order("data", 1).exists()


class Noted:
    """A sampler that notes which threads ask it."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        self.threads.add(threading.current_thread())
        return iter(range(64))


def test_a_sampler_is_asked_by_the_training_thread_alone(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    sampler = Noted()
    made = loader(Urls(remote.fill(64), remote.files()), sampler=sampler, shuffle=None)
    told = registered(berth(tmp_path / "run"), made)
    assert told.directory.order("data", 0).exists()
    made.listed(2)  # epochs are short, and it has got further meanwhile
    told.at(Position(1, 8))
    eventually(told.directory.order("data", 1).exists, WAIT)
    assert sampler.threads == {threading.main_thread()}


def test_a_forked_child_that_lets_go_of_its_loader_changes_nothing(tmp_path: Path, remote: Remote) -> None:  # noqa: F811
    told = registered(berth(tmp_path / "run"), loader(Urls(remote.fill(16), remote.files())))
    pid = os.fork()
    if not pid:
        try:
            told.withdraw()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert told.directory.plan("data").exists()
    told.withdraw()
    assert not told.directory.plan("data").exists()


def test_it_imports_no_torch() -> None:
    code = "import sys, ftrun.data.filler.__main__; print('torch' in sys.modules, 'fsspec' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
