"""Ranks agree on saves and stops over a real store, at the same step, whatever their speed."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from conftest import held_port

from ftrun.errors import AgreementTimeout, UsageError
from ftrun.session.agreement import Agreement, Instruction, connect, steps_ahead
from ftrun.session.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable

SOON = dt.timedelta(seconds=120)
AT_ONCE = dt.timedelta(seconds=0.3)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank: int, server: dist.TCPStore, world_size: int = 2) -> Place:
    return Place(rank, world_size, rank, world_size, store_host="127.0.0.1", store_port=server.port, agent_store=True)


def no_wish() -> tuple[bool, str | None]:
    return False, None


class Rank:
    """One rank's loop on a thread of its own, with its own connection."""

    def __init__(self, rank: int, server: dist.TCPStore, seconds_per_step: float, scope: str = "test") -> None:
        where = place(rank, server)
        self.seconds_per_step = seconds_per_step
        self.agreement = Agreement(where, connect(where, scope, deadline=SOON), first_point=1, deadline=SOON)
        self.heard: dict[int, Instruction] = {}
        self.saves: list[int] = []
        self.last_save = time.monotonic()
        self.ask_at: int | None = None

    def decide(self) -> tuple[bool, str | None]:
        due = time.monotonic() - self.last_save >= 0.1
        return due, self.agreement.asked_to_stop()

    def run(self, most_steps: int) -> int:
        """Step until told to stop; the step of the stop."""
        for step in range(1, most_steps + 1):
            time.sleep(self.seconds_per_step)  # the work
            if step == self.ask_at:
                self.agreement.ask_to_stop("SIGTERM")
            instruction = self.agreement.at(step, self.decide)
            if instruction is None:
                continue
            self.heard[step] = instruction
            if instruction.save:
                self.saves.append(step)
                self.last_save = time.monotonic()
            if instruction.stop is not None:
                assert instruction.stop == "SIGTERM"
                return step
        pytest.fail(f"no stop within {most_steps} steps")


@pytest.mark.parametrize(
    ("seconds_of_rank_0", "seconds_of_rank_1", "ask_at"),
    [(0.01, 0.01, 25), (0.02, 0.001, 25), (0.01, 0.02, 25), (0.3, 0.0, 2)],
    ids=["alike", "rank 1 is fast", "rank 1 is slow", "rank 0 is very slow"],
)
def test_saves_and_a_stop_asked_for_by_rank_1_come_at_the_same_step(
    server: dist.TCPStore, seconds_of_rank_0: float, seconds_of_rank_1: float, ask_at: int
) -> None:
    ranks = [Rank(0, server, seconds_of_rank_0), Rank(1, server, seconds_of_rank_1)]
    ranks[1].ask_at = ask_at
    with ThreadPoolExecutor(2) as threads:
        stops = list(threads.map(lambda rank: rank.run(10_000), ranks))
    assert stops[0] == stops[1] >= ask_at
    assert ranks[0].heard == ranks[1].heard
    assert ranks[0].saves == ranks[1].saves != []  # a tenth of a second is over long before


def test_a_step_that_all_ranks_know_is_a_point_on_request(server: dist.TCPStore) -> None:
    ranks = [Agreement(place(rank, server), connect(place(rank, server), "meet"), first_point=90) for rank in (0, 1)]
    said = ranks[0].at(50, lambda: (True, None), meet=True)
    assert said is not None
    assert ranks[1].at(50, no_wish, meet=True) == said
    assert [each.at(50, no_wish) for each in ranks] == [None, None]
    assert said.next_point > 50


def test_ranks_meet_about_once_a_second_and_not_at_every_step(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # a clock of its own: after a pause of the machine ranks meet more often for a while
    monkeypatch.setattr("ftrun.session.agreement.time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = [Agreement(place(rank, server), connect(place(rank, server), "s"), first_point=1) for rank in (0, 1)]
    met: list[float] = []
    for step in range(1, 1_001):
        now[0] += 0.02
        heard = [each.at(step, no_wish) for each in ranks]
        assert heard[0] == heard[1]
        if heard[0] is not None:
            met.append(now[0])
    pauses = [later - earlier for earlier, later in itertools.pairwise(met)]
    assert len(pauses) >= 20
    assert all(pause <= 1.1 for pause in pauses)
    assert all(pause >= 0.9 for pause in pauses[6:])  # their number grows from two steps on, by doubling


def test_rank_0_alone_needs_no_store() -> None:
    agreement = Agreement(Place(), None, first_point=6)
    assert agreement.at(5, no_wish) is None
    agreement.ask_to_stop("nobody else hears it")
    assert agreement.asked_to_stop() is None
    instruction = agreement.at(6, lambda: (True, "enough"))
    assert instruction is not None
    assert (instruction.save, instruction.stop) == (True, "enough")
    assert instruction.next_point > 6
    assert agreement.at(instruction.next_point - 1, no_wish) is None or instruction.next_point == 7
    assert agreement.at(instruction.next_point, no_wish) is not None


def test_decide_is_called_at_points_of_rank_0_only(server: dist.TCPStore) -> None:
    calls: list[int] = []

    def decide_as(rank: int) -> Callable[[], tuple[bool, str | None]]:
        return lambda: (calls.append(rank), no_wish())[1]

    ranks = [Agreement(place(rank, server), connect(place(rank, server), "s"), first_point=3) for rank in (0, 1)]
    for step in (1, 2, 3):
        for rank, agreement in enumerate(ranks):
            agreement.at(step, decide_as(rank))
    assert calls == [0]


def test_a_silent_rank_0_is_an_error_that_names_the_step(server: dist.TCPStore) -> None:
    where = place(1, server)
    agreement = Agreement(where, connect(where, "test", deadline=SOON), first_point=4, deadline=AT_ONCE)
    assert agreement.at(3, no_wish) is None
    started = time.monotonic()
    with pytest.raises(AgreementTimeout, match=r"rank 1 heard nothing from rank 0 about step 4 for 0:00:00\.3"):
        agreement.at(4, no_wish)
    assert time.monotonic() - started < SOON.total_seconds() / 2


def test_a_lost_store_is_noticed_at_once() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = place(1, server)
    agreement = Agreement(where, connect(where, "test", deadline=SOON), first_point=1, deadline=SOON)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(agreement.at, 1, no_wish)
        del server
        with pytest.raises(AgreementTimeout, match="rank 1 lost the store of its group at step 1"):
            waiting.result(60)


def test_what_another_attempt_said_is_not_heard(server: dist.TCPStore) -> None:
    def rank(number: int, scope: str) -> Agreement:
        where = place(number, server)
        return Agreement(where, connect(where, scope, deadline=SOON), first_point=1, deadline=AT_ONCE)

    old = rank(0, "epoch-1")
    old.at(1, no_wish)
    rank(1, "epoch-1").ask_to_stop("old")
    assert old.asked_to_stop() == "old"
    assert rank(0, "epoch-2").asked_to_stop() is None
    with pytest.raises(AgreementTimeout):
        rank(1, "epoch-2").at(1, no_wish)


def test_the_instruction_of_rank_0_arrives_as_it_is(server: dist.TCPStore) -> None:
    ranks = [Agreement(place(rank, server), connect(place(rank, server), "s"), first_point=1) for rank in (0, 1)]
    said = ranks[0].at(1, lambda: (True, 'a "reason" with é'))
    assert (
        said == ranks[1].at(1, no_wish) == Instruction(save=True, stop='a "reason" with é', next_point=said.next_point)
    )


@pytest.mark.parametrize(
    ("seconds_per_step", "before", "steps"),
    [
        (-1.0, 1, 2),
        (0.0, 1, 2),
        (1e-6, 1, 2),
        (1e-6, 50, 100),
        (1e-6, 100, 100),
        (0.001, 99, 100),
        (0.025, 30, 40),
        (0.025, 7, 14),
        (0.3, 8, 3),
        (0.6, 8, 1),
        (1.0, 1, 1),
        (90.0, 64, 1),
    ],
)
def test_steps_ahead(seconds_per_step: float, before: int, steps: int) -> None:
    assert steps_ahead(seconds_per_step, before) == steps


def test_steps_that_become_slow_do_not_put_a_stop_off_for_long() -> None:
    agreement, step = Agreement(Place(), None, first_point=1), 0
    for step in range(1, 1_000):  # as fast as can be
        agreement.at(step, no_wish)
    waited = next(later for later in range(1, 1_000) if agreement.at(step + later, no_wish))
    assert waited <= 100


def test_a_group_of_one_has_no_store() -> None:
    assert connect(Place(), "test") is None


def test_nobody_at_the_address_is_an_error() -> None:
    with held_port() as port:  # where nobody listens
        where = Place(1, 2, 1, 2, store_host="127.0.0.1", store_port=port, agent_store=True)
        with pytest.raises(AgreementTimeout, match=f"rank 1 can't reach the store of its group at 127.0.0.1:{port}"):
            connect(where, "test", deadline=dt.timedelta(seconds=1))


def test_without_a_group_and_a_launcher_nobody_is_waited_for(server: dist.TCPStore) -> None:
    where = Place(0, 2, 0, 2, store_host="127.0.0.1", store_port=server.port, agent_store=False)
    with pytest.raises(UsageError, match=r"init_process_group\(\) before the Session"):
        connect(where, "test", deadline=SOON)


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_place_is_read_from_the_environment() -> None:
    assert Place.from_environment(TORCHRUN) == Place(3, 4, 1, 2, 1, 2, "node0", 29500, agent_store=True)
    assert Place.from_environment({"HOME": "/", "MASTER_ADDR": "elsewhere"}) == Place()
    alone = Place.from_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert (alone.rank, alone.world_size, alone.local_rank, alone.local_world_size) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "must both be set"),
        ({"WORLD_SIZE": None}, "must both be set"),
        ({"RANK": "three"}, "must both be set, to numbers"),
        ({"WORLD_SIZE": ""}, "must both be set, to numbers"),
        ({"MASTER_PORT": "http"}, "must both be set, to numbers"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 and WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=3 and WORLD_SIZE=0"),
        ({"MASTER_ADDR": None}, "4 workers need MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_PORT": None}, "4 workers need MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(changes: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        Place.from_environment(environment)
