"""Whom the kernel ends first where memory runs out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from keeper_kit import name_of, nodes_fixture  # noqa: F401 - a fixture

from ftrun import oom

if TYPE_CHECKING:
    from collections.abc import Callable

    from keeper_kit import Node


@pytest.mark.parametrize(
    ("launcher", "may_lower", "keeper", "worker"),
    [
        (0, True, -900, 0),
        (0, False, 0, 500),
        (300, True, -900, 300),
        (-600, True, -900, -400),
        (-997, False, -997, -497),  # a pod that Kubernetes guarantees
        (1000, False, 1000, 1000),  # one that it doesn't
        (700, False, 700, 1000),
        (-1000, True, -1000, -1000),  # somebody wants none of them to be chosen
    ],
)
def test_scores(launcher: int, may_lower: bool, keeper: int, worker: int) -> None:
    assert oom.shared_out(launcher, may_lower=may_lower) == (keeper, worker)


def test_a_keeper_is_spared_where_that_is_allowed(nodes: Callable[..., Node]) -> None:
    node = nodes()
    node.begin()
    node.seal(name_of(1, 10))
    keeper = node.keeper()
    node.outcome(name_of(1, 10))
    assert keeper.pid is not None
    own = score(os.getpid())
    wanted, _ = oom.shared_out(own, may_lower=oom._may_lower(own))
    eventually(lambda: score(keeper.pid) == wanted, 10, f"a score of {wanted}")
    assert score(os.getpid()) == own, "to find out changes nothing"


def score(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
