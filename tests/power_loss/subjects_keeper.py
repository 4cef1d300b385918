"""Saves, from the seal in memory to the commit: the keeper's own program, in processes that were forked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import traceback
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs
from ftrun.checkpoint.keeper.__main__ import main as keeper_main
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.memory.tier import Tier, put
from ftrun.checkpoint.sealed import seal as with_checksum
from ftrun.rundir import RunDir
from power_loss import log
from power_loss.lives import killed_at_each_operation
from power_loss.perform import mark
from power_loss.snapshots import ALONE, RUN, TWO_NODES, TWO_RANKS, World, attempt, seal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST, SECOND, THIRD = attempt(1, 5), attempt(1, 10), attempt(1, 15)
STEPS = (FIRST, SECOND, THIRD)

# Times are for people. Without them the same save is the same bytes each time, and its states are looked at once.
epochs.now = lambda: "2026-01-01T00:00:00+00:00"


def told(op: log.Op) -> str | None:
    """The marks of these subjects: beside their own, each attempt of which a keeper tells an event or an outcome."""
    if op.kind == log.WRITE and b'"committed"' in op.data and b'"kind"' in op.data:
        return str(json.loads(op.data)["checkpoint"])
    directory, _, name = op.target.rpartition("/")
    if op.kind == log.RENAME and directory.endswith("/outcomes") and name.startswith("e"):
        return name.removesuffix(".json")
    above, _, own = op.path.rpartition("/")
    return own if op.kind == log.MKDIR and above == "marks" else None


def first(directory: Path) -> None:
    """The first save of a run."""
    claim(directory)
    mark(directory, "start")
    save(directory, FIRST)


def second(directory: Path) -> None:
    _second(directory, ALONE)


def second_of_two_ranks(directory: Path) -> None:
    _second(directory, TWO_RANKS)


def second_with_local_tier(directory: Path) -> None:
    _second(directory, ALONE, local=True)


def _second(directory: Path, world: World, *, local: bool = False) -> None:
    before(directory, world)
    save(directory, SECOND, world, local=local)


def third(directory: Path) -> None:
    """A save after which the oldest of three checkpoints goes."""
    claim(directory)
    save(directory, FIRST)
    save(directory, SECOND)
    mark(directory, "start")
    save(directory, THIRD)


def two_nodes(directory: Path) -> None:
    """Two keepers on two nodes at once, without a shared memory."""
    claim(directory)
    for name in (FIRST, SECOND):
        children = [fork(keep, directory, name, world) for world in TWO_NODES]
        assert [wait(child) for child in children] == [0, 0]
        if name is FIRST:
            mark(directory, "start")


def killed(directory: Path) -> None:
    """The keeper is killed at each operation, and another one goes on with what is sealed."""
    killed_at_each_operation(directory, before, keep_second, keep_second)


def killed_with_local_tier(directory: Path) -> None:
    def life(place: Path) -> None:
        keep(place, SECOND, local=True)

    killed_at_each_operation(directory, before, life, life, step=3)


def killed_and_rolled_forward(directory: Path) -> None:
    """The keeper is killed, and its memory is gone: the next start finds what has come as far as the root."""
    killed_at_each_operation(directory, before, keep_second, start_again)


def without_syncing_names(directory: Path) -> None:
    """A keeper with a fault, which has to be found."""
    before(directory)
    assert wait(fork(_careless, directory, stat.S_ISDIR)) == 0


def without_syncing_bytes(directory: Path) -> None:
    before(directory)
    assert wait(fork(_careless, directory, stat.S_ISREG)) == 0


def _careless(directory: Path, forgets: Callable[[int], bool]) -> None:
    syncs = os.fsync
    os.fsync = lambda descriptor: None if forgets(os.fstat(descriptor).st_mode) else syncs(descriptor)
    keep(directory, SECOND)


def before(directory: Path, world: World = ALONE) -> None:
    """A run that has one checkpoint."""
    claim(directory)
    save(directory, FIRST, world)
    mark(directory, "start")


def keep_second(directory: Path) -> None:
    keep(directory, SECOND)


def start_again(directory: Path) -> None:
    shutil.rmtree(tier_of(directory).path)
    claim(directory)
    configure(directory)
    serve(directory)
    mark(directory, "started-again")


def claim(directory: Path) -> None:
    epochs.claim(Root.open(directory / "root"), RUN, fresh=False, parent=None)


def save(directory: Path, name: object, world: World = ALONE, *, local: bool = False) -> None:
    """Seal and keep in a process of its own, because a keeper changes the process it is in."""
    assert wait(fork(keep, directory, name, world, local)) == 0


def keep(directory: Path, name: object, world: World = ALONE, local: bool = False) -> None:
    """Seal, and be the keeper until all is told."""
    configure(directory, world, local=local)
    tier, slot = tier_of(directory, world.node), STEPS.index(name) % 2
    if tier.slots(world.ranks[0])[slot].read_seal() is None or name is THIRD:
        seal(tier, name, world, slot=slot)
    serve(directory, world)


def configure(directory: Path, world: World = ALONE, *, local: bool = False) -> None:
    """What the launcher does for a keeper."""
    tier, run_dir = tier_of(directory, world.node), RunDir(directory / "run")
    tier.create()
    run_dir.events(world.node).parent.mkdir(parents=True, exist_ok=True)
    KeeperConfig(
        run_dir=str(run_dir.path),
        run_id=RUN,
        root=str(directory / "root"),
        storage_options={},
        local=str(directory / "local") if local else "",
        node=world.node,
        keep_last=2,
        keep_every=None,
        drain_limit=None,
        parent=os.getppid(),
        timeout=30.0,
        token="token",
    ).write(tier)
    record = epochs.current(Root.open(directory / "root"))
    assert record is not None
    put(tier.path / "epoch.json", with_checksum(dict(record.__dict__)))


def serve(directory: Path, world: World = ALONE) -> None:
    """Be the keeper until all that is sealed is committed."""
    os.setsid()  # it gives way to other sessions, and should not make the tests' own one give way
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)  # it takes it as soon as it can, and ends when it has nothing left to do
    code = keeper_main([str(tier_of(directory, world.node).path)])
    assert code == 0, f"the keeper ended with {code}"


def tier_of(directory: Path, node: int = 0) -> Tier:
    return Tier(directory / f"memory{node}" / "tier")


def fork(function: object, *arguments: object) -> int:
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
        os._exit(0)
    except BaseException:  # the parent's stack must not be unwound here
        traceback.print_exc()
        os._exit(1)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
