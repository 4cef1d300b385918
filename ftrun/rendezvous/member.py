"""A node's decisions: what follows from what it knows. No input, no output, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.rendezvous.model import Outcome, Phase

if TYPE_CHECKING:
    from ftrun.rendezvous.model import Call, Ending, Refusal, Round, State, Who
    from ftrun.rendezvous.preflight import Trial


@dataclass(frozen=True)
class Timing:
    """How patient a node is, in seconds.

    Attributes:
        patience: for an answer of the store.
        stall: a main thread that hasn't been seen for so long is stuck; 0 for never.
    """

    patience: float = 1.25
    stall: float = 60.0


@dataclass(frozen=True)
class Known:
    """What a node knows of the run.

    Attributes:
        state: what the leader said last.
        round: the latest round, whether this node is in it or not.
        store: where that round's store is, as its first node wrote it; empty before.
        call: why that round is over; None while it stands.
        ending: how the run ended.
        refusal: why this node can't take part.
        lobby: what a round waits for.
        moved: ``address port generation`` of the store to go to instead; empty while this one is led.
        trial: whom nodes are to try to reach.
        trouble: why the store can't be reached; empty while it can.
    """

    state: State | None = None
    round: Round | None = None
    store: str = ""
    call: Call | None = None
    ending: Ending | None = None
    refusal: Refusal | None = None
    lobby: str = ""
    moved: str = ""
    trial: Trial | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Standing:
    """Where a node stands.

    Attributes:
        phase: what it does.
        generation: the last round that it took up, 0 for none.
    """

    phase: Phase = Phase.READY
    generation: int = 0

    def take_up(self, node: str, known: Known) -> Standing:
        """Where it stands once it has seen what is known: in the latest round, if it waits for one and is in it."""
        state, formed = known.state, known.round
        if self.phase is not Phase.READY or state is None or formed is None or formed.generation != state.generation:
            return self
        if formed.generation <= self.generation or formed.rank_of(node) is None:
            return self
        # A round that is over before it was taken up is only noted: the leader waits for nobody to stop workers in it.
        return Standing(Phase.READY if state.called else Phase.RUNNING, formed.generation)

    def disturbance(self, known: Known) -> str:
        """Why its workers can't go on, in words; empty while they can, or where there are none."""
        state = known.state
        if self.phase not in (Phase.RUNNING, Phase.FINISHED) or state is None:
            return ""
        if known.ending is not None:
            return known.ending.reason if known.ending.outcome is Outcome.FAILED else ""
        if known.refusal is not None:
            return known.refusal.reason
        if known.trouble:
            return f"this node is cut off: {known.trouble}"
        if state.called:
            return known.call.reason if known.call is not None else "a new round is called"
        return "" if state.generation == self.generation else "the others went on without this node"


@dataclass(frozen=True)
class Inheritance:
    """What a leader takes over from the one before it.

    Attributes:
        last: the latest round.
        host: the node that hosted the rendezvous and is lost.
        left: members that left on purpose.
        succession: how many leaders there were before.
        silent: its host didn't answer, so that it may live on where it can't be reached from here.
    """

    last: Round
    host: str
    left: tuple[str, ...]
    succession: int
    silent: bool = False


def heirs(known: Known, host: str) -> list[Who]:
    """Who may lead after a host that is lost, in the order in which they are asked.

    All nodes ask in the same order, that of the latest round, so that they come together at the first one that lives.

    Args:
        known: what a node knows.
        host: the node that hosted the rendezvous.
    """
    left = known.call.left if known.call is not None else ()
    members = known.round.members if known.round is not None else ()
    return [each for each in members if each.node != host and each.node not in left and each.port]
