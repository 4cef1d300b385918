"""What people see of a run's data: waits in the ledger and in ``status``, and what would help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftrun.cli.status_data import data, data_text, hint
from ftrun.data.filler.places import Pointer
from ftrun.data.filler.shown import Shown
from ftrun.events import AttemptStarted, DataRead, Record, RunEnded, RunStarted, Step, StepsBegan, StepsEnded, read
from ftrun.goodput import data_wait, ledger
from ftrun.launch import filling
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun import events

LAUNCHED = RunStarted("run", [], 1, "host", 1, False, {})
STARTED = AttemptStarted(1, 1, None, 0, {})


def records(*timed: tuple[float, events.Event]) -> list[Record]:
    return [Record(at, 1, 0, event) for at, event in timed]


RUN = records(
    (0.0, LAUNCHED),
    (1.0, STARTED),
    (4.0, StepsBegan(0, 30)),
    (6.0, Step(1, {}, 1.5)),
    (7.0, Step(11, {}, 0.2)),
    (8.0, Step(21, {}, 0.6)),
    (9.0, Step(22, {}, 0.03)),
    (10.0, StepsEnded(22, False)),
    (11.0, RunEnded("stopped", 75)),
)


def test_waiting_is_a_class_of_its_own_and_the_classes_still_sum_to_the_wall_clock() -> None:
    book = ledger.account(RUN)
    assert book.seconds["waiting"] == pytest.approx(2.33)
    assert book.seconds["training"] == pytest.approx(6.0 - 2.33)
    assert sum(book.seconds.values()) == pytest.approx(11.0)
    absurd = ledger.account(records((0.0, LAUNCHED), (1.0, StepsBegan(0, 2)), (3.0, Step(1, {}, 99.0))))
    assert (absurd.seconds["waiting"], absurd.wall) == (2.0, 3.0)


def test_waits_of_steps_without_the_first_of_an_attempt() -> None:
    found = data_wait.measure(RUN)
    assert found is not None
    assert found.median == pytest.approx(0.03)
    assert (found.steps, found.seconds) == (21, 3.0)
    assert found.share == pytest.approx(0.83 / 3.0)
    assert found.total == pytest.approx(2.33)
    assert data_wait.measure(RUN[:4]) is None
    assert data_wait.measure([]) is None


CACHE: dict[str, Any] = {**Shown(root="/c", hits=90, misses=10).to_json(), "hit_rate": 0.9}

# name: (share of the step, seconds waited, what of the cache, a word of the hint)
HINTS = {
    "it keeps up": (0.05, 1.0, {}, ""),
    "no cache": (0.5, 1.0, None, "num_workers"),
    "decoding": (0.5, 10.0, {"wait_seconds": 1.0}, "decoding"),
    "fetching": (0.5, 10.0, {"wait_seconds": 9.0}, "larger files"),
    "too small": (0.5, 10.0, {"waits_for": "room in the cache"}, "data.limit"),
    "full disk": (0.5, 10.0, {"bypasses": 1000}, "data.cache"),
    "no remote": (0.5, 10.0, {"waits_for": "s3://b: no route"}, "no route"),
}


@pytest.mark.parametrize("name", HINTS)
def test_what_would_help(name: str) -> None:
    share, waited, cache, word = HINTS[name]
    known = None if cache is None else CACHE | cache
    said = hint({"wait_share": share, "wait_steps": 50, "wait_seconds": waited, "cache": known})
    assert bool(said) == bool(word)
    assert word in said


def test_lines_of_status(tmp_path: Any) -> None:
    assert data(tmp_path, []) is None
    assert data_text(None) == []
    Pointer.of(tmp_path, 0).point(None, Shown(root="/nowhere", hits=75, misses=25, errors=3, bypasses=0).to_json())
    document = data(tmp_path, RUN)
    assert document is not None
    assert document["cache"]["hit_rate"] == 0.75
    # Where the run's own word on it is gone, there is the launcher's.
    told = Shown(root="/c", hits=8, misses=2, bytes=5_000_000, wait_seconds=2.0, steps_ahead=7.9, pid=3).event()
    elsewhere = data(tmp_path / "elsewhere", [*RUN, *records((10.5, DataRead(1, 1, 1, 0, 0, 0.0, 0, 0)), (10.6, told))])
    assert elsewhere is not None
    assert (elsewhere["cache"]["hit_rate"], elsewhere["cache"]["pid"]) == (0.8, 0)
    for part in ("80.0% of 10 reads hit", "5.0 MB downloaded", "waited 2 s for files"):
        assert part in "\n".join(data_text(elsewhere))
    lines = "\n".join(data_text(document))
    for part in ("0.03 s of waiting in a step   28% of its time", "75.0% of 100 reads hit", "3 errors"):
        assert part in lines


def test_the_launcher_records_now_and_then_what_the_cache_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.create({"run_id": "run"})
    for name in ("_LOOK", "_TELL"):
        monkeypatch.setattr(filling, name, 0.0)
    launcher: Any = filling.Filling(SimpleNamespace(run_dir=run, ours=False))  # type: ignore[arg-type] # all that it looks at here
    launcher.look()
    launcher.finish()  # before the first attempt there is nothing to say
    launcher.begin(SimpleNamespace(attempt=3), 0, None, [0], 1)
    launcher.look()  # nor without a cache
    for hits in (5, 5, 6):
        Pointer.of(run.path, 0).point(None, Shown(root="/c", hits=hits).to_json())
        launcher.look()
    Pointer.of(run.path, 0).point(None, Shown(root="/c", hits=7).to_json())
    launcher.finish()
    told = list(read(run.events()))
    assert [(each.attempt, each.rank) for each in told] == 3 * [(3, None)]
    assert [each.event.hits for each in told if isinstance(each.event, DataRead)] == [5, 6, 7]
