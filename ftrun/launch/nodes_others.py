"""What a director knows of the other nodes: why they meet again, what they have been through, who is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING

from rich.markup import escape
from torch.distributed.elastic.multiprocessing import SignalException

from ftrun import events
from ftrun.launch import nodes_end, nodes_past
from ftrun.launch.nodes_past import Told
from ftrun.launch.nodes_story import Story
from ftrun.launch.timeline import SINCE_FAILURE
from ftrun.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from torch.distributed import Store

    from ftrun.launch.console import Console
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.nodes_group import Group
    from ftrun.launch.past import Past
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.remembering import Remembering
    from ftrun.rendezvous.model import Round as Members


class Others:
    """The other nodes of a run, for the director of one. Main thread of the agent.

    Args:
        plan: of the run.
        group: who they are.
        memory: what is remembered of each.
        console: for people.

    Attributes:
        grew: the current round was called only because nodes joined: that was no failure.
        since: from when on the seconds of a restart are counted, in words: what happened to the round before.
        story: this node's part in the post-mortems.
    """

    def __init__(self, plan: LaunchPlan, group: Group, memory: Remembering, console: Console) -> None:
        self._plan = plan
        self._group = group
        self._memory = memory
        self._console = console
        self._before: Members | None = None
        self._reason = ""
        self._step = 0
        self._decided: events.Failed | None = None
        self._node = 0
        self._told = Told()
        self._leaves = False
        self._saved = False
        self.grew = False
        self.since = SINCE_FAILURE
        self.story = Story(plan)

    @property
    def generation(self) -> int:
        """Number of the round, the same on all nodes."""
        return self._group.round.generation

    @property
    def spare(self) -> bool:
        """Whether they are at work, and this node waits. Any thread."""
        return self._group.spare

    def in_words(self, reason: str) -> str:
        """Why a round is over: of a wait in vain, whose word was waited for."""
        return nodes_end.in_vain(reason, self._group.names)[0] if nodes_end.is_in_vain(reason) else reason

    # The end of an attempt

    def disturbed(self, reason: str, step: int, phases: AbstractSet[Phase], *, grows: bool) -> None:
        """This node's workers are ended for what happened elsewhere.

        Args:
            reason: in words.
            step: how far they had come.
            phases: what they were doing: where a node is asked to leave, those of all nodes save and leave with it.
            grows: other nodes join, and the workers have saved before they left.
        """
        self._reason, self._step = reason, step
        self._saved = grows or (bool(phases) and phases <= {Phase.SAVE, Phase.END} and _is_orderly(reason))
        how = "have saved and left" if self._saved and Phase.SAVE not in phases else "are ended"
        self._console.say(f"[yellow]↻[/] {escape(reason)}: the workers here {how}, and the nodes meet again")

    def left_out(self, what: Failure, evidence: Evidence) -> str:
        """A failure has its cause on this node: why it is left out from now on; empty if it isn't."""
        why = self._memory.failed(what, evidence)
        self._leaves = bool(why)
        return why

    def decided(self, event: events.Failed) -> None:
        """This node has decided what follows from a fall; the others learn of it when they meet."""
        self._decided, self._step = event, event.step
        self.story.decided()

    # The beginning of one

    def share(
        self, store: Store, node: int, nodes: int, past: Past, *, made_a_step: bool, passed_over: set[str]
    ) -> Told:
        """Learn what the others have been through, and tell them.

        Args:
            store: of the round.
            node: this node's number in it.
            nodes: how many there are.
            past: what this node has been through; it becomes what all have.
            made_a_step: an attempt completed a step here.
            passed_over: commits that aren't resumed from any more.

        Raises:
            RoundBroken: the round is over.
        """
        self.story.share(store, node, nodes)
        mine = Told.of(past, made_a_step=made_a_step, passed_over=passed_over)
        if self._decided is not None:
            mine.fell, mine.node = dataclasses.asdict(self._decided), self._node
        self._told = nodes_past.exchange(store, node, nodes, mine)
        self._told.give(past)
        return self._told

    def begun(self, node: int, attempt: int, fallen: int | None, resumed: int | None) -> int:
        """An attempt begins: record who takes part, and what ended the one before.

        Args:
            node: this node's number from here on.
            attempt: number of the attempt.
            fallen: number of the one before, None for this launcher's first.
            resumed: step that it resumes from; None where that isn't known.

        Returns:
            Steps that are done again.
        """
        formed = self._group.round
        names = [each.name for each in formed.members]
        self.story.begun(formed, node, attempt)
        log = events.EventLog(self._plan.run_dir.events(node), attempt=attempt)
        log.write(events.Met(formed.generation, formed.reason, names, node, self._group.name, os.getpid()))
        self.grew = self._only_joined()
        lost = max(0, self._step - resumed) if resumed is not None else 0
        self.since = self._since(formed.reason, lost)
        if self._told.fell is not None and self._decided is None:
            first, *_ = str(self._told.fell["message"]).splitlines() or [""]
            self._console.say(f"[red]✗[/] {escape(first)}")
        self._console.met(formed.generation, names, formed.reason)
        self._remember(formed, names, attempt)
        if node == 0 and fallen is not None:
            self._tell(fallen, lost, len(names))
        self._before, self._node = formed, node
        self._reason, self._decided, self._step, self._saved = "", None, 0, False
        return lost

    def _since(self, reason: str, lost: int) -> str:
        if self._saved and not lost and self._told.fell is None:
            return f"all had saved ({_who(reason)})"
        return f"the change ({_who(reason)})" if self.grew else SINCE_FAILURE

    def _tell(self, fallen: int, lost: int, nodes: int) -> None:
        """The history of a run is what its first node writes: it tells what happened on others, too."""
        log = events.EventLog(self._plan.run_dir.events(), attempt=fallen)
        if self._told.fell is not None:
            if self._told.node != 0:  # or it stands there already
                log.write(dataclasses.replace(events.Failed(**self._told.fell), lost_steps=lost))
        elif self._reason and not self.grew:
            log.write(
                events.Failed(
                    cause="membership",
                    failed_rank=-1,
                    exit_code=0,
                    message=self._reason,
                    step=self._step,
                    lost_steps=lost,
                    decision=f"{nodes} nodes go on in round {self.generation}",
                    restart=True,
                    blame="infrastructure",
                    failed_node=-1,
                )
            )

    def _only_joined(self) -> bool:
        now = {each.node for each in self._group.round.members}
        return self._before is not None and now > {each.node for each in self._before.members}

    def _remember(self, formed: Members, names: list[str], attempt: int) -> None:
        if self._before is not None and self._group.hosts:
            self._remember_lost(self._before, formed)  # of the attempt that they fell in
        self._memory.begin(attempt)
        self._memory.seen(names)

    def _remember_lost(self, before: Members, formed: Members) -> None:
        here = {each.node for each in formed.members}
        words = formed.reason.split(", ")
        for each in before.members:
            # Nothing else counts: one that "starts again" may have left since, one that "did not stop in time" saves.
            gone = f"{each.name} is lost"
            if each.node not in here and gone in words:
                self._memory.lost(each.name, f"{gone}, in round {before.generation}")

    def close(self) -> None:
        """Let go of the memory, and have the story told to its end."""
        ended = self._decided is not None and not self._decided.restart and not self._leaves
        with contextlib.suppress(SignalException):  # whoever asks for the end once more doesn't want to wait for others
            self.story.close(ended=ended)
        self._memory.close()


def _is_orderly(reason: str) -> bool:
    """Whether a round is over only because nodes come or go that are well, as :mod:`ftrun.rendezvous.leader` says it.

    One that leaves for a failure of its own says nothing else; but its peers' workers don't save then.
    """
    return all(each.endswith((" left", " is excluded", " joins")) for each in _who(reason).split(", "))


def _who(reason: str) -> str:
    """Which nodes a round is over for: that another one leads now follows from it."""
    return reason.removeprefix("the rendezvous has a new host, ")
