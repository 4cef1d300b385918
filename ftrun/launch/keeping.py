"""The node's keeper, as the agent sees it: started when workers have something to keep, and again when it dies."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.launch.console import Console
    from ftrun.launch.plan import LaunchPlan


_STORAGE_SECONDS = 1500.0
"""For how long a storage may be away before a save is given up; less than what the watch allows for saving."""
_NEWS_SECONDS = 2.0


class Keeping:
    """One launcher's keeper and memory tier. Main thread of the agent.

    Attributes:
        tier: the memory tier; it exists once a keeper was wanted.
    """

    def __init__(self, plan: LaunchPlan, node: int, console: Console) -> None:
        checkpoint = plan.job.config.checkpoint
        self.tier = Tier.of(plan.run_dir.path, node)
        self._keeper = Keeper(
            self.tier,
            KeeperConfig(
                run_dir=str(plan.run_dir.path),
                run_id=plan.run_id,
                root=plan.root,
                storage_options=dict(checkpoint.options),
                local=plan.contract.local,
                node=node,
                keep_last=checkpoint.keep.last,
                keep_every=checkpoint.keep.every,
                drain_limit=checkpoint.drain_limit,
                parent=os.getpid(),
                timeout=_STORAGE_SECONDS,
            ),
        )
        self._console = console
        self._epoch: EpochRecord | None = None
        self._wanted = False
        self._looked = 0.0
        self._said = ""

    def claim(self) -> None:
        """What an earlier launcher's workers have left in memory is this launcher's now."""
        if self.tier.path.is_dir():
            self._keeper.claim()

    def begin(self, record: EpochRecord) -> None:
        """An attempt begins: snapshots of earlier epochs that aren't whole will never be."""
        if record.since == record.epoch and self._epoch is None:
            # A new lineage: what an earlier one has left in memory belongs to a run that was set aside.
            self.tier.remove()
        self._epoch = record
        if self.tier.path.is_dir():
            self._keeper.begin_epoch(record)
            # What an earlier launcher's workers sealed is drained at once, and not when the first save comes.
            self._wanted = self._wanted or bool(self.tier.sealed())
            self.look(wanted=False)

    def look(self, *, wanted: bool) -> None:
        """See that the keeper runs. Called at every turn of the monitor; cheap.

        Args:
            wanted: there are workers that take checkpoints.
        """
        if wanted and not self._wanted and self._epoch is not None:
            self._wanted = True
            self.tier.create()
            self._keeper.begin_epoch(self._epoch)
        if self._wanted:
            self._keeper.ensure()
            self._tell_news(time.monotonic())

    def _tell_news(self, now: float) -> None:
        """Say that the storage is away, and that it is back."""
        if now - self._looked < _NEWS_SECONDS:
            return
        self._looked = now
        progress = Progress.read(self.tier)
        # For the other nodes a commit always waits a little.
        waiting = progress.waiting if progress is not None and progress.stage != "commit" else ""
        if waiting and not self._said:
            self._console.warn(f"checkpoints wait for the storage: {waiting}; training goes on")
        elif self._said and not waiting:
            self._console.say("[green]✓[/] the storage is back, and checkpoints drain again")
        self._said = waiting

    def pids(self) -> list[int]:
        """The keeper's process, which isn't a worker's."""
        return [self._keeper.pid] if self._keeper.pid else []

    def finish(self, seconds: float) -> bool:
        """Have what is sealed drained and committed, and end the keeper; whether all of it is committed."""
        if not self._wanted:
            return True
        return self._keeper.finish(seconds)
