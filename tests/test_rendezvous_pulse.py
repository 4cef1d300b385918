"""A node's own record and what it makes of a leader that falls silent, over stores in which a run looks led."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from rendezvous_kit import SECONDS, eventually
from rendezvous_stores import lead, place, served
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from ftrun.rendezvous import pulse as pulses
from ftrun.rendezvous.keys import Keys
from ftrun.rendezvous.member import Timing
from ftrun.rendezvous.model import Beat, Phase, Round, Terms, Who
from ftrun.rendezvous.pulse import Pulse
from ftrun.rendezvous.reach import Reach
from ftrun.rendezvous.settings import Settings
from ftrun.rendezvous.waiting import await_round
from ftrun.rendezvous.wire import LineDown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.rendezvous.member import Inheritance
    from ftrun.rendezvous.note import Note
    from ftrun.rendezvous.shelf import Server

ME = Who("me", "my-host", "127.0.0.1", 7)


@dataclass
class Home:
    """The store that a node serves itself: it notes what is asked of it, and does nothing."""

    taken: list[Inheritance] = field(default_factory=list)

    def owns(self, address: str, port: int) -> bool:
        return False

    def take_over(self, who: Who, inheritance: Inheritance) -> int:
        self.taken.append(inheritance)
        raise OSError("nothing is led here")

    def begin(self, who: Who, note: Note | None, *, seen: float, deserted: bool) -> int:
        raise LineDown("no run begins here")

    def guide(self, text: str) -> None:
        pass


@contextlib.contextmanager
def beating(server: Server, home: Home, timing: Timing) -> Iterator[Pulse]:
    pulse = Pulse(Reach((place(server),), "a-run", timing.patience, home), ME, timing, lambda: None)
    pulse.start()
    try:
        yield pulse
    finally:
        pulse.close(0.2)


def formed(server: Server, *members: Who) -> Round:
    """Have a round be the latest one there."""
    latest = Round(3, members, "")
    server.shelf.set(Keys.round(3), latest.encode())
    lead(server, "a-run", "one", 3)
    return latest


def test_a_leader_that_says_nothing_while_its_store_answers_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "_LEADER_SECONDS", 0.5)
    home = Home()
    with served() as server, beating(server, home, Timing()):
        latest = formed(server, Who("one", "host-one", "127.0.0.1", server.port), ME)
        eventually(lambda: home.taken)
        assert (home.taken[0].last, home.taken[0].host, home.taken[0].silent) == (latest, "one", True)


def test_a_main_thread_that_does_not_come_back_while_it_enters_a_round_is_stuck() -> None:
    with served() as server, beating(server, Home(), Timing(stall=0.3)) as pulse:
        lead(server, "a-run", "one")
        pulse.tick()  # as it does while it waits
        formed(server, ME, Who("two", "host-two", "127.0.0.1", 9))

        def record() -> Beat:
            return Beat.decode(server.shelf.exchange((), (Keys.beat("me"),))[0] or "0 ready 0 0 0")

        eventually(lambda: record().phase is Phase.RUNNING and record().stuck)
        pulse.tick(watched=False)  # it is back, and may stay away for long
        eventually(lambda: not record().stuck)


@pytest.mark.parametrize("met", [True, False])
def test_one_that_outlives_all_others_may_be_started_again(*, met: bool) -> None:
    with ThreadPoolExecutor(1) as pool, served() as server:
        settings = Settings(place(server), "a-run", Terms(1, 1), join_timeout=0.8)
        with beating(server, Home(), Timing()) as pulse:
            if met:
                formed(server, Who("one", "host-one", "127.0.0.1", server.port))
                eventually(lambda: pulse.known.round is not None)
            waiting = pool.submit(await_round, pulse, settings, lambda: False)
            server.close()
            with pytest.raises(RendezvousTimeoutError if met else RendezvousConnectionError) as raised:
                waiting.result(SECONDS)
            says = "none of the others has been reached within 0.8 s" if met else "no rendezvous was reached at"
            assert says in str(raised.value)
