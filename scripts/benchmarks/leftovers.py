"""What killed launchers leave in shared memory for a next start of their run, which never comes here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

_NODES = 8
"""Launchers of one run on this machine, at most, but for those that have a machine's namespaces of their own."""


def forget(below: Path) -> None:
    """Remove the snapshots of runs whose directories lie below one. Their processes have ended."""
    for tier in [*_by_keeper(below), *_by_name(below)]:
        for each in (tier.copies, tier):
            KeeperConfig.path(each).unlink(missing_ok=True)  # or it would be taken for a keeper's that is at work
        tier.remove()


def _by_keeper(below: Path) -> Iterator[Tier]:
    """Those that say of which run they are."""
    for path in Tier.of(below, 0).path.parent.glob("*/keeper.json"):
        tier = Tier(path.parent)
        found = KeeperConfig.read(tier)
        ours = found is not None and Path(os.path.realpath(found.run_dir)).is_relative_to(os.path.realpath(below))
        if ours and not tier.holds_copies:
            yield tier


def _by_name(below: Path) -> Iterator[Tier]:
    """Those of launchers that were killed before their keepers were told anything."""
    if not any(Tier.of(below, 0).path.parent.glob("*/")):
        return
    for attempts in below.glob("**/attempts/"):
        tiers = (Tier.of(attempts.parent, node) for node in range(_NODES))
        yield from (each for each in tiers if each.path.is_dir())
