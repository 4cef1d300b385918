"""A node that is left out while it trains leaves by itself; the leader hears of it once it has, or has had its time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from conftest import eventually

from ftrun.launch.holding_back import HoldingBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BAD = {"c": "c is bad"}


class Case:
    """A launcher's part, on node a, and what its leader is told."""

    def __init__(self, patience: float, *, shared: bool = True) -> None:
        self.members = ["a", "b", "c"]
        self.told: list[dict[str, str]] = []
        self.made = HoldingBack(self.told.append, lambda: self.members, "a", patience, shared=shared)


@pytest.fixture
def case() -> Iterator[Callable[[float], Case]]:
    made: list[Case] = []

    def make(patience: float) -> Case:
        made.append(Case(patience))
        return made[-1]

    yield make
    for each in made:
        each.made.close()


def test_the_leader_hears_of_a_node_once_it_has_left(case: Callable[[float], Case]) -> None:
    here = case(60.0)
    here.made.told(BAD)
    here.made.told({"c": "c is bad, for another minute"})
    here.made.told({"c": "c is bad", "d": "d takes no part"})
    assert here.told == [{"d": "d takes no part"}]
    here.members = ["a", "b"]
    eventually(lambda: here.told[-1] == {"c": "c is bad", "d": "d takes no part"}, 60, "c too")
    here.made.told({})
    assert here.told[-1] == {}


def test_a_node_that_does_not_leave_is_taken_out(case: Callable[[float], Case]) -> None:
    here = case(0.3)
    began = time.monotonic()
    here.made.told(BAD)
    eventually(lambda: here.told == [BAD], 60, "c")
    assert time.monotonic() - began >= 0.3
    here.made.told({"c": "c is still bad"})
    assert here.told[-1] == {"c": "c is still bad"}  # it is not held back a second time


def test_the_node_itself_hears_of_it_at_once(case: Callable[[float], Case]) -> None:
    here = case(60.0)
    assert not here.made.own
    here.made.told({"a": "a is bad"})
    assert here.made.own == "a is bad"
    here.made.told({})
    assert not here.made.own
    assert here.told == []


def test_a_node_that_can_not_know_of_it_is_taken_out_at_once() -> None:
    here = Case(60.0, shared=False)
    here.made.told(BAD)
    assert here.told == [BAD]
    here.made.told({**BAD, "a": "a is bad"})
    assert (here.told[1:], here.made.own) == ([], "a is bad")
    here.made.close()


def test_while_no_round_stands_nothing_is_held_back(case: Callable[[float], Case]) -> None:
    here = case(60.0)
    here.members = []
    here.made.told(BAD)
    assert here.told == [BAD]
