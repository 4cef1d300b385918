"""The node's keeper, as the agent sees it: started when workers have something to keep, and again when it dies."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.local import LocalTier
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.keeper.stopped import Rouser
from ftrun.checkpoint.keeper.takeover import locked
from ftrun.checkpoint.memory.outcomes import Outcomes
from ftrun.checkpoint.memory.tier import Tier
from ftrun.checkpoint.storage.base import why

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.layout import Root
    from ftrun.launch.console import Console
    from ftrun.launch.plan import LaunchPlan


_STORAGE_SECONDS = 1500.0
"""For how long a storage may be away before a save is given up; less than what the watch allows for saving."""
_NEWS_SECONDS = 2.0
_LEAVE_SECONDS = 5.0
_OTHERS_SECONDS = 120.0


class Keeping:
    """One launcher's keeper and memory tier. Main thread of the agent.

    Attributes:
        tier: the memory tier; it exists once a keeper was wanted.
    """

    def __init__(self, plan: LaunchPlan, node: int, console: Console) -> None:
        checkpoint = plan.job.config.checkpoint
        self.tier = Tier.of(plan.run_dir.path, node)
        self._config = KeeperConfig(
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
        )
        self._keeper = Keeper(self.tier, self._config)
        self._console = console
        self._epoch: EpochRecord | None = None
        self._wanted = False
        self._foreign = False
        self._told = False
        self._tell_due = 0.0
        self._trouble = ""
        self._looked = 0.0
        self._said = ""
        self._waits_since: float | None = None
        self._damaged: set[Path] = set()
        self._outcomes = Outcomes(self.tier)

    def claim(self, root: Root) -> None:
        """What an earlier launcher's workers have left in memory is this launcher's now, if it is of this run.

        Args:
            root: the checkpoint root.
        """
        if not self.tier.path.is_dir():
            return
        try:
            self._keeper.claim()
        except OSError as error:
            self._warn(error)
        self._foreign = self._epoch is None and not self._is_of(root)
        for slot, problem in self.tier.damaged():
            if slot.seal not in self._damaged:
                self._damaged.add(slot.seal)
                self._console.warn(f"{slot.seal} {problem}: the snapshot in this memory is passed over")

    def start_over(self) -> None:
        """Have an earlier launcher's keeper stop what it does for a run that was set aside, and wait for its end."""
        if self.tier.path.is_dir():
            with contextlib.suppress(OSError):  # what it goes on with can't be taken for ours: it knows its own root
                self._keeper.claim()
                with locked(self.tier.path / "keeper.lock", _LEAVE_SECONDS, Rouser(self.tier).look):
                    pass

    def _is_of(self, root: Root) -> bool:
        """Whether the launcher that had the tier before, if it said so, has noted its epoch in this root."""
        start = epochs.told(self.tier.path)
        return not self.tier.sealed() if start is None else epochs.is_noted(root, start)

    def _drop_what_is_left(self) -> None:
        """Drop what an earlier run in the same run directory has left on this node."""
        self.tier.remove()
        if self._config.local:
            with contextlib.suppress(OSError):  # what can't be read or deleted there can't be committed either
                local = LocalTier(self._config.local, self._config.node, self._config.run_id)
                for work in local.works():
                    local.drop(work)

    def begin(self, record: EpochRecord) -> None:
        """An attempt begins: snapshots of earlier epochs that aren't whole will never be."""
        # A new lineage, too: what an earlier one has left here belongs to a run that was set aside or deleted.
        if self._foreign or (record.since == record.epoch and self._epoch is None):
            if self.tier.sealed():
                self._console.warn(
                    f"{self.tier.path} holds snapshots of an earlier run in this directory, which the checkpoint root "
                    "knows nothing of: they are dropped"
                )
            self._drop_what_is_left()
        self._foreign = False
        self._epoch, self._told, self._tell_due = record, False, 0.0
        if self.tier.path.is_dir():
            self._tell()
            # What an earlier launcher's workers sealed is drained at once, and not when the first save comes.
            self._wanted = self._wanted or bool(self.tier.sealed())
            self.look(wanted=False)

    def _tell(self) -> None:
        """Tell the keeper which epoch it is; memory that is full now may not be so later."""
        now = time.monotonic()
        if self._told or self._epoch is None or now < self._tell_due:
            return
        try:
            self._keeper.begin_epoch(self._epoch)
            self._told, self._trouble = True, ""
        except OSError as error:
            self._tell_due = now + _NEWS_SECONDS
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        reason = why(error)
        if reason != self._trouble:
            self._trouble = reason
            self._console.warn(f"the memory for snapshots, {self.tier.path}, can't be used: {reason}")

    def look(self, *, wanted: bool) -> None:
        """See that the keeper runs. Called at every turn of the monitor; cheap.

        Args:
            wanted: there are workers that take checkpoints.
        """
        self._wanted = self._wanted or (wanted and self._epoch is not None)
        if self._wanted:
            self._tell()
            self._keeper.ensure()
            self._tell_news(time.monotonic())

    def _tell_news(self, now: float) -> None:
        """Say once that the storage is away, and once that something was committed again."""
        if now - self._looked < _NEWS_SECONDS:
            return
        self._looked = now
        committed = any(each.committed for each in self._outcomes.poll())
        waiting = self._waits_for(now)
        if waiting and not self._said:
            self._said = waiting
            self._console.warn(f"checkpoints wait for {self._config.root}: {waiting}; training goes on")
        elif self._said and committed and not waiting:
            # Not before: a snapshot that was given up leaves nothing to wait for, and the storage away.
            self._said = ""
            self._console.say("[green]✓[/] the storage is back, and checkpoints drain again")

    def _waits_for(self, now: float) -> str:
        """What the keeper waits for, where that is worth a word; that nodes wait for each other is not, for a while."""
        progress = Progress.read(self.tier)
        if progress is None or not progress.waiting:
            self._waits_since = None
            return ""
        self._waits_since = now if self._waits_since is None else self._waits_since
        usual = progress.stage == "commit" and now - self._waits_since < _OTHERS_SECONDS
        return "" if usual else progress.waiting

    def pids(self) -> list[int]:
        """The keeper's process, which isn't a worker's."""
        return [self._keeper.pid] if self._keeper.pid else []

    def finish(self, seconds: float) -> bool:
        """Have what is sealed drained and committed, and end the keeper; whether all of it is committed."""
        if not self._wanted:
            if not self.tier.path.is_dir():
                return True
            # Workers that ended before anybody saw that they had something to keep.
            if not self.tier.sealed():
                self.tier.remove()
                return True
        return self._keeper.finish(seconds)
