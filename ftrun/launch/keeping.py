"""The node's keeper, as the agent sees it: started when workers have something to keep, and again when it dies."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs, holdings
from ftrun.checkpoint.keeper import seats
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.local import LocalTier
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.keeper.stopped import Rouser
from ftrun.checkpoint.keeper.takeover import locked
from ftrun.checkpoint.memory.outcomes import Outcomes
from ftrun.checkpoint.storage.base import why
from ftrun.launch.copies import Copies

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.holdings import Holding
    from ftrun.checkpoint.layout import Root
    from ftrun.launch.console import Console
    from ftrun.launch.gathering import Gathering
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
        self.tier, number = seats.choose(plan.run_dir.path, node)
        self._config = KeeperConfig(
            run_dir=str(plan.run_dir.path),
            run_id=plan.run_id,
            root=plan.root,
            storage_options=dict(checkpoint.options),
            local=plan.contract.local,
            node=number,
            keep_last=checkpoint.keep.last,
            keep_every=checkpoint.keep.every,
            drain_limit=checkpoint.drain_limit,
            parent=os.getpid(),
            timeout=_STORAGE_SECONDS,
            shared=plan.shared_by_nodes,
        )
        self._console = console
        self._copies = self._share() if checkpoint.peer_copies and plan.shared_by_nodes else None
        self._keeper = Keeper(
            self.tier, self._config, listening=self._copies.listening if self._copies is not None else None
        )
        self._epoch: EpochRecord | None = None
        self._node = node
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

    def _share(self) -> Copies | None:
        try:
            return Copies(self.tier, self._config)
        except OSError as error:
            self._console.warn(f"no copies of snapshots go to other nodes' memories: {why(error)}")
            return None

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
        for slot, problem in [*self.tier.damaged(), *self.tier.copies.damaged()]:
            if slot.seal not in self._damaged:
                self._damaged.add(slot.seal)
                self._console.warn(f"{slot.seal} {problem}: the snapshot in this memory is passed over")

    def holdings(self) -> list[Holding]:
        """What this node has of snapshots that aren't committed, newest first."""
        if self._foreign:
            return []
        own = holdings.of_node(self.tier, self._local(), self._config.run_id)
        # What is copied here is of this run if the node itself was in it.
        ours = self._copies is not None and epochs.told(self.tier.path) is not None
        return [*own, *self._copies.holdings()] if self._copies is not None and ours else own

    def adopt(self, attempt: str) -> None:
        """Bring the copy of a lost node's part of an attempt to the checkpoint root."""
        start = epochs.told(self.tier.path)
        if self._copies is not None and start is not None:
            try:
                self._copies.adopt(attempt, start.record, self._node)
            except OSError as error:
                self._warn(error)

    def introduce(self, gathering: Gathering) -> None:
        """Show the other nodes where copies for this one's memory go."""
        if self._copies is not None:
            gathering.introduce(self._copies.card)

    def befriend(self, gathering: Gathering, secret: str) -> None:
        """Know the next node, to whose memory this one's snapshots are copied.

        Args:
            gathering: of the round that begins.
            secret: random text that its nodes know, and nobody else.
        """
        if self._copies is not None:
            self._copies.befriend(secret, gathering.next_card())

    def drain(self) -> None:
        """Have a keeper at what lies here, before an attempt begins."""
        if not self._foreign and self.tier.path.is_dir() and self._keeper.has_work():
            self._wanted = True
            self._keeper.ensure()
            self._keeper.wake()

    def moved(self) -> str:
        """How far the keeper is: another text whenever something has moved."""
        progress = Progress.read(self.tier)
        own = "" if progress is None else f"{progress.attempt} {progress.stage} {progress.bytes_done}"
        return own if self._copies is None else f"{own} {self._copies.moved()}"

    def _local(self) -> LocalTier | None:
        config = self._config
        return LocalTier(config.local, config.node, config.run_id) if config.local else None

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
        return not self.tier.sealed() if start is None else epochs.is_noted(root, start.record)

    def _drop_what_is_left(self) -> None:
        """Drop what an earlier run in the same run directory has left on this node."""
        self.tier.remove()
        local = self._local()
        if local is not None:
            with contextlib.suppress(OSError):  # what can't be read or deleted there can't be committed either
                for work in local.works():
                    local.drop(work)

    def begin(self, record: EpochRecord, node: int) -> None:
        """An attempt begins: snapshots of earlier epochs that aren't whole will never be.

        Args:
            record: the start.
            node: number of this node in it. The tier stays where it is.
        """
        self._node = node
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
            self._keeper.begin_epoch(self._epoch, self._node)
            if self._copies is not None:
                self._copies.tell()
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
            if self._copies is not None:
                self._copies.look()
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
        adopted = self._copies.pids() if self._copies is not None else []
        return [self._keeper.pid, *adopted] if self._keeper.pid else adopted

    def finish(self, seconds: float) -> bool:
        """Have what is sealed drained and committed, and end the keeper; whether all of it is committed."""
        done = self._finish(seconds)
        return (self._copies is None or self._copies.finish(seconds, keep=not done)) and done

    def _finish(self, seconds: float) -> bool:
        if not self._wanted:
            if not self.tier.path.is_dir():
                return True
            # Workers that ended before anybody saw that they had something to keep.
            if not self.tier.sealed():
                self.tier.remove()
                return True
        return self._keeper.finish(seconds)
