"""Metrics, callbacks, the entry point, and runs without a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from conftest import eventually
from session_kit import Broken, Launch, alike, committed, fall, idle, of, open_session, path_of, trained
from torch import nn

import ftrun
from ftrun import events
from ftrun.errors import RunDirError, UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun import Session

    E = TypeVar("E", bound=events.Event)

pytestmark = pytest.mark.usefixtures("here")


# ---------------------------------------------------------------- metrics and callbacks


def test_metrics_are_numbers_or_tensors_of_one_element() -> None:
    with open_session() as ft:
        for _ in ft.steps(total=1):
            ft.log(loss=torch.tensor([[0.5]], requires_grad=True), rate=np.float32(0.25))
            ft.log(count=3, rate=1.0)
    (step,) = of(events.Step)
    assert step.metrics == {"loss": 0.5, "rate": 1.0, "count": 3.0}


@pytest.mark.parametrize("value", [torch.zeros(2), None, "much", [1.0], 1j], ids=repr)
def test_other_metrics_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"ft\.log\(loss=\.\.\.\): a metric is one number"), open_session() as ft:
        idle(ft, 1, {0: lambda: ft.log(loss=value)})


def test_metrics_that_are_not_finite_do_not_break_the_log() -> None:
    with open_session() as ft:
        for _ in ft.steps(total=1):
            ft.log(loss=float("nan"))
    assert of(events.Step)[0].metrics == {"loss": None}


def test_metrics_belong_to_one_step() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    ftrun.on("step")(lambda step, metrics: seen.append((step, metrics)))
    with open_session() as ft:
        for step in ft.steps(total=3):
            if step != 1:
                ft.log(loss=float(step))
        ft.step_end(more=1)
    assert seen == [(1, {"loss": 0.0}), (2, {}), (3, {"loss": 2.0}), (4, {"more": 1})]


def test_save_and_restore_callbacks() -> None:
    restored: list[ftrun.Checkpoint] = []
    order: list[str] = []

    @ftrun.on("save")
    def one() -> dict[str, Any]:
        order.append("one")
        return {"counter": (1, 2), "shared": "one"}

    @ftrun.on("save")
    def two() -> dict[str, Any]:
        order.append("two")
        return {"shared": "two", 3: torch.ones(2)}

    ftrun.on("save")(lambda: None)
    ftrun.on("restore")(restored.append)
    model = nn.Linear(2, 2)
    with open_session() as ft:
        trained(ft, model=model)
    assert order == ["one", "two"]
    assert restored == []

    other = nn.Linear(2, 2)
    weights: list[torch.Tensor] = []
    ftrun.on("restore")(lambda _checkpoint: weights.append(other.weight.detach().clone()))
    with open_session() as ft:
        ft.track(model=other)
        idle(ft, 5)
        assert restored == [ft.resume]
    assert (restored[0].step, restored[0].total, restored[0].reason) == (5, 5, "interval")
    assert alike(restored[0].extra, {"counter": (1, 2), "shared": "two", 3: torch.ones(2)})
    assert torch.equal(weights[0], model.weight)  # called after what is tracked was restored


def test_a_commit_callback_hears_of_every_commit_of_this_session_in_order() -> None:
    heard: list[ftrun.Checkpoint] = []
    ftrun.on("commit")(heard.append)
    with open_session(every=2) as ft:
        for step in ft.steps(total=6):
            if step == 5:
                # Both are durable: the next boundary must tell.
                eventually(lambda: len(of(events.Committed)) == 2, what="two commits")
        assert [each.step for each in heard] == [2, 4, 6]
    assert [(each.step, each.reason, each.total) for each in heard] == [(step, "interval", 6) for step in (2, 4, 6)]
    assert [each.name for each in heard] == [each.checkpoint for each in of(events.Committed)]
    assert heard[0].root == str(RunDir(path_of("run")).checkpoints)


def test_callbacks_run_in_the_order_of_a_step() -> None:
    order: list[str] = []
    ftrun.on("step")(lambda step, _metrics: order.append(f"step {step}"))
    ftrun.on("save")(lambda: order.append("save"))
    with open_session(every=2) as ft:
        order.extend(f"body {step}" for step in ft.steps(total=3))
    assert order == ["body 0", "step 1", "body 1", "step 2", "save", "body 2", "step 3", "save"]


def test_what_a_callback_raises_fails_the_run() -> None:
    @ftrun.on("step")
    def fail(step: int, _metrics: dict[str, Any]) -> None:
        if step == 7:
            raise Broken

    with pytest.raises(Broken), open_session() as ft:
        idle(ft, 10)
    assert committed() == [5]


def test_a_save_callback_that_returns_no_dict_is_named() -> None:
    @ftrun.on("save")
    def careless() -> Any:
        return 3

    with pytest.raises(UsageError, match=r"careless.*int"), open_session() as ft:
        idle(ft, 10)


def test_a_moment_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"ftrun\.on\('saved'\): no such moment.*save, restore, commit"):
        ftrun.on("saved")
    with pytest.raises(UsageError, match="no such moment"):
        ftrun.on(lambda: None)  # type: ignore[arg-type]  # @ftrun.on without parentheses


def test_a_function_registered_twice_runs_once() -> None:
    seen: list[int] = []

    def count(step: int, _metrics: dict[str, Any]) -> None:
        seen.append(step)

    assert ftrun.on("step")(count) is count
    ftrun.on("step")(count)
    with open_session() as ft:
        idle(ft, 2)
    assert seen == [1, 2]


def test_modules_of_the_job_are_imported_for_their_callbacks(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks_of_the_job.py").write_text(
        "import ftrun\n\n@ftrun.on('save')\ndef f():\n    return {'hooked': 1}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launch(callbacks=("hooks_of_the_job",))
    with open_session() as ft:
        idle(ft, 5)
    launch(callbacks=("hooks_of_the_job",))
    with open_session() as ft:
        assert ft.resume is not None
        assert ft.resume.extra == {"hooked": 1}


def test_a_missing_module_of_callbacks_is_named(launch: Launch) -> None:
    launch(callbacks=("no_such_module_anywhere.hooks",))
    with pytest.raises(UsageError, match=r"no module 'no_such_module_anywhere\.hooks'"), open_session():
        pytest.fail("must not open")


def test_a_module_of_callbacks_that_lacks_one_of_its_own_imports_shows_that(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks_that_break.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    launch(callbacks=("hooks_that_break",))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"), open_session():
        pytest.fail("must not open")


# ---------------------------------------------------------------- the entry point


def test_an_entry_point_passes_arguments_and_values_on() -> None:
    @ftrun.entrypoint
    def main(ft: Session, one: int, *, two: int) -> tuple[int, int, int]:
        """What it does."""
        idle(ft, 3)
        return ft.step, one, two

    assert (main.__name__, main.__doc__) == ("main", "What it does.")
    assert main(1, two=2) == (3, 1, 2)


def test_an_entry_point_with_arguments() -> None:
    @ftrun.entrypoint(every=2, process_group=False)
    def main(ft: Session) -> None:
        idle(ft, 5)

    main()
    assert committed() == [5, 4, 2]


def test_a_users_mistake_is_one_message_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        ft.track(model=3)

    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "\nftrun: ft.track(model=...): a value of type int has no state_dict" in err
    assert "Traceback" not in err
    assert of(events.RunEnded) == [events.RunEnded(outcome="failed", exit_code=1)]


def test_under_a_launcher_the_mistake_is_left_to_it(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        ft.track(model=3)

    launch()
    with pytest.raises(UsageError, match="has no state_dict"):
        main()
    assert capsys.readouterr().err == ""


def test_other_errors_pass_through_an_entry_point() -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        raise Broken

    with pytest.raises(Broken):
        main()


def test_a_stop_leaves_an_entry_point_with_75() -> None:
    @ftrun.entrypoint
    def main(ft: Session) -> None:
        ft.request_stop()
        idle(ft, 1_000_000)

    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 75
    assert committed()


# ---------------------------------------------------------------- runs without a name


def test_a_script_alone_gets_a_run_directory_by_its_name_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTRUN_RUN_DIR")
    monkeypatch.setattr("sys.argv", ["some/where/train_it.py", "--lr", "1"])
    with ftrun.Session.open(every=5) as ft:
        idle(ft, 5)
    (run,) = (path for path in (tmp_path / "runs" / "train_it").iterdir() if path.is_dir())
    assert RunDir(run).identity()["run_id"] == f"train_it/{run.name}"
    (started,) = of(events.RunStarted, f"runs/train_it/{run.name}")
    assert started.command == ["some/where/train_it.py", "--lr", "1"]
    assert not started.continued


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(RunDirError, match=r"thesis\.tex"), open_session():
        pytest.fail("must not open")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_events_tell_the_whole_story() -> None:
    with pytest.raises(Broken), open_session() as ft:
        idle(ft, 9, {7: fall})
    with open_session() as ft:
        idle(ft, 9)
    assert [each.continued for each in of(events.RunStarted)] == [False, True]
    assert [(each.epoch, each.resume_step) for each in of(events.AttemptStarted)] == [(1, 0), (2, 5)]
    assert [(each.step, each.total) for each in of(events.StepsBegan)] == [(0, 9), (5, 9)]
    assert [each.step for each in of(events.Restored)] == [5]
    assert of(events.Step)[-1].step == 9
    assert [each.outcome for each in of(events.RunEnded)] == ["failed", "finished"]
