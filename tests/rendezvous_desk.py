"""A leader of a rendezvous at its desk: records as nodes would write them go in, what it decides comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ftrun.rendezvous.actions import Action, Formed, Observation
from ftrun.rendezvous.leader import Leader
from ftrun.rendezvous.model import Beat, Phase, Round, Terms, Who

LOOK = 0.05
TRAITS = {"torch": "2.13.0", "workers on a node": "8"}


def who(node: str, **traits: str) -> Who:
    return Who(node, f"host-{node}", f"10.0.0.{node[1:] or 9}", 77, {**TRAITS, **traits})


@dataclass
class Desk:
    """A leader, and records as nodes would write them."""

    terms: Terms
    leader: Leader = field(init=False)
    beats: dict[str, Beat] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    now: float = 100.0
    log: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leader = Leader(self.terms, who("n1"))

    def look(self, *newcomers: Who, seconds: float = LOOK, **more: object) -> list[Action]:
        """Look as often as it takes for so many seconds; newcomers come at the first look."""
        did: list[Action] = []
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            for new in newcomers:
                self.beats.setdefault(new.node, Beat(0, Phase.READY, 0))
            for node in self.beats:
                if node not in self.silent:
                    self.beats[node] = replace(self.beats[node], count=self.beats[node].count + 1)
            did += self.leader.step(Observation(self.now, newcomers, dict(self.beats), **more))  # type: ignore[arg-type]
            newcomers = ()
        self.log += did
        return did

    def set(self, phase: Phase, *nodes: str, **more: object) -> None:
        for node in nodes:
            self.beats[node] = replace(self.beats[node], phase=phase, **more)  # type: ignore[arg-type]

    def run(self, *nodes: str) -> None:
        """They take the latest round up."""
        self.set(Phase.RUNNING, *nodes, generation=self.leader.generation)

    def started(self, *nodes: str) -> Desk:
        """A first round of these nodes is running."""
        self.look(*map(who, nodes), seconds=self.terms.last_call + 2 * LOOK)
        self.run(*nodes)
        self.look()
        return self


def members(actions: list[Action]) -> list[str]:
    return [each.node for action in actions if isinstance(action, Formed) for each in action.round.members]


def inherited(*nodes: str, lost: str = "n1", host: str = "n2", least: int = 1, **terms: object) -> Desk:
    """A leader on one node that has taken over a run whose last round these nodes were in."""
    desk = Desk(Terms(least, 5, **terms))  # type: ignore[arg-type]
    desk.leader = Leader(desk.terms, who(host))
    desk.leader.inherit(Round(7, tuple(map(who, nodes)), ""), lost)
    return desk


def come(desk: Desk, *nodes: str, phase: Phase = Phase.READY) -> list[Action]:
    for node in nodes:
        desk.beats[node] = Beat(5, phase, 7)
    return desk.look(*map(who, nodes))
