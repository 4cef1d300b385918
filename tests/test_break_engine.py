"""What a hostile world does to a keeper and its launcher: nothing that was committed is lost, and the user is told."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import eventually
from keeper_kit import Node, name_of, nodes_fixture  # noqa: F401

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Runner, Started

    Make = Callable[..., Node]

SCRIPTS = Path(__file__).parent / "scripts"
A, B, C = (name_of(1, step) for step in (10, 20, 30))


def keepers(tier: Tier) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(tier.path) in process.cmdline():
                found.append(process)
    return found


def waiting(node: Node) -> str:
    progress = Progress.read(node.tier)
    return progress.waiting if progress is not None else ""


def test_nothing_is_committed_into_the_place_where_the_root_was_mounted(nodes: Make) -> None:
    node = nodes()
    node.begin()
    node.seal(A)
    node.keeper()
    assert node.outcome(A).committed
    root = node.root.path
    away = root.with_name("away")
    root.rename(away)
    root.mkdir()
    node.seal(B, slot=1)
    said = eventually(lambda: waiting(node), what=node.log())
    assert "mounted" in said
    assert list(root.iterdir()) == [], "what lies below a mount is out of sight once that is back"
    root.rmdir()
    away.rename(root)
    assert node.outcome(B).committed, node.log()
    assert node.committed() == [B, A]


def test_a_root_that_is_gone_is_not_made_anew(nodes: Make) -> None:
    node = nodes()
    node.begin()
    root = node.root.path
    away = root.with_name("away")
    root.rename(away)
    node.seal(A)
    node.keeper()
    assert "mounted" in eventually(lambda: waiting(node), what=node.log())
    assert not root.exists()
    away.rename(root)
    assert node.outcome(A).committed, node.log()
    assert Root.open(root).epochs() == [1]


# --- real jobs


def kill_everything(started: Started, tier: Tier) -> None:
    """As a machine does that is taken away, apart from its memory."""
    victims = [*keepers(tier), *psutil.Process(started.process.pid).children(recursive=True)]
    started.process.kill()
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    started.process.wait(60)
    psutil.wait_procs(victims, 60)


def start_slowly(runner: Runner, name: str, text: str, *options: str | Path) -> tuple[Started, Tier]:
    """A job whose snapshots wait in memory."""
    file = runner.cwd / "job.yaml"
    file.write_text(text)
    tier = Tier.of(runner.run_dir(name).path, 0)
    started = runner.start("-c", file, "--nproc", "1", "--name", name, SCRIPTS / "sealed.py", *options)
    eventually(tier.sealed, 90, "a snapshot is sealed")
    return started, tier


@pytest.mark.slow
def test_memory_of_a_run_that_was_deleted_is_not_resumed_from(runner: Runner) -> None:
    text = f"checkpoint: {{drain_limit: 500kB, local: {runner.cwd / 'nvme'}}}\n"
    started, tier = start_slowly(runner, "again", text, "--total", "4000", "--pause", "0.05")
    eventually(lambda: list((runner.cwd / "nvme").rglob("r*.safetensors")), 60, "the local tier has some of it")
    kill_everything(started, tier)
    assert tier.sealed()
    shutil.rmtree(runner.run_dir("again").path)
    (runner.cwd / "job.yaml").write_text(f"checkpoint: {{local: {runner.cwd / 'nvme'}}}\n")
    result = runner.run(
        "-c", "job.yaml", "--nproc", "1", "--name", "again", SCRIPTS / "sealed.py", "--pause", "0", timeout=150
    )
    assert result.code == 0, result
    assert "are dropped" in result.err
    (first,) = (each.event for each in runner.events("again") if isinstance(each.event, events.AttemptStarted))
    assert first.resume is None
    found = reader.attempts(Root.open(runner.run_dir("again").checkpoints))
    assert [each.name.step for each in found] == [10, 8, 4]


@pytest.mark.slow
def test_a_restart_waits_for_a_root_that_is_away(runner: Runner) -> None:
    hurry = runner.cwd / "hurry"
    options = ("--total", "100", "--pause", "0.3", "--hurry", hurry)
    started, tier = start_slowly(runner, "away", "standby: {enabled: false}\n", *options)
    root = runner.run_dir("away").checkpoints
    eventually(lambda: any(each.status == "committed" for each in reader.attempts(Root.open(root))), 60, "a commit")
    root.rename(root.with_name("elsewhere"))
    (worker,) = (each for each in workers(started) if "sealed.py" in " ".join(each.cmdline()))
    worker.kill()
    eventually(lambda: "the restart waits for it" in started.err.read_text(), 60, "the launcher says that it waits")
    assert not root.exists()
    hurry.touch()
    root.with_name("elsewhere").rename(root)
    result = started.wait(150)
    assert result.code == 0, result
    assert "the checkpoint root is back" in result.err
    assert result.err.count("the restart waits for it") == 1
    _, second = (each.event for each in runner.events("away") if isinstance(each.event, events.AttemptStarted))
    assert second.resume is not None
    assert not tier.path.exists()


def workers(started: Started) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(started.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RANK" in each.environ():
                found.append(each)
    return found
