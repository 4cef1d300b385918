"""How a node looks for the leader: what it makes of another run, of a note that can't be read, of one that moved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from rendezvous_kit import SECONDS
from rendezvous_stores import lead, place, served

from ftrun.rendezvous import endpoint
from ftrun.rendezvous import reach as reaching
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.member import Known
from ftrun.rendezvous.model import Beat, Phase, Round, Who
from ftrun.rendezvous.note import Board, Note
from ftrun.rendezvous.reach import Reach
from ftrun.rendezvous.visiting import AnotherRun, NotWelcome, Visitor
from ftrun.rendezvous.wire import LineDown

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.rendezvous.member import Inheritance
    from ftrun.rendezvous.shelf import Server

NOWHERE = endpoint.Endpoint("127.0.0.1", 1)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stores here answer, or refuse: one whose thread gets no processor for some seconds is not silent."""
    monkeypatch.setattr(reaching, "_SHORT_PATIENCE", SECONDS)


def who(node: str, server: Server) -> Who:
    return Who(node, f"host-{node}", "127.0.0.1", server.port)


@dataclass
class Home:
    """The store that a node serves itself, which begins nothing and takes nothing over."""

    begun: list[bool] = field(default_factory=list)
    guides: list[str] = field(default_factory=list)
    seen: float = 0.0

    def owns(self, address: str, port: int) -> bool:
        return False

    def take_over(self, who: Who, inheritance: Inheritance) -> int:
        raise OSError("nothing is led here")

    def begin(self, who: Who, note: Note | None, *, seen: float, deserted: bool) -> int:
        self.begun.append(deserted)
        self.seen = seen
        raise LineDown("no run begins here")

    def guide(self, text: str) -> None:
        self.guides.append(text)


def visitor(known: Known | None = None) -> Visitor:
    me = Who("me", "my-host", "127.0.0.1", 0)
    return Visitor(me, Beat(1, Phase.READY, 0).encode(), known or Known(), takes_over=True)


def test_another_run_where_this_one_was_led_is_not_the_end_of_this_one() -> None:
    with served() as first, served() as heir:
        home = Home()
        reach = Reach((place(first),), "a-run", SECONDS, home)
        lead(first, "a-run", "one", 3)
        reach.connect(visitor()).wire.close()
        known = Known(round=Round(3, (who("one", first), who("two", heir)), ""))
        # The leader is lost, its machine belongs to somebody else by now, and the heir leads.
        reach.lose(silent=False)
        lead(first, "b-run", "other", 1)
        lead(heir, "a-run", "two", 3)
        reached = reach.connect(visitor(known))
        reached.wire.close()
        assert reached.is_new
        assert home.guides[-1] == f"127.0.0.1 {heir.port} 3"
        # One that knows nothing but the endpoint has no business there.
        with pytest.raises(AnotherRun, match="is the endpoint of another run, 'b-run', and this is 'a-run'"):
            Reach((place(first),), "a-run", SECONDS, Home()).connect(visitor())


def test_another_version_of_ftrun_is_named_and_of_another_run_it_is_none_of_ours() -> None:
    with served() as server:
        lead(server, "a-run", "one", protocol=1)
        with pytest.raises(NotWelcome, match="host-one, which hosts the rendezvous, has another version") as raised:
            Reach((place(server),), "a-run", SECONDS, Home()).connect(visitor())
        assert not isinstance(raised.value, AnotherRun)
        lead(server, "b-run", "one", protocol=1)
        with pytest.raises(AnotherRun):
            Reach((place(server),), "a-run", SECONDS, Home()).connect(visitor())


def test_a_place_in_a_note_at_which_another_run_is_led_counts_as_left(tmp_path: Path) -> None:
    with served() as server:
        lead(server, "b-run", "other")
        board = Board(tmp_path, "a-run")
        home = Home()
        reach = Reach((NOWHERE,), "a-run", SECONDS, home, board)
        board.write(Note("a-run", "old", "my-host", "127.0.0.1", server.port, 7, 1))
        with pytest.raises(LineDown, match="no run begins here"):
            reach.connect(visitor())
        assert home.begun == [True]


def test_while_the_note_cannot_be_read_no_run_begins(tmp_path: Path) -> None:
    home = Home()
    reach = Reach((NOWHERE,), "a-run", SECONDS, home, Board(tmp_path, "a-run"))
    (tmp_path / "leader.json").mkdir()  # as good as a filesystem that says no
    with pytest.raises(LineDown, match="the run directory doesn't say where the run is led"):
        reach.connect(visitor())
    assert home.begun == []
    (tmp_path / "leader.json").rmdir()
    with pytest.raises(LineDown, match="no run begins here"):
        reach.connect(visitor())
    assert home.begun == [False]


def test_a_note_is_as_old_as_the_look_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is stopped after that doesn't take a run for dead whose leader has written on all the time."""
    looked: list[float] = []

    def read(self: Board) -> Note | None:
        looked.append(time.monotonic())
        return None

    monkeypatch.setattr(Board, "read", read)
    home = Home()
    with pytest.raises(LineDown, match="no run begins here"):
        Reach((NOWHERE,), "a-run", SECONDS, home, Board(tmp_path, "a-run")).connect(visitor())
    assert 0.0 < home.seen <= looked[0]


def test_where_somebody_says_that_the_leader_has_moved_no_run_begins() -> None:
    with served() as former, served() as leader:
        home = Home()
        reach = Reach((place(former),), "a-run", SECONDS, home)
        former.shelf.set(Keys.GUIDE, f"127.0.0.1 {leader.port} 4")
        with pytest.raises(LineDown, match="has moved"):
            reach.connect(visitor())
        assert home.begun == []
        lead(leader, "a-run", "two", 4)
        reach.connect(visitor()).wire.close()
        assert home.begun == []


@pytest.mark.parametrize("name", ["a..b", "x" * 70 + ".example", "nobody.invalid"])
def test_what_is_no_host_name_resolves_to_nothing(name: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system says
        endpoint.resolve(name)
    assert not endpoint.is_mine(name)


def test_whose_address_it_is() -> None:
    assert endpoint.is_mine("127.0.0.1")
    assert endpoint.is_mine("localhost")
    assert not endpoint.is_mine("192.0.2.1")  # for documentation
    assert not endpoint.is_mine("0.0.0.0")  # everybody's
    assert not endpoint.is_mine("::")
