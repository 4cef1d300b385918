"""The memory of nodes as the agent uses it: what happens is noted, and a node that was left out doesn't join."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from ftrun.config.health import Nodes, part
from ftrun.health import checking, policy
from ftrun.health.marks import Mark, Sign
from ftrun.health.memory import About, NodeMemory
from ftrun.health.nodes_file import NodesFile
from ftrun.health.standing import Rules, State
from ftrun.launch import nodes_patience
from ftrun.launch.failures import against_node
from ftrun.launch.holding_back import HoldingBack
from ftrun.launch.nodes_choice import number_of_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ftrun.health.memory import Note, Tell
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.plan import LaunchPlan

_DECIDE_SECONDS = 2.0
_JOIN_SECONDS = 5.0


def rules(nodes: Nodes) -> Rules:
    """What a job file says of its nodes."""
    return Rules(
        after=MappingProxyType({Sign(name): times for name, times in nodes.after.model_dump().items()}),
        exclude=nodes.exclude,
        window=nodes.window.total_seconds(),
        first=nodes.first.total_seconds(),
        longest=nodes.max.total_seconds(),
        most=part(nodes.most),
        check=nodes.check,
        probation=nodes.probation.total_seconds(),
    )


def open_memory(plan: LaunchPlan, report: Callable[[str], None], note: Note | None = None) -> Remembering:
    """The memory of a run's nodes, for one launcher of it. Nothing is read or started yet.

    Args:
        plan: of the run.
        report: is told in words what is decided, on a thread of its own.
        note: is given the same as entries, each with the host that it is about; on that thread.
    """
    least, _ = number_of_nodes(str(plan.launch["nnodes"].value))
    about = About(plan.node_name, rules(plan.job.config.health.nodes), least)
    memory = NodeMemory(NodesFile(plan.run_dir.nodes, report), about, report, note=note)
    return Remembering(memory, about, report)


class Remembering:
    """One launcher's part in the memory of nodes. Main thread of the agent; no call raises, or waits for long.

    Args:
        memory: of the run's nodes.
        about: the launcher and its job.
        report: is told in words what is done here.
    """

    def __init__(self, memory: NodeMemory, about: About, report: Callable[[str], None]) -> None:
        self._memory = memory
        self._about = about
        self._report = report
        self._attempt = 0
        self._held_back: HoldingBack | None = None

    def may_join(self) -> str:
        """Whether this node may take part: empty, or why not. Before the first rendezvous.

        A node whose exclusion is over is checked under load first, which takes some seconds, a minute at most.
        """
        where = self._memory.own_standing(_JOIN_SECONDS)
        if where.state is State.DUE:
            self._report("this node was excluded, and its time is over: checking it under load")
            found = checking.run(self._about.check_seconds)
            self._memory.checked(found.trouble, _JOIN_SECONDS)
            self._report(f"check under load: {found}")
            if not found.trouble:
                return ""
            where = self._memory.own_standing(_JOIN_SECONDS)
            if where.exclusion is None:
                return f"{self._about.host} failed the check of a node that comes back: {found.trouble}"
        if where.state in (State.EXCLUDED, State.DUE) and where.exclusion is not None:
            return policy.told(self._about.host, where.exclusion, where.left)
        return ""

    def start(
        self, exclude: Tell, members: Callable[[], Collection[str]], grace: float, *, shared: bool = True
    ) -> None:
        """Begin to say who is left out: whenever it changes, and whoever has changed it.

        Of a node that takes part it is said when that one has left in order, or has had time enough for it.

        Args:
            exclude: takes hosts and reasons, all of them each time; called on a thread of its own.
            members: host names of the round that stands.
            grace: seconds that workers get to leave in order.
            shared: all nodes of the run have this memory.
        """
        patience = nodes_patience.to_leave(grace)
        self._held_back = HoldingBack(exclude, members, self._about.host, patience, shared=shared)
        self._memory.start(self._held_back.told)

    @property
    def left_out(self) -> str:
        """Why this node, which takes part, is to leave; empty while it isn't."""
        return self._held_back.own if self._held_back is not None else ""

    def begin(self, attempt: int) -> None:
        """What follows is of this attempt."""
        self._attempt = attempt

    def seen(self, hosts: Iterable[str]) -> None:
        """These take part, or wait to; the first first."""
        self._memory.seen(hosts)

    def failed(self, what: Failure, evidence: Evidence) -> str:
        """A failure has its cause on this node.

        Returns:
            Why this node is left out from now on; empty if it isn't.
        """
        mark = against_node.read(what, evidence, self._attempt)
        if mark is None:
            return ""
        self._memory.mark(self._about.host, mark, _DECIDE_SECONDS)
        where = self._memory.own_standing(0.0)
        if where.state is not State.EXCLUDED or where.exclusion is None:
            return ""
        return policy.in_short(self._about.host, where.exclusion)

    def lost(self, host: str, why: str) -> None:
        """A node was lost without notice. By the leader."""
        self._memory.mark(host, Mark(Sign.LOST, why, self._attempt))

    def excluded(self, within: float = 0.0) -> dict[str, str]:
        """Who is left out, and why; see :meth:`NodeMemory.excluded`."""
        return self._memory.excluded(within)

    def close(self) -> None:
        """End its threads; three seconds at most."""
        self._memory.close()
        if self._held_back is not None:
            self._held_back.close()
