"""Two leaders of one run: how they find each other, and when what is said of another one is no news."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from rendezvous_kit import eventually
from rendezvous_stores import lead, place, served

from ftrun.rendezvous import scout
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.member import Inheritance
from ftrun.rendezvous.model import Job, Outcome, Round, State, Terms, Who
from ftrun.rendezvous.scout import Scout
from ftrun.rendezvous.serving import Serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.rendezvous.shelf import Server


@dataclass
class Leading:
    """What a scout sees of the leader that it looks out for."""

    job: Job = field(default_factory=lambda: Job("a-run", "mine", "host-mine", "mine", 1))
    generation: int = 5
    missing: tuple[Who, ...] = ()
    port: int = 0
    leads: bool = True
    move_to: str = ""


@contextlib.contextmanager
def looking(leading: Leading, *where: Server) -> Iterator[None]:
    watch = Scout(leading, tuple(map(place, where)), "10.0.0.7 4711")  # type: ignore[arg-type]
    watch.start()
    try:
        yield
    finally:
        leading.leads = False
        watch.close()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout, "_EVERY_SECONDS", 0.02)


def moved(server: Server) -> str:
    return server.shelf.exchange((), (Keys.MOVED,))[0] or ""


@pytest.mark.parametrize("said", ["[1", "{}", '{"run_id": 3}', '["a-run"]', "null"])
def test_what_another_store_says_ends_no_scout(said: str) -> None:
    with served() as odd, served() as other:
        odd.shelf.set(Keys.JOB, said)
        odd.shelf.set(Keys.STATE, said)
        with looking(Leading(), odd, other):
            lead(other, "a-run", "theirs", 4)
            for _ in range(2):  # once more after both were asked, in whichever order
                eventually(lambda: moved(other) == "10.0.0.7 4711 5")
                other.shelf.set(Keys.MOVED, "")


def test_of_many_that_are_missing_all_are_asked_in_turn() -> None:
    with served() as other:
        lead(other, "a-run", "theirs", 4)
        dead = [Who(f"n{number}", f"host-n{number}", "127.0.0.1", 1) for number in range(40)]
        last = Who("n40", "host-n40", "127.0.0.1", other.port)
        with looking(Leading(missing=(*dead, last))):
            eventually(lambda: moved(other) == "10.0.0.7 4711 5")


def test_the_one_with_the_later_round_goes_on_and_another_run_is_left_alone() -> None:
    with served() as other, served() as foreign:
        leading = Leading()
        lead(other, "a-run", "theirs", 6)
        lead(foreign, "b-run", "theirs", 1)
        with looking(leading, foreign, other):
            eventually(lambda: leading.move_to == f"127.0.0.1 {other.port} 6")
        assert moved(other) == moved(foreign) == ""


def test_a_leader_gives_way_to_a_later_round_and_not_to_one_before_its_own() -> None:
    with served() as server:
        me = Who("n2", "host-n2", "127.0.0.1", server.port)
        last = Round(5, (Who("n1", "host-n1", "10.0.0.1", 77), me), "")
        said: list[str] = []
        serving = Serving(server, "a-run", Terms(1, 2), me, said.append, Inheritance(last, "n1", (), 1))
        serving.start()
        try:
            server.shelf.set(Keys.MOVED, "10.0.0.9 77 4")  # by a scout that looked here before round 5
            eventually(lambda: moved(server) == "")
            assert serving.leads
            server.shelf.set(Keys.MOVED, "10.0.0.9 77 6")
            eventually(lambda: not serving.leads)
            assert said[-1] == "another leader goes on: the rendezvous has moved to 10.0.0.9 77 6"
            assert moved(server) == "10.0.0.9 77 6"  # for those who ask here
        finally:
            serving.close(0.0)


def test_a_run_that_is_over_is_nobodys_rival() -> None:
    with served() as other:
        lead(other, "a-run", "theirs", 4)
        over = State("theirs", 1, 4, called=False, outcome=Outcome.FINISHED)
        other.shelf.set(Keys.STATE, over.encode())
        with served() as next_one, looking(Leading(), other, next_one):
            lead(next_one, "a-run", "more", 4)
            eventually(lambda: moved(next_one))
        assert moved(other) == ""
