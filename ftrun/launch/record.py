"""What is kept and said of each attempt: events, the post-mortem, and words on the console."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import events, inject
from ftrun.launch.console import Fall, Start
from ftrun.launch.evidence import postmortem
from ftrun.launch.nodes_log import NodeLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.launch.console import Console
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.policy import Decision
    from ftrun.launch.rounds import Round


class Record:
    """Keeps the record of one launcher. Main thread of the agent."""

    def __init__(self, plan: LaunchPlan, log: events.EventLog, console: Console) -> None:
        self._plan = plan
        self._log = self._own_log = log
        self._console = console
        self._attempt = 0
        self._node = 0
        self._local_ranks: dict[int, int] = {}
        self._fallen: int | None = None
        self._fired: frozenset[int] = frozenset()

    def begin(self, attempt: int, node: int) -> None:
        """What follows is of this attempt."""
        self._attempt, self._node = attempt, node
        if isinstance(self._own_log, NodeLog):
            self._own_log.settle(node)
        self._log = events.EventLog(self._plan.run_dir.events(node), attempt=attempt)
        self._fired = inject.fired(self._plan.contract)

    def started(self, current: Round, pids: Mapping[int, int], world_size: int, *, session: bool) -> None:
        """The workers are running.

        Args:
            current: what was settled for the attempt.
            pids: of the workers, by global rank.
            world_size: number of workers on all nodes.
            session: the attempt before had a Session.
        """
        self._local_ranks = {rank: local_rank for local_rank, rank in enumerate(sorted(pids))}
        self._log.write(
            events.AttemptStarted(
                epoch=current.epoch,
                world_size=world_size,
                resume=current.resume,
                resume_step=current.resume_step,
                pids={str(rank): int(pid) for rank, pid in pids.items()},
            )
        )
        first = current.attempt == 1
        start = Start(current.resume, current.resume_step, current.resume_world, first=first, session=session)
        self._console.attempt_started(current.attempt, world_size, start)

    def stopped(self, what: Failure, decision: Decision, where: str) -> None:
        """The workers left because they were asked to."""
        self._console.failed(what, decision, Fall(self._attempt, where, 0, Path(), shown=True))

    def failed(
        self, what: Failure, decision: Decision, evidence: Evidence, *, step: int, lost: int, where: str
    ) -> events.Failed:
        """The attempt is over: written down first, then said."""
        what = self._as_scripted(what)
        event = events.Failed(
            cause=what.kind.value,
            failed_rank=what.rank,
            exit_code=what.exit_code,
            message=what.message,
            step=step,
            lost_steps=lost,
            decision=decision.reason,
            restart=decision.restart,
            victims=list(what.victims),
            fingerprint=what.fingerprint,
            blame=what.blame,
            failed_node=what.node,
        )
        self._log.write(event)
        report = postmortem.write(self._plan.run_dir, self._attempt, what, decision, evidence)
        self._fallen = self._attempt
        log = self._plan.run_dir.worker(self._attempt, self._node, what.rank) / "stderr.log"
        tee = self._plan.job.config.logs.tee
        shown = tee == "all" or self._local_ranks.get(what.rank) in tee
        self._console.failed(what, decision, Fall(self._attempt, where, lost, log, shown, report))
        return event

    def _as_scripted(self, what: Failure) -> Failure:
        """Say of the failure of an attempt in which scripted faults have fired that it was injected."""
        contract = self._plan.contract
        new = [contract.faults[index] for index in sorted(inject.fired(contract) - self._fired)]
        if not new:
            return what
        head, *rest = what.message.split("\n")
        told = ", ".join(f"{each.do} at step {each.at_step} on rank {each.rank}" for each in new)
        return replace(what, message="\n".join([f"{head} (injected: {told})", *rest]))

    def recovered(
        self,
        seconds: Mapping[str, float],
        lost: int,
        step: int | None,
        read: Mapping[str, int],
        *,
        since: str,
        failure: bool,
    ) -> None:
        """The attempt after a failure, or after a change of nodes that was none, has completed its first step."""
        if failure:
            total = sum(seconds.values())
            self._log.write(events.Recovered(total, seconds=dict(seconds), lost_steps=lost, read=dict(read)))
        self._console.training_again(step, seconds, lost, read, since=since)
        if self._fallen is not None:
            postmortem.append_restart(self._plan.run_dir, self._fallen, seconds, lost, self._node, read)
            self._fallen = None
