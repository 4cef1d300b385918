"""``python -m ftrun.checkpoint.keeper TIER [SOCKET]``: the keeper of one node. It imports no torch.

Its settings are in ``TIER/keeper.json``, what it says goes to ``TIER/keeper.log``. SOCKET is the descriptor at which
other nodes' keepers reach it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import background, oom
from ftrun.checkpoint.keeper.codes import Code
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.keeper.inbox import Inbox
from ftrun.checkpoint.keeper.jobs import Jobs
from ftrun.checkpoint.keeper.local import LocalTier
from ftrun.checkpoint.keeper.loop import Loop
from ftrun.checkpoint.keeper.rate import Limiter
from ftrun.checkpoint.keeper.stopped import Rouser, continue_when_orphaned
from ftrun.checkpoint.keeper.takeover import locked, owns, release
from ftrun.checkpoint.memory.tier import Tier
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.checkpoint.keeper.sharing import Sharing

_log = logging.getLogger(__name__)

_NICE = 12
"""Where every core computes, each of its threads takes some 6% of one; a GiB is drained in some seconds then."""


def main(arguments: Sequence[str]) -> int:
    """Be the keeper of a tier; an exit code."""
    tier = Tier(Path(arguments[0]))
    config = KeeperConfig.read(tier)
    if config is None:
        print(f"{KeeperConfig.path(tier)} can't be read: ftrun writes it and starts the keeper", file=sys.stderr)
        return Code.USAGE
    background.give_way(_NICE)
    oom.spare_keeper()
    continue_when_orphaned()
    inbox = Inbox(tier, config.parent)
    inbox.open()
    try:
        with locked(tier.path / "keeper.lock", config.timeout, Rouser(tier).look):
            return _serve(tier, config, inbox, int(arguments[1]) if len(arguments) > 1 else None)
    except CheckpointError as error:
        _log.error("%s: does the keeper of an earlier launcher hang?", error)
        return Code.LOCKED_OUT
    except FileNotFoundError as error:
        _log.error("the memory tier is gone: %s", error)
        return Code.DONE


def _serve(tier: Tier, config: KeeperConfig, inbox: Inbox, listening: int | None) -> int:
    if not owns(tier, config):
        return Code.DONE  # it went, or to the next launcher, while this keeper waited
    inbox.listen()
    local = LocalTier(config.local, config.node, config.run_id) if config.local else None
    limiter = Limiter(config.drain_limit)
    jobs = Jobs(tier, config, local, limiter, Faults.from_environment(os.environ))
    code = Loop(jobs, inbox, _sharing(tier, config, limiter, listening)).run()
    if inbox.orphaned:
        release(tier, config)
    return code


def _sharing(tier: Tier, config: KeeperConfig, limiter: Limiter, listening: int | None) -> Sharing | None:
    """Its part in copies from memory to memory, where those are wanted."""
    if listening is None:
        return None
    from ftrun.checkpoint.keeper.sharing import Sharing  # what few need keeps no keeper's start waiting

    made = Sharing(tier, config.run_id, limiter, listening)
    made.start()
    return made


if __name__ == "__main__":
    background.main(main)
