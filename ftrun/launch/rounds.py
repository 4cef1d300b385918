"""How an attempt begins: one answer for all ranks, published by the leader and obeyed by every agent."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs, layout, reader
from ftrun.errors import FtrunError, NoValidCheckpoint, UsageError
from ftrun.goodput import history
from ftrun.launch import plan as plans

if TYPE_CHECKING:
    from torch.distributed import Store

    from ftrun.checkpoint.reader import Commit
    from ftrun.contract import WorkerContract
    from ftrun.launch.console import Console
    from ftrun.launch.plan import LaunchPlan


_KEY = "ftrun/round"
"""Where the leader publishes it, in a store or a part of one that is new for each round. A node that joins late has
begun fewer rounds than the others."""


@dataclass(frozen=True)
class Round:
    """What is settled for one attempt.

    Attributes:
        epoch: fencing epoch.
        since: epoch at which the lineage of commits began.
        attempt: number of the attempt.
        resume: name of the commit to resume from, or None.
        resume_step: its step.
        resume_world: how many ranks wrote it.
        starts: how many times the worker group was started before, by the leader's launcher.
        error: why there is no attempt, for the other nodes.
    """

    epoch: int
    since: int
    attempt: int
    resume: str | None
    resume_step: int
    resume_world: int | None
    starts: int = 0
    error: str | None = None


class Rounds:
    """Settles each attempt of one launcher. Main thread of the agent."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._root = layout.Root.open(plan.root)
        self._begun = 0
        self._passed_over: set[str] = set()
        self._warned: set[str] = set()
        self.node = 0
        self.current: Round | None = None

    def begin(self, store: Store, node: int) -> Round:
        """Settle epoch, attempt and commit for the attempt that is about to start.

        The leader (node 0) decides and publishes; the others obey.

        Raises:
            NoValidCheckpoint: commits exist and none is whole.
            UsageError: the checkpoint root can't be used.
        """
        self._begun += 1
        self.node = node
        if node == 0:
            self.current = self._lead(store)
        else:
            self.current = Round(**json.loads(store.get(_KEY)))
            if self.current.error is not None:
                raise UsageError(self.current.error)
        return self.current

    def _lead(self, store: Store) -> Round:
        try:
            chosen = self._choose()
        except FtrunError as error:
            store.set(_KEY, json.dumps(Round(0, 0, 0, None, 0, None, error=str(error)).__dict__))
            raise
        store.set(_KEY, json.dumps(chosen.__dict__))
        return chosen

    def _choose(self) -> Round:
        fresh = self._plan.fresh and self._begun == 1
        commit = None if fresh else self.latest()
        if commit is None and not fresh:
            self._require_no_commit_is_lost()
        name = str(commit.name) if commit else None
        record = epochs.claim(self._root, self._plan.run_id, fresh=fresh, parent=name)
        number = self._plan.run_dir.next_attempt()
        if commit is None:
            return Round(record.epoch, record.since, number, None, 0, None, self._begun - 1)
        world = commit.manifest.world_size
        return Round(record.epoch, record.since, number, name, commit.name.step, world, self._begun - 1)

    def latest(self, *, further_back: bool = False) -> Commit | None:
        """The commit to resume from; None where this run has none.

        Args:
            further_back: the one before that, without passing it over for good.
        """
        exclude = set(self._passed_over)
        choice = reader.resume_point(self._root, self._plan.run_id, exclude=exclude)
        for name, reason in choice.skipped:
            if name not in self._warned and name not in self._passed_over:
                self._warned.add(name)
                self._console.warn(f"checkpoint {name} is passed over: {reason}")
        if further_back and choice.commit is not None:
            exclude.add(str(choice.commit.name))
            return reader.resume_point(self._root, self._plan.run_id, exclude=exclude).commit
        return choice.commit

    def pass_over(self, name: str) -> None:
        """Don't resume from a commit again in this launcher's life."""
        self._passed_over.add(name)

    def mark_bad(self, name: str, why: str) -> None:
        """Note, for every launcher, that a commit's bytes are not what was committed."""
        self._passed_over.add(name)
        reader.mark_bad(self._root, name, why)

    def _require_no_commit_is_lost(self) -> None:
        """The run's own events remember commits that the root doesn't show: it was emptied, or isn't mounted."""
        commits = history.load(self._plan.run_dir).commits
        if commits:
            raise NoValidCheckpoint(plans.lost_commits(self._plan.run_id, commits[-1].step, self._plan.root))

    def contract(self) -> WorkerContract:
        """What the workers of the current attempt are told."""
        current = self.current
        if current is None:
            raise AssertionError("a round begins before its workers are told of it")
        return replace(
            self._plan.contract,
            attempt=current.attempt,
            epoch=current.epoch,
            since=current.since,
            resume=current.resume,
            node=self.node,
        )
