"""Who a memory tier belongs to when launchers of one run follow each other closely.

A keeper whose launcher is gone finishes what is sealed and removes the tier, unless the next launcher has put its own
``keeper.json`` there: then it leaves both to that one's keeper. A lock on the directory above makes this one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.memory.files import own
from ftrun.checkpoint.memory.tier import Tier
from ftrun.errors import CheckpointError
from ftrun.flock import try_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


_PATIENCE = 10.0


def claim(tier: Tier, config: KeeperConfig) -> None:
    """Make the tier, if need be, and have it from now on.

    Raises:
        CheckpointError: somebody holds the directory above for too long.
        PermissionError: a directory is another user's.
        OSError: it can't be made.
    """
    own(tier.path.parent)
    with _guarded(tier):
        tier.create()
        if KeeperConfig.read(tier) != config:
            config.write(tier)


def disown(tier: Tier) -> None:
    """Take the tier from whoever has it: the next one to claim it finds what lies there, and nobody removes it.

    Raises:
        CheckpointError: somebody holds the directory above for too long.
    """
    with _guarded(tier):
        found = KeeperConfig.read(tier)
        if found is not None:
            dataclasses.replace(found, token="").write(tier)


def owns(tier: Tier, config: KeeperConfig) -> bool:
    """Whether the tier is still this launcher's."""
    found = KeeperConfig.read(tier)
    return found is not None and found.token == config.token


def release(tier: Tier, config: KeeperConfig) -> bool:
    """Remove the tier if it is still this launcher's; whether it was."""
    if not tier.path.exists():
        return False
    with _guarded(tier):
        if not owns(tier, config):
            return False
        gone = tier.path.with_name(f".{tier.path.name}.{os.getpid()}.gone")
        tier.path.rename(gone)
    Tier(gone).remove()
    if not tier.holds_copies and KeeperConfig.read(tier.copies) is None:
        tier.copies.remove()
    return True


@contextlib.contextmanager
def _guarded(tier: Tier) -> Iterator[None]:
    with locked(tier.path.parent, _PATIENCE):
        yield


@contextlib.contextmanager
def locked(path: Path, patience: float, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the kernel's lock on a file or directory; it goes with the process, however that ends.

    Args:
        path: a directory, or a file, which is made if need be.
        patience: seconds to wait for it.
        meanwhile: called again and again while it waits.

    Raises:
        CheckpointError: somebody else holds it for longer.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + patience
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise CheckpointError(f"somebody else has held {path} for {patience:g} s")
            meanwhile()
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)
