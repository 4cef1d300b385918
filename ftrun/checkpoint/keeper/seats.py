"""Which memory tier a launcher has: its number changes, and other launchers of the run may be on the same machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.takeover import locked
from ftrun.checkpoint.memory.tier import SHARED_MEMORY, Tier, remove
from ftrun.flock import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator


_PATIENCE = 10.0


def choose(run_dir: Path, node: int, where: Path = SHARED_MEMORY) -> tuple[Tier, int]:
    """The memory tier for a launcher that has none yet, and the number under which a local tier knows its node.

    It is the one of its number, unless that is another living launcher's: one that was cut off keeps its tier while its
    number goes to the next. Where there is none, what a dead launcher of this machine has left is taken over: nodes
    that all start again are seldom numbered as before.

    Args:
        run_dir: directory of the run.
        node: number of the node.
        where: the node's shared memory.
    """
    tier = Tier.of(run_dir, node, where)
    for count in itertools.count(1):
        if not _is_held(tier):
            break
        tier = Tier.of(run_dir, f"{node}.{count}", where)
    if not tier.path.is_dir():
        tier = next((other for other in _of_run(run_dir, where) if other.sealed() and _take(other)), tier)
    found = KeeperConfig.read(tier)
    return tier, node if found is None else found.node


def _take(tier: Tier) -> bool:
    """Have what a dead launcher has left; False where another one has it."""
    with contextlib.suppress(OSError), locked(tier.path.parent, _PATIENCE):
        found = KeeperConfig.read(tier)
        if found is not None and not _is_held(tier):
            # Until the launcher takes it over in full: others that look now see that somebody has it.
            dataclasses.replace(found, parent=os.getpid(), token=found.token or "taken").write(tier)
            return True
    return False


def vacate(tier: Tier) -> bool:
    """Have a tier be nobody's, unless a keeper is at it; what lies there stays.

    Returns:
        Whether it is nobody's now.

    Raises:
        CheckpointError: somebody holds the directory above for too long.
        OSError: the tier can't be written.
    """
    if not KeeperConfig.path(tier).exists():
        return True
    with locked(tier.path.parent, _PATIENCE):
        if _is_kept(tier):
            return False
        remove(KeeperConfig.path(tier))
    return True


def clear(run_dir: Path, where: Path = SHARED_MEMORY) -> None:
    """Give back the memory that dead launchers of a finished run have left on this machine.

    Args:
        run_dir: directory of the run.
        where: the node's shared memory.
    """
    for tier in list(_of_run(run_dir, where)):
        with contextlib.suppress(OSError), locked(tier.path.parent, _PATIENCE):
            if not _is_held(tier) and not _is_kept(tier):
                if not _is_kept(tier.copies):
                    remove(KeeperConfig.path(tier.copies))
                tier.remove()


def _of_run(run_dir: Path, where: Path) -> Iterator[Tier]:
    """All tiers of a run on this machine."""
    place, real = Tier.of(run_dir, "", where).path.parent, os.path.realpath(run_dir)
    for path in sorted(place.glob("*/keeper.json")):
        found = KeeperConfig.read(Tier(path.parent))
        if found is not None and not Tier(path.parent).holds_copies and os.path.realpath(found.run_dir) == real:
            yield Tier(path.parent)


def _is_held(tier: Tier) -> bool:
    """Whether another launcher has it, and lives."""
    found = KeeperConfig.read(tier)
    if found is None or not found.token or not _is_launcher(found.parent):
        return False
    # After a container's restart another process may have the number; this one, too, and then nobody keeps the tier.
    return found.parent != os.getpid() or _is_kept(tier)


def _is_kept(tier: Tier) -> bool:
    """Whether a keeper runs there."""
    try:
        descriptor = os.open(tier.path / "keeper.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _is_launcher(pid: int) -> bool:
    """Whether a process of this machine lives that may well be a launcher, or stand in for one."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return pid == os.getpid() or any(b"ftrun" in word for word in command[:4])
