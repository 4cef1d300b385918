"""How an attempt begins: one answer for all ranks, published by the leader and obeyed by every agent."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint import common, epochs, reader, resuming
from ftrun.checkpoint.keeper.commit import roll_forward
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.storage.base import UnreachableError, why
from ftrun.checkpoint.storage.retry import Patience
from ftrun.config.units import format_duration
from ftrun.errors import CheckpointError, FtrunError, NoValidCheckpoint, UsageError
from ftrun.goodput import history
from ftrun.launch import nodes_apart
from ftrun.launch import plan as plans
from ftrun.launch.bringing_in import BringingIn
from ftrun.launch.gathering import Gathering
from ftrun.launch.keeping import Keeping
from ftrun.launch.slow_root import told_if_slow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.holdings import Holding
    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.checkpoint.resuming import ResumePoint
    from ftrun.contract import WorkerContract
    from ftrun.launch.console import Console
    from ftrun.launch.plan import LaunchPlan


_SOON = Patience(deadline=5.0, hang=5.0)

_ROOT_SECONDS, _ROOT_SECONDS_OF_MANY, _ROOT_PAUSE = 600.0, 240.0, 2.0
"""For how long a restart waits for the checkpoint root; less where other nodes wait at a store meanwhile."""

_KEY = "ftrun/round"
"""Where the leader publishes it, in a store or a part of one that is new for each round. A node that joins late has
begun fewer rounds than the others."""


class _RootIsEmpty(NoValidCheckpoint):
    """It lacks what the run remembers of it: it is away, or was emptied."""


@dataclass(frozen=True)
class Round:
    """What is settled for one attempt.

    Attributes:
        epoch: fencing epoch.
        since: epoch at which the lineage of commits began.
        attempt: number of the attempt.
        resume: name of the checkpoint to resume from, or None.
        resume_step: its step.
        resume_world: how many ranks wrote it.
        resume_sealed: it is a snapshot in memory that isn't committed yet.
        start: random text of this attempt.
        starts: how many times the worker group was started before, by the leader's launcher.
        host: machine of the leader's launcher.
        pid: its process.
        error: why there is no attempt, for the other nodes.
        mistake: it is the user's.
    """

    epoch: int
    since: int
    attempt: int
    resume: str | None
    resume_step: int
    resume_world: int | None
    resume_sealed: bool = False
    start: str = ""
    starts: int = 0
    host: str = ""
    pid: int = 0
    error: str | None = None
    mistake: bool = True


class Rounds:
    """Settles each attempt of one launcher. Main thread of the agent."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._root = plan.open_root()
        self._begun = 0
        self._founds = True
        self._passed_over: set[str] = set()
        self._warned: set[str] = set()
        self._nodes = 1
        self._starts: int | None = None
        self.node = 0
        self.current: Round | None = None
        self.keeping: Keeping | None = None

    def begin(self, store: Store, node: int, nodes: int, generation: int | None = None) -> Round:
        """Settle epoch, attempt and commit for the attempt that is about to start.

        The leader (node 0) decides and publishes; the others obey.

        Args:
            store: of the round.
            node: this node's number in it.
            nodes: how many there are.
            generation: the round's number among all of the run, where nodes count them.

        Raises:
            NoValidCheckpoint: commits exist and none is whole.
            UsageError: the checkpoint root can't be used.
        """
        self._begun += 1
        if self._begun == 1:  # who joins later doesn't begin a run anew, whatever its command line says
            self._founds = generation in (None, 1)
        self.node, self._nodes = node, nodes
        self._starts = generation - 1 if generation is not None else None
        # The tier keeps the number that this launcher had first: workers and keeper find each other there.
        self.keeping = self.keeping or Keeping(self._plan, node, self._console)
        gathering = Gathering(store, node, nodes)
        self.keeping.introduce(gathering)
        if node == 0:
            self.current = self._lead(store, gathering)
        else:
            self._say_what_is_here(self.keeping, gathering)
            told = Round(**json.loads(gathering.await_decision(_KEY, self.keeping.moved, self.keeping.adopt)))
            if told.error is not None:
                raise (UsageError if told.mistake else CheckpointError)(told.error)
            self.current = told
            if not self._plan.shares_run_dir:
                self._plan.run_dir.enter_attempt(told.attempt, node)
        self.keeping.befriend(gathering, self.current.start)
        self.keeping.begin(self._epoch_record(self.current), node)
        return self.current

    def _say_what_is_here(self, keeping: Keeping, gathering: Gathering) -> None:
        """Another node than the leader has its memory drained, and says what lies there."""
        held: list[Holding] = []
        try:
            if self._starts_over:
                keeping.start_over()
            else:
                keeping.claim(self._root)
                keeping.drain()
                held = keeping.holdings()
        except (FtrunError, OSError) as error:  # the leader says more of it, if the root is away for all
            self._console.warn(f"what lies in this node's memory can't be told: {error}")
        gathering.report(held, keeping.moved())

    @property
    def _starts_over(self) -> bool:
        """Whether this attempt is the first one of a run that is to begin anew."""
        return self._plan.fresh and self._founds and self.current is None

    def _epoch_record(self, current: Round) -> EpochRecord:
        return epochs.EpochRecord(
            current.epoch, self._plan.run_id, current.since, current.resume, current.host, current.pid, ""
        )

    def _lead(self, store: Store, gathering: Gathering) -> Round:
        try:
            chosen = self._choose_patiently(gathering)
        except FtrunError as error:
            mistake = isinstance(error, UsageError)
            store.set(_KEY, json.dumps(Round(0, 0, 0, None, 0, None, error=str(error), mistake=mistake).__dict__))
            raise
        store.set(_KEY, json.dumps(chosen.__dict__))
        return chosen

    def _choose_patiently(self, gathering: Gathering) -> Round:
        """A root that this launcher or others have used before may be away for a while: a restart waits for it."""
        patience = _ROOT_SECONDS if self._nodes == 1 else _ROOT_SECONDS_OF_MANY
        deadline = time.monotonic() + (patience if self._begun > 1 or not self._founds else 0.0)
        said = False
        while True:
            try:
                with told_if_slow(self._console.warn, self._root):
                    self._take_stock()
                self._bring_in(gathering)
                with told_if_slow(self._console.warn, self._root):
                    chosen = self._choose(gathering)
            except (FtrunError, OSError) as error:
                if not _may_pass(error) or time.monotonic() >= deadline:
                    if isinstance(error, FtrunError):
                        raise
                    raise _unusable(error, self._root) from error
                if not said:
                    self._console.warn(f"{error}; the restart waits for it, at most {format_duration(patience)}")
                said = True
                time.sleep(_ROOT_PAUSE)
            else:
                if said:
                    self._console.say("[green]✓[/] the checkpoint root is back")
                return chosen

    def _take_stock(self) -> None:
        """See what earlier starts have left, here and in the root."""
        self._require_the_root_we_know()
        if self.keeping is None:
            return
        if self._starts_over:
            self.keeping.start_over()
            return
        self.keeping.claim(self._root)
        if self._begun == 1 or self._nodes > 1:  # later on this launcher's own keeper is at it
            self._roll_forward()

    def _bring_in(self, gathering: Gathering) -> None:
        """Have what lies in the memories of several nodes committed."""
        if self.keeping is not None and not self._starts_over:
            work = BringingIn(self._root, self._plan.run_id, self.keeping, gathering, self._console.say)
            self._warn_of(list(work.all_but(self._passed_over).items()))

    def _choose(self, gathering: Gathering) -> Round:
        fresh = self._starts_over
        point = None if fresh else self.latest()
        if point is None and not fresh:
            self._require_no_commit_is_lost()
        name = str(point.name) if point else None
        # The root may have been waited for: an epoch after that of those who went on would keep them from committing.
        gathering.require_standing()
        record = epochs.claim(self._root, self._plan.run_id, fresh=fresh, parent=name)
        chosen = Round(
            epoch=record.epoch,
            since=record.since,
            # Where nodes share no run directory, the others may have numbers there that this node has never seen.
            attempt=self._plan.run_dir.next_attempt(1 if self._plan.shares_run_dir else record.epoch),
            resume=name,
            resume_step=0,
            resume_world=None,
            start=secrets.token_hex(8),
            starts=self._starts if self._starts is not None else self._begun - 1,
            host=record.host,
            pid=record.pid,
        )
        if point is None:
            return chosen
        return replace(chosen, resume_step=point.name.step, resume_world=point.world_size, resume_sealed=point.sealed)

    def _require_the_root_we_know(self) -> None:
        """A restart finds the note of the start before; without it another one would begin from nothing.

        A node that leads for the first time may have waited for hours, and its own events remember no commit.
        """
        if not self._plan.shares_run_dir and not nodes_apart.is_known(self._plan.run_dir, self._root):
            self._root.epochs()  # what can't even be listed says why
            raise _RootIsEmpty(
                f"{self._root.url} is not the checkpoint root that this node found when it started: is it mounted?"
            )
        if self.current is not None and not epochs.is_noted(self._root, self._epoch_record(self.current)):
            self._root.epochs()  # what can't even be listed says why
            raise _RootIsEmpty(
                f"the checkpoint root {self._root.url} lacks the note of epoch {self.current.epoch}, with which the "
                "workers were started: is it mounted?"
            )

    def _roll_forward(self) -> None:
        """Commit what every node has written before the leader died."""
        record = epochs.require_free_or_ours(self._root, self._plan.run_id)
        if record is not None:
            if self._nodes == 1:  # others of this run may be on the same machine, and are nodes of it
                self._warn_of_another_launcher(record)
            before = epochs.newest(self._root) + 1
            roll_forward(self._root, self._plan.run_id, since=record.since, before=before, faults=Faults())

    def _warn_of_another_launcher(self, record: EpochRecord) -> None:
        """Two launchers of one run, each in a run directory of its own, do no harm but double work."""
        if record.host == socket.gethostname() and record.pid != os.getpid() and _is_launcher(record.pid):
            self._console.warn(
                f"another launcher of this run (pid {record.pid}) still runs, and uses the same checkpoint root: what "
                "it commits from now on is passed over. Stop one of them"
            )

    def latest_soon(self) -> ResumePoint | None:
        """As :meth:`latest`, for one who is about to leave: a remote root is asked for some seconds only.

        Raises:
            CheckpointError: it can't be read.
        """
        root = self._plan.open_root(_SOON) if self._root.remote else self._root
        return resuming.choose(root, self._plan.run_id, self._tier, exclude=self._passed_over).point

    def latest(self, *, further_back: bool = False) -> ResumePoint | None:
        """What to resume from, a commit or a later snapshot in memory; None where this run has neither.

        Args:
            further_back: the one before that, without passing it over for good.
        """
        newest = self._newest(self._passed_over)
        if further_back and newest is not None:
            return self._choice({*self._passed_over, str(newest.name)}).point  # a question: nothing is passed over yet
        return newest

    def _newest(self, exclude: set[str]) -> ResumePoint | None:
        choice = self._choice(exclude)
        self._warn_of(choice.skipped)
        return choice.point

    def _choice(self, exclude: set[str]) -> resuming.Choice:
        return resuming.choose(self._root, self._plan.run_id, self._tier, exclude=exclude)

    @property
    def _tier(self) -> Tier | None:
        return self.keeping.tier if self.keeping is not None and self._nodes == 1 else None

    def _warn_of(self, skipped: Sequence[tuple[str, str]]) -> None:
        for name, reason in skipped:
            if name not in self._warned and name not in self._passed_over:
                self._warned.add(name)
                self._console.warn(f"checkpoint {name} is passed over: {reason}")

    @property
    def passed_over(self) -> set[str]:
        """Commits that this launcher doesn't resume from any more."""
        return set(self._passed_over)

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
            raise _RootIsEmpty(plans.lost_commits(self._plan.run_id, commits[-1].step, self._plan.root))

    def note_finished(self) -> None:
        """All is done: nodes that share no run directory learn it from the checkpoint root. The first node says it."""
        if self._plan.shares_run_dir or self.node != 0 or self.current is None:
            return
        try:
            common.note_finished(self._root, self._plan.run_id, self.current.epoch)
        except OSError as error:
            self._console.warn(
                f"{self._root.url} doesn't know that the run is finished ({why(error)}): the same command on all nodes "
                "goes through its last checkpoint once more"
            )

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
            resume_sealed=current.resume_sealed,
            start=current.start,
            node=self.node,
            tier=str(self.keeping.tier.path) if self.keeping is not None else "",
            **self._past(),
        )

    def _past(self) -> dict[str, Any]:
        """What the choice of an interval needs to know of the run's life so far."""
        past = history.load(self._plan.run_dir)
        theirs = [fall for fall in past.falls if fall.what.blame not in ("code", "data")]
        return {"failures": len(theirs), "uptime": max(0.0, past.last_time - past.started)}


def _is_launcher(pid: int) -> bool:
    """Whether a process of this machine lives that may well be a launcher."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(b"ftrun" in word for word in command[:4])


def _may_pass(error: Exception) -> bool:
    """Whether it may be that the root is only away."""
    away = isinstance(error, _RootIsEmpty | UnreachableError) or not isinstance(error, FtrunError)
    return away or isinstance(error.__cause__, OSError)


def _unusable(error: Exception, root: Root) -> CheckpointError:
    """What a filesystem says doesn't tell what it was needed for."""
    file = getattr(error, "filename", None)
    where = "" if file is None else f"{os.fsdecode(file)}: "
    return CheckpointError(
        f"checkpoint root {root.url} can't be used ({where}{why(error)}): check the storage and start again"
    )
