"""What the run's first node tells spares, which files they fetch, and several launchers of one run on a machine."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from conftest import eventually
from filler_kit import Urls, loader, remote  # noqa: F401 - the last is a fixture

from ftrun import rundir
from ftrun.config.origins import Resolved
from ftrun.data.cache.files import CachedFiles
from ftrun.data.filler.offering import Offering
from ftrun.data.filler.offers import Offer, OfferDir
from ftrun.data.filler.places import Pool
from ftrun.data.filler.registering import Berth, register
from ftrun.data.filler.spare import SpareFiller
from ftrun.data.order import order_of
from ftrun.data.position import Position
from ftrun.errors import RunDirError
from ftrun.launch import nodes_here

if TYPE_CHECKING:
    from pathlib import Path

    from filler_kit import Remote

    from ftrun.data.filler.registering import Registered


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def registered(run: Path, remote: Remote) -> Registered:  # noqa: F811
    """The first of two nodes, of two ranks each, reads all files."""
    found = register(Berth(run, 0, 1, 4, (0, 1)), "train", loader(Urls(remote.fill(), remote.files())))
    assert found is not None
    found.settle(60)
    return found


def test_only_spares_that_ask_are_told_and_only_as_long_as_they_do(run: Path, remote: Remote) -> None:  # noqa: F811
    offers, offering = OfferDir(run), Offering(run, 0, lambda: str(remote.root))
    mine = registered(run, remote)
    offering.look(0.0)
    assert not offers.path.exists()
    offers.ask("b", 1)
    offering.look(1.0)
    offer = Offer.read(offers.offer("train"))
    assert offer is not None
    assert (offer.plan.ranks, offer.position, offer.usual) == ((0, 1), Position(0, 0), True)
    everything = [path for path in offers.path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in everything} == {0o600}  # options may be secrets
    mine.at(Position(0, 16))
    offering.look(60.0)
    assert Offer.read(offers.offer("train")) != offer
    mine.at(Position(0, 32))
    offering.look(62.0)  # nothing has been heard of it for a minute
    assert not offers.path.exists()
    offers.ask("b", 2)
    offering.look(63.0)  # it is there after all
    offer = Offer.read(offers.offer("train"))
    assert offer is not None
    assert offer.position == Position(0, 32)
    offers.stop_asking("b")
    assert not offers.path.exists()


@pytest.mark.slow
def test_a_spare_fetches_what_the_last_ranks_read_next(
    run: Path,
    remote: Remote,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", remote.environment["PYTHONPATH"])
    mine = registered(run, remote)
    mine.at(Position(0, 40))
    mine.expect(7)
    offering = Offering(run, 0, lambda: str(remote.root))
    said: list[str] = []
    spare = SpareFiller(run, "b", lambda: str(tmp_path / "other"), lambda: True, said.append)
    spare.start()
    try:
        eventually(lambda: offering.look(time.monotonic()) or spare.pid, 60, "the spare's filler")
        files = CachedFiles(tmp_path / "other", reserve_free=0)
        order = order_of(loader(list(range(96))).recipe, 0).take(0, 96).tolist()
        expected = {order[place] for place in range(40, 96) if place % 4 in (2, 3)}
        eventually(lambda: len(list(files.cached())) == len(expected), 60, "all that is read in this epoch")
        assert {int(each.url[-8:-4]) for each in files.cached()} == expected
        pid = spare.pid
        assert spare.directory is not None
        assert not spare.directory.remove_dead_spare(), "it lives"
        assert spare.directory.spare.exists()
    finally:
        spare.finish()
    assert not psutil.pid_exists(pid)
    assert len(said) == 1


DOOMED = """
import sys, time
from pathlib import Path
from ftrun.data.filler.places import FillDir
directory = FillDir(Path(sys.argv[1]))
directory.make()
held = directory.hold_for_spare()
directory.plan("train").write_text("{}")
time.sleep(300)
"""


def test_what_a_killed_spare_has_left_goes_with_the_next_filler_of_that_cache(run: Path, tmp_path: Path) -> None:
    pool = Pool.of(tmp_path / "other")
    left, mine, members = pool.run(run, "b"), pool.run(run, 0), pool.run(run, 1)
    doomed = subprocess.Popen([sys.executable, "-c", DOOMED, str(left.path)])
    try:
        for each in (mine, members):
            each.make()
        eventually(left.plan("train").exists, 60, "a spare")
        pool.sweep(mine.path)
        assert left.plan("train").exists(), "it lives"
    finally:
        doomed.kill()
        doomed.wait(60)
    assert left.plan("train").exists(), "nobody was left to remove it"
    pool.sweep(mine.path)
    # What other members have left, the next start of their run takes up.
    assert {mine.path, members.path} == set((pool.path / "runs").iterdir())


def test_a_spare_of_a_job_without_a_cache_starts_nothing(run: Path, tmp_path: Path) -> None:
    spare = SpareFiller(run, "b", lambda: str(tmp_path / "other"), lambda: True, print)
    spare.start()
    eventually((run / "data" / "spares" / "b.json").exists, 60, "its question")
    Offering(run, 0, lambda: "").look(time.monotonic())
    spare.hand_over()
    assert spare.pid == 0
    spare.finish()
    assert not (tmp_path / "other").exists()


def test_launchers_of_a_machine_are_numbered_where_there_may_be_several(run: Path) -> None:
    here: dict[str, Any] = {"shared_by_nodes": True, "most_here": 2}
    with rundir.locked(run, **here) as first, rundir.locked(run, **here) as second:
        assert (first, second, rundir.in_use(run)) == (1, 2, True)
        with pytest.raises(RunDirError, match="like localhost:29400"), rundir.locked(run, shared_by_nodes=False):
            pass
    assert not rundir.in_use(run)
    assert nodes_here.name(2) == f"{nodes_here.name(1)}#2"


@pytest.mark.parametrize(
    ("endpoint", "nodes", "meant"),
    [
        ("localhost:29400", "2", True),
        ("127.0.0.1", "1:4", True),
        ("[::1]:29400", "2", True),
        ("localhost:1,127.0.0.2:2", "2", True),
        ("localhost:29400", "1", False),
        ("localhost:1,node1:2", "2", False),
        ("node1:29400", "2", False),
        ("", "2", False),
        ("no port:x", "2", False),
    ],
)
def test_when_several_nodes_on_a_machine_are_meant(endpoint: str, nodes: str, *, meant: bool) -> None:
    values: dict[str, Any] = {"nnodes": nodes, "rdzv_backend": "static", "rdzv_endpoint": endpoint, "standalone": False}
    launch = {name: Resolved(value, "default") for name, value in values.items()}
    assert nodes_here.all_here(launch) is meant
