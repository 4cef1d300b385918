"""How ranks find out what they hold in common: threads stand for ranks, on every kind of store."""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from plan_kit import together

from ftrun.checkpoint.plan.exchange import Exchange
from ftrun.checkpoint.plan.ownership import Described

if TYPE_CHECKING:
    from pathlib import Path


def described(name: str, digest: str = "d") -> Described:
    return Described(name, "float32", (3, 4), True, "", digest)


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Makes the store of a rank."""
    if request.param == "hash":
        one = dist.HashStore()
        return lambda: dist.PrefixStore("run", one)
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "store"), 4)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keep = [server]
    return lambda: dist.PrefixStore("run", dist.TCPStore("127.0.0.1", keep[0].port, is_master=False))


def ranks(stores: Any, world_size: int = 3, deadline: float = 20.0) -> list[Exchange]:
    return [Exchange(rank, world_size, stores(), deadline) for rank in range(world_size)]


def test_all_meet_and_learn_their_groups(stores: Any) -> None:
    exchanges = ranks(stores)
    said = [
        [described("a"), described("b"), described("c", "0")],
        [described("a"), described("b", "other"), described("c", "1")],
        [described("a"), described("b"), described("d")],
    ]

    def run(rank: int) -> Any:
        assert exchanges[rank].is_on(1, asked=True)
        return exchanges[rank].groups(1, said[rank])

    assert together(3, run) == [{"a": (0, 1, 2), "b": (0, 2)}, {"a": (0, 1, 2)}, {"a": (0, 1, 2), "b": (0, 2)}]


def test_they_meet_at_once_where_torch_serves_the_store_without_libuv() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2)]
    exchanges = [Exchange(rank, 2, clients[rank], 60.0) for rank in range(2)]

    def run(rank: int) -> Any:
        return exchanges[rank].is_on(1, asked=True) and exchanges[rank].groups(1, [described("a")])

    began = time.monotonic()
    assert together(2, run) == [{"a": (0, 1)}] * 2
    assert time.monotonic() - began < 50, "nobody waited until the deadline"


def test_nobody_meets_when_nobody_asks(stores: Any) -> None:
    exchanges = ranks(stores)
    for save in range(3):
        assert together(3, lambda rank, save=save: exchanges[rank].is_on(save, asked=False)) == [False] * 3


def met(exchanges: list[Exchange], save: int, asking: int | None) -> list[bool]:
    return together(len(exchanges), lambda rank: exchanges[rank].is_on(save, asked=rank == asking))


def test_one_who_asks_and_is_first_is_met_at_once(stores: Any) -> None:
    exchanges = ranks(stores)
    clients = [stores() for _ in exchanges]

    def run(rank: int) -> bool:
        if rank != 1:
            clients[rank].wait(["plan/5/go"], dt.timedelta(seconds=20))
        return exchanges[rank].is_on(5, asked=rank == 1)

    assert together(3, run) == [True] * 3
    assert together(3, lambda rank: exchanges[rank].groups(5, [described("a")])) == [{"a": (0, 1, 2)}] * 3
    assert met(exchanges, 6, None) == [False] * 3


def test_one_who_asks_too_late_is_met_at_the_next_save(stores: Any) -> None:
    exchanges = ranks(stores, deadline=60.0)
    started = time.monotonic()
    assert not exchanges[0].is_on(5, asked=False)
    assert not exchanges[1].is_on(5, asked=True)
    assert not exchanges[2].is_on(5, asked=False)
    assert time.monotonic() - started < 50, "did not wait for its deadline"
    assert met(exchanges, 6, 1) == [True] * 3
    assert together(3, lambda rank: exchanges[rank].groups(6, [described("a")])) == [{"a": (0, 1, 2)}] * 3
    assert met(exchanges, 7, None) == [False] * 3


def test_one_who_asks_when_another_is_ahead_by_a_save_is_met_at_the_one_after(stores: Any) -> None:
    exchanges = ranks(stores, 2)
    assert [exchanges[0].is_on(save, asked=False) for save in (5, 6)] == [False] * 2
    assert [exchanges[1].is_on(save, asked=True) for save in (5, 6)] == [False] * 2
    assert met(exchanges, 7, 1) == [True] * 2


def test_whoever_comes_late_finds_the_same_verdict(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    exchanges = [Exchange(rank, 3, store, 20) for rank in range(3)]
    here = threading.Barrier(3)

    def run(rank: int) -> Any:
        on = exchanges[rank].is_on(1, asked=True)
        here.wait(20)
        exchanges[rank]._deadline = dt.timedelta(seconds=0.3)  # not before: they are to meet, however slow they are
        if rank == 2:
            deadline = time.monotonic() + 20
            while not store.check(["plan/1/verdict"]) and time.monotonic() < deadline:
                time.sleep(0.01)
        return on, exchanges[rank].groups(1, [described("a")])

    assert together(3, run) == [(True, None)] * 3
    assert "did not find out within 0.3 s what they hold in common" in caplog.text
    # The next save is another one.
    exchanges = [Exchange(rank, 3, store, 20) for rank in range(3)]
    assert together(3, lambda rank: exchanges[rank].is_on(2, asked=True)) == [True] * 3
    assert together(3, lambda rank: exchanges[rank].groups(2, [described("a")])) == [{"a": (0, 1, 2)}] * 3


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_costs_one_deadline(absent: int) -> None:
    store = dist.HashStore()
    present = [rank for rank in range(3) if rank != absent]
    exchanges = [Exchange(rank, 3, store, 0.3) for rank in present]
    assert together(2, lambda index: exchanges[index].is_on(1, asked=True)) == [False, False]
    # One that comes in the end goes along with what was decided without it.
    assert not Exchange(absent, 3, store, 0.3).is_on(1, asked=True)


def test_a_rank_that_falls_silent_between_is_no_group() -> None:
    store = dist.HashStore()
    exchanges = [Exchange(rank, 2, store, 20) for rank in range(2)]
    assert together(2, lambda rank: exchanges[rank].is_on(1, asked=True)) == [True, True]
    for each in exchanges:
        each._deadline = dt.timedelta(seconds=0.3)
    assert exchanges[1].groups(1, [described("a")]) is None
    assert exchanges[0].groups(1, [described("a")]) is None


def test_a_store_that_is_gone_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    exchange = Exchange(1, 2, dist.TCPStore("127.0.0.1", server.port, is_master=False), 0.3)
    del server
    assert not exchange.is_on(1, asked=True)
    assert exchange.groups(1, [described("a")]) is None
    assert "in save 1 each stores all of its own" in caplog.text


def test_what_all_say_is_in_the_store_once_and_taken_away() -> None:
    class Counting:
        """A store that notes what large values it was given."""

        def __init__(self, store: Any) -> None:
            self._store, self.large = store, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def set(self, key: str, value: str) -> None:
            if len(value) > 10_000:
                self.large.append(key)
            self._store.set(key, value)

    one = dist.HashStore()
    counting = [Counting(one) for _ in range(2)]
    exchanges = [Exchange(rank, 2, counting[rank], 20) for rank in range(2)]
    everything = [described(f"tensor {number}") for number in range(3000)]
    assert exchanges[1]._store.check(["plan/1/verdict"]) is False
    found = together(2, lambda rank: exchanges[rank].groups(1, everything))
    assert found[0] == found[1] == {each.name: (0, 1) for each in everything}
    large = set(counting[0].large + counting[1].large)
    assert len(large) == 1
    assert not one.check(list(large))
