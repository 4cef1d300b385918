"""Loaders of a Session: what of them is stored, how long they are waited for, and what becomes of those let go of."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from filler_kit import Remote, Urls, remote  # noqa: F401 - a fixture
from session_kit import here, of, open_session  # noqa: F401 - a fixture

from ftrun.data.filler import page
from ftrun.data.filler.places import Pointer
from ftrun.data.loader import DataLoader
from ftrun.data.position import Position
from ftrun.errors import StateMismatch, UsageError
from ftrun.events import Step

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun import Session

pytestmark = pytest.mark.usefixtures("here")

SECONDS = 0.002


class Slow:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        return index


def waited() -> float:
    return sum(each.data_wait for each in of(Step))


def test_waits_are_counted_in_the_sessions_loop_and_in_ones_own() -> None:
    with open_session(every=None) as ft:
        loader: DataLoader[int] = ft.loader(Slow(), global_batch=4)  # type: ignore[arg-type] # map-style enough
        for _ in ft.steps(loader, total=5):
            pass
    assert waited() == pytest.approx(loader.waited)
    assert loader.waited >= 5 * 4 * SECONDS


def test_waits_of_a_loop_of_ones_own_but_for_those_of_an_evaluation() -> None:
    with open_session(every=None) as ft:
        loader: DataLoader[int] = ft.loader(Slow(), global_batch=4)  # type: ignore[arg-type]
        tracked: DataLoader[int] = DataLoader(Slow(), global_batch=2)  # type: ignore[arg-type]
        evaluated: DataLoader[int] = ft.loader(Slow(), global_batch=4)  # type: ignore[arg-type]
        ft.track(tracked=tracked)
        for _ in zip(loader, tracked, range(5), strict=False):
            with ft.phase("eval"):
                next(iter(evaluated))
            ft.step_end()
        ft.save()
    # The zip has asked for a sixth batch, after the last step.
    counted = waited()
    assert 5 * 6 * SECONDS <= counted <= loader.waited + tracked.waited
    assert evaluated.waited >= 5 * 4 * SECONDS


def test_a_loader_that_is_let_go_of_is_stored_where_it_was_and_nothing_is_fetched_for_it_any_more(
    remote: Remote,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", remote.environment["PYTHONPATH"])
    dataset: Any = Urls(remote.fill(), remote.files())
    with open_session(every=None) as ft:
        first = ft.loader(dataset, global_batch=8)
        kept = ft.loader(dataset, global_batch=8, shuffle=True)
        for _ in zip(first, range(3), strict=False):
            pass
        position = first.position
        assert position == Position(0, 24)
        for each in threading.enumerate():  # each plan is written by a thread of its own
            if each.name == "ftrun-register":
                each.join(60)
        fill_dir = Pointer.of(tmp_path / "run", 0).read()
        assert fill_dir is not None
        assert fill_dir.plan("data2").exists()
        assert fill_dir.plan("data").exists()
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None
        assert not fill_dir.plan("data").exists()
        assert [path.name.partition(".")[0] for path in fill_dir.plans.iterdir()] == 2 * [fill_dir.plan("data2").stem]
        for step, _ in enumerate(ft.steps(kept, total=3)):
            told = page.read(fill_dir.page("data2", 1))
            assert told is not None
            assert told.steps_left == 3 - step  # known before the first step is complete
    with open_session(every=None) as ft:
        assert ft.step == 3
        assert ft.loader(dataset, global_batch=8).position == position


def test_a_loader_that_nobody_but_its_loop_holds_counts_each_step() -> None:
    def made(ft: Session) -> DataLoader[int]:
        return ft.loader(Slow(), global_batch=4)  # type: ignore[arg-type]

    with open_session(every=None) as ft:
        for step, _ in enumerate(made(ft), 1):
            ft.step_end()
            if step == 3:
                ft.save()
                break
    with open_session(every=None) as ft:
        assert ft.step == 3
        assert made(ft).position == Position(0, 12)


def test_what_a_sampler_lists_is_remembered_of_a_loader_that_is_gone() -> None:
    with open_session(every=None) as ft:
        for step, _ in enumerate(ft.loader(Slow(), sampler=range(64), global_batch=4), 1):  # type: ignore[arg-type]
            ft.step_end()
            if step == 3:
                break
        ft.save()
    with open_session(every=None) as ft:
        other: DataLoader[int] = ft.loader(Slow(), sampler=range(63, -1, -1), global_batch=4)  # type: ignore[arg-type]
        assert other.position == Position(0, 12)
        with pytest.raises(StateMismatch, match="lists other samples for epoch 0"):
            next(iter(other))


def test_a_loader_that_comes_late_is_told_where_it_belongs() -> None:
    with open_session(every=None) as ft:
        for _ in ft.steps(total=1):
            with pytest.raises(UsageError, match=r"Make it once, before the loop over epochs.* is ftrun\.DataLoader\("):
                ft.loader(Slow(), global_batch=4)  # type: ignore[arg-type]
