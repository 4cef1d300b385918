"""What nodes and leader tell each other, and how it is written in the store."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Self

from ftrun.rendezvous.tie import Half

PROTOCOL = 4
"""Changes with every change to what is written here."""


class Phase(enum.StrEnum):
    """What a node does."""

    READY = "ready"
    """It has no workers and would take part in a round."""
    RUNNING = "running"
    """It has taken up a round, and has workers or is about to start them."""
    FINISHED = "finished"
    """All its workers of that round have ended well."""
    GONE = "gone"
    """It has left on purpose."""


class Outcome(enum.StrEnum):
    """How a run that is over has ended."""

    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Terms:
    """What the leader goes by. Durations are seconds.

    Attributes:
        min_nodes: fewer don't make a round.
        max_nodes: more don't take part; they are spares.
        last_call: how long the first round waits for more nodes than the minimum, and so does one that waited for it.
        lost_after: a node whose record hasn't changed for so long is lost.
        stop_within: how long a called node may take to stop its workers before it is left out.
        quorum: a round needs most members of the one before it; see :meth:`~ftrun.rendezvous.leader.Leader.inherit`.
        gather: how long growth waits for more that join, from the last one that came; ten times as long in all.
        preflight: nodes that meet for the first time try to reach each other; see :mod:`~ftrun.rendezvous.preflight`.
        witness: a shared directory says which of two halves goes on; see :mod:`~ftrun.rendezvous.tie`.
        claim_lasts: how long the half that goes on may show no sign there, until the other one may; 0 for ever.
    """

    min_nodes: int
    max_nodes: int
    last_call: float = 5.0
    lost_after: float = 1.0
    stop_within: float = 180.0
    quorum: bool = True
    gather: float = 0.0
    preflight: bool = False
    witness: bool = False
    claim_lasts: float = 0.0


@dataclass(frozen=True)
class Who:
    """A node, as it introduces itself.

    Attributes:
        node: random identity of its agent's process.
        name: host name, for people.
        address: where other nodes reach it.
        port: of the store that it serves there, idle unless it leads.
        traits: what must be the same on all nodes, by name: versions, number of workers, the job file's digest.
    """

    node: str
    name: str
    address: str
    port: int = 0
    traits: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """What tells its machine, and its part of it, from others; the same for one that was started anew there."""
        return f"{self.name} {self.address}"

    @property
    def machine(self) -> str:
        """Name of its host: several nodes of a run may be there, numbered."""
        return machine(self.name)

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote; fields that are added later are passed over."""
        return cls(**_known(cls, text))


@dataclass(frozen=True)
class Beat:
    """A node's record.

    Attributes:
        count: how often it was written.
        phase: what the node does.
        generation: the last round that it took up, 0 for none.
        stuck: its main thread hasn't been seen for longer than it should take.
        informed: it knows that the run is over.
        where: its main thread stands still, in words; empty where that isn't known.
    """

    count: int
    phase: Phase
    generation: int
    stuck: bool = False
    informed: bool = False
    where: str = ""

    def encode(self) -> str:
        """As text."""
        return f"{self.count} {self.phase} {self.generation} {self.stuck:d} {self.informed:d} {self.where}".rstrip()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        count, phase, generation, stuck, informed, *where = text.split(maxsplit=5)
        return cls(int(count), Phase(phase), int(generation), stuck == "1", informed == "1", "".join(where))


@dataclass(frozen=True)
class Round:
    """Who takes part in one generation.

    Attributes:
        generation: its number, from 1, the same on all nodes.
        members: nodes in the order of their ranks.
        reason: why it was called, in words.
        halves: earlier rounds by the half of which it may go on, as long as the others haven't come back; see
            :mod:`ftrun.rendezvous.tie`.
    """

    generation: int
    members: tuple[Who, ...]
    reason: str
    halves: tuple[Half, ...] = ()

    @property
    def key(self) -> str:
        """Tells it from every other round of this run, those of its earlier lives included."""
        nodes = " ".join(each.node for each in self.members)
        return f"{self.generation:08}-{hashlib.sha256(nodes.encode()).hexdigest()[:12]}"

    def rank_of(self, node: str) -> int | None:
        """A node's rank in it, None for one that isn't in it."""
        return next((rank for rank, each in enumerate(self.members) if each.node == node), None)

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        values = _known(cls, text)
        halves = tuple(Half(each["key"], each["number"], tuple(each["absent"])) for each in values.get("halves", ()))
        return cls(values["generation"], tuple(Who(**each) for each in values["members"]), values["reason"], halves)


@dataclass(frozen=True)
class State:
    """What the leader says all the time.

    Attributes:
        leader: random identity of the leader; a new one knows nothing of what an old one said.
        count: how often it was written.
        generation: the latest round, 0 before the first.
        called: a new one is called: whoever has workers stops them and gets ready.
        outcome: whether the run is over.
        trial: number of what it has asked last, see :mod:`~ftrun.rendezvous.preflight`; 0 before it has asked.
    """

    leader: str
    count: int
    generation: int
    called: bool
    outcome: Outcome
    trial: int = 0

    def encode(self) -> str:
        """As text."""
        return f"{self.leader} {self.count} {self.generation} {self.called:d} {self.outcome} {self.trial}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        leader, count, generation, called, outcome, trial = text.split()[:6]
        return cls(leader, int(count), int(generation), called == "1", Outcome(outcome), int(trial))


@dataclass(frozen=True)
class Job:
    """Whose store it is, and who leads there.

    Attributes:
        run_id: the run.
        leader: random identity of the leader.
        host: host name of its node.
        node: its node.
        succession: 0 for the leader at the endpoint, and one more for each that takes over.
        protocol: how all this is written.
    """

    run_id: str
    leader: str
    host: str
    node: str
    succession: int = 0
    protocol: int = PROTOCOL

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote; of another protocol at least the name of the host is the same."""
        return cls(**_known(cls, text))


@dataclass(frozen=True)
class Call:
    """Why a round is over.

    Attributes:
        reason: in words.
        left: members that left on purpose: nobody has to fear that they go on elsewhere.
        growth: all members live, and it is called only because nodes join: workers have time to leave in order.
    """

    reason: str
    left: tuple[str, ...] = ()
    growth: bool = False

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        values = _known(cls, text)
        return cls(values["reason"], tuple(values["left"]), values.get("growth", False))


@dataclass(frozen=True)
class Ending:
    """How the run ended, and why.

    Attributes:
        outcome: finished or failed.
        reason: in words.
        code: exit code with which the node left that ended it; 0 where it has none to say.
    """

    outcome: Outcome
    reason: str
    code: int = 0

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        values = _known(cls, text)
        return cls(Outcome(values["outcome"]), values["reason"], values.get("code", 0))


@dataclass(frozen=True)
class Refusal:
    """Why a node can't take part.

    Attributes:
        excluded: it was excluded; otherwise it doesn't fit the others.
        reason: in words, with what to do.
    """

    excluded: bool
    reason: str

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote."""
        return cls(**_known(cls, text))


def machine(name: str) -> str:
    """The host's part of a node's name."""
    return name.partition("#")[0]


def _known(kind: Any, text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}
