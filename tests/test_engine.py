"""The checkpoint engine under the launcher: what workers had staged outlives them, and any number of ranks goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import Runner, eventually

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.faults import VARIABLE
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.loading.sealed import newest_sealed
from ftrun.checkpoint.memory.tier import SHARED_MEMORY, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"


def of(runner: Runner, name: str, kind: type[events.Event]) -> list[events.Event]:
    return [each.event for each in runner.events(name) if isinstance(each.event, kind)]


def tier_of(runner: Runner, name: str) -> Tier:
    return Tier.of(runner.run_dir(name).path, 0)


def keepers(tier: Tier) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(tier.path) in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def let_go(tier: Tier) -> None:
    """Continue the keeper, which a fault has stopped or is going to stop."""

    def stopped() -> list[psutil.Process]:
        found = []
        for each in keepers(tier):
            with contextlib.suppress(psutil.Error):
                if each.status() == psutil.STATUS_STOPPED:
                    found.append(each)
        return found

    for each in eventually(stopped, 60, "a keeper that is stopped"):
        each.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The digest of a run of one rank that nobody disturbs: the job's numbers are exact however it is spread."""
    runner = Runner(tmp_path_factory.mktemp("steady"))
    try:
        result = runner.run("--name", "steady", SCRIPTS / "reshaped.py", "--how", "ddp", timeout=200)
        assert result.code == 0, result
        yield digest(result.out)
    finally:
        runner.close()


def digest(out: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith("digest"))
    return line


@pytest.mark.parametrize(("how", "worlds"), [("ddp", (3, 1, 2)), ("fsdp", (2, 3, 1))])
def test_any_number_of_ranks_goes_on_as_if_nothing_had_changed(
    runner: Runner, steady: str, how: str, worlds: tuple[int, ...]
) -> None:
    script = SCRIPTS / "reshaped.py"
    for ranks, stop, code in zip(worlds, (2, 4, 0), (75, 75, 0), strict=True):
        result = runner.run(
            "--nproc", str(ranks), "--name", "moved", script, "--how", how, "--stop", str(stop), timeout=200
        )
        assert result.code == code, result
    assert digest(result.out) == steady
    started = of(runner, "moved", events.AttemptStarted)
    assert tuple(each.world_size for each in started) == worlds
    assert all(each.resume for each in started[1:])


def job(runner: Runner, text: str) -> Path:
    path = runner.cwd / "job.yaml"
    path.write_text(text)
    return path


def test_a_snapshot_outlives_workers_that_are_all_killed_once_it_is_sealed(runner: Runner) -> None:
    script = SCRIPTS / "sealed.py"
    expected = runner.run("--nproc", "2", "--name", "calm", script, timeout=100)
    assert expected.code == 0, expected
    # The ranks die one step after the save of step 4: in that one they wait for its seals. Its commit can't be there
    # before the keeper, stopped as soon as it has the first snapshot, is let go.
    file = job(runner, "faults: [{at_step: 6, rank: 0, do: kill}, {at_step: 6, rank: 1, do: kill}]\n")
    command = ("-c", file, "--nproc", "2", "--name", "killed", script, "--sealed", "4")
    started = runner.start(*command, env={VARIABLE: "draining:stop"})
    eventually(lambda: len(of(runner, "killed", events.AttemptStarted)) == 2, 100, "the second attempt")
    let_go(tier_of(runner, "killed"))
    result = started.wait(100)
    assert result.code == 0, result
    assert result.out == expected.out
    _, second = of(runner, "killed", events.AttemptStarted)
    assert isinstance(second, events.AttemptStarted)
    assert (second.resume_step, second.epoch) == (4, 2)
    committed = [each.step for each in of(runner, "killed", events.Committed)]
    assert committed[0] == 4, "the keeper has committed what the dead had sealed"
    kinds = [each.event.kind for each in runner.events("killed") if each.event.kind in ("committed", "attempt_started")]
    assert kinds[:3] == ["attempt_started", "attempt_started", "committed"], "it was resumed before it was committed"
    failed = of(runner, "killed", events.Failed)
    assert [each.lost_steps for each in failed] == [1]
    assert not tier_of(runner, "killed").path.exists()


def test_a_keeper_that_is_killed_is_replaced_and_its_snapshot_committed(runner: Runner) -> None:
    file = job(runner, "checkpoint: {drain_limit: 1MB}\n")
    script = SCRIPTS / "sealed.py"
    hurry = runner.cwd / "hurry"
    options = ("--total", "60", "--pause", "0.5", "--hurry", hurry)
    started = runner.start("-c", file, "--nproc", "2", "--name", "kept", script, *options)
    tier = tier_of(runner, "kept")
    eventually(tier.sealed, 60, "a snapshot is sealed")
    (first,) = eventually(lambda: keepers(tier), 30, "a keeper runs")
    first.send_signal(signal.SIGKILL)
    eventually(lambda: [each for each in keepers(tier) if each.pid != first.pid], 30, "another keeper runs")
    hurry.touch()
    result = started.wait(100)
    assert result.code == 0, result
    assert [each.step for each in of(runner, "kept", events.Committed)][-1] == 60
    assert keepers(tier) == []
    assert not tier.path.exists()


def test_nothing_is_left_in_shared_memory_when_the_launcher_is_killed(runner: Runner) -> None:
    script = SCRIPTS / "sealed.py"
    started = runner.start("--nproc", "2", "--name", "orphan", script, "--total", "2000", "--pause", "0.05")
    tier = tier_of(runner, "orphan")
    eventually(lambda: newest_sealed(tier, "orphan", 0), 60, "both ranks have sealed a snapshot")
    started.process.kill()
    eventually(lambda: not keepers(tier) and not tier.path.exists(), 60, "the keeper has finished and left")
    newest = reader.attempts(Root.open(runner.run_dir("orphan").checkpoints))[0]
    assert newest.status == "committed"


def test_two_nodes_of_one_machine_have_memory_of_their_own(runner: Runner) -> None:
    one, two = Tier.of(runner.cwd, 0), Tier.of(runner.cwd, 1)
    assert one.path != two.path
    assert one.path.is_relative_to(SHARED_MEMORY)
    assert str(os.getuid()) in one.path.parts[-2]


def test_workers_that_end_before_there_is_a_keeper_leave_nothing_in_shared_memory(runner: Runner) -> None:
    script = runner.cwd / "brief.py"
    script.write_text("import ftrun\n\nwith ftrun.Session.open() as ft:\n    raise SystemExit(3)\n")
    result = runner.run("--nproc", "1", "--name", "brief", script)
    assert result.code == 3, result
    assert not tier_of(runner, "brief").path.exists()
