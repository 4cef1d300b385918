"""Where a restart's seconds went: the parts add up to the whole, whatever is unknown."""

from __future__ import annotations

import pytest

from ftrun.launch import timeline


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        pytest.param([("stop", 11.0), ("start", 11.5), ("first step", 13.0)], [1.0, 0.5, 1.5], id="in order"),
        pytest.param([("stop", 11.0), ("imports", 0.0), ("first step", 13.0)], [1.0, 2.0], id="an unknown moment"),
        pytest.param([("stop", 11.0), ("imports", 10.5), ("first step", 13.0)], [1.0, 2.0], id="out of order"),
        pytest.param([("stop", 11.0), ("start", 11.0), ("first step", 13.0)], [1.0, 2.0], id="in no time"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_parts_add_up(parts: list[tuple[str, float]], seconds: list[float]) -> None:
    split = timeline.split(10.0, parts)
    assert list(split.values()) == pytest.approx(seconds)
    assert sum(split.values()) == pytest.approx((parts[-1][1] - 10.0) if parts else 0.0)


def test_a_part_that_comes_twice_is_one_part() -> None:
    parts = [("back-off", 11.0), ("stop", 12.0), ("back-off", 14.0)]
    assert timeline.split(10.0, parts) == {"back-off": 3.0, "stop": 1.0}


def test_without_a_failure_nothing_is_noted() -> None:
    clock = timeline.Clock()
    clock.mark("rendezvous")
    assert not clock.running
    clock.begin(5.0)
    assert clock.running
