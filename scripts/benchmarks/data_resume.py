"""``data.resume``: from a stored position to the first batch, early and late in an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoint_results import Case, figure
from data_jobs import every, pairs, run_ours, run_peers
from figures import Target, median, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from checkpoint_results import Results
    from common import Settings
    from figures import Figure

_POINTS = (1_000, 100_000, 10_000_000)
_OURS = ("ftrun, map, workers 0", "ftrun, iterable, workers 0")
_WITH_WORKERS = ("ftrun, map, workers 2", "ftrun, iterable, workers 2")
_PEERS = ("StatefulDataLoader, map, workers 0", "StatefulDataLoader, iterable, workers 0")
_FLAT = Target("<=", 1.2)
"""Where time doesn't grow, it is no more than this times as long at one point as at another, in the median."""


def resume(settings: Settings) -> Iterator[Figure]:
    """The time at ten million samples over the time at a thousand; the steeper of map and iterable."""
    ours = _run(settings, run_ours, settings.count(50, 15), _OURS)
    started = _run(settings, run_ours, settings.count(10, 2), _WITH_WORKERS)
    peers = _run(settings, run_peers, 1, _PEERS)
    beside: dict[str, float | str | None] = {name: _case(started, name).value for name in _WITH_WORKERS}
    beside["StatefulDataLoader, iterable, 2 workers"] = "30 µs a sample"
    for name in _PEERS:
        seconds = [_seconds(peers, name, point) for point in _POINTS]
        beside[f"{name} (s)"] = peers.problem or " / ".join(f"{each:.3g}" for each in seconds)
    cases = [_case(ours, name) for name in _OURS]
    words = [f"{name}: {_case(started, name).notes[0]}" for name in _WITH_WORKERS]
    yield figure("data.resume", cases, _FLAT, beside, ["12 million numbers, batches of 100", *words])


def _run(settings: Settings, run: Callable[..., Results], cycles: int, methods: Sequence[str]) -> Results:
    points = map(str, _POINTS)
    return run(settings, "data_resuming.py", "--points", *points, "--cycles", str(cycles), "--methods", *methods)


def _case(results: Results, name: str) -> Case:
    first, last = (f"{name} at {point}" for point in (_POINTS[0], _POINTS[-1]))
    times = [every(results, f"{name} at {point}") for point in _POINTS]
    notes = (", ".join(f"at {point:,}: {spread(each, 's')}" for point, each in zip(_POINTS, times, strict=True)),)
    growth, control = (median(pairs(results, each, first)) for each in (last, f"{name} again"))
    return Case(name, growth, control, len(times[0]), (results.problem,) if results.problem else notes)


def _seconds(results: Results, name: str, point: int) -> float:
    return median(every(results, f"{name} at {point}")) or 0.0
