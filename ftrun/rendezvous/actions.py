"""What the leader sees at one look, and what it does about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.rendezvous.model import Beat, Ending, Refusal, Round, Who
    from ftrun.rendezvous.preflight import Report, Trial
    from ftrun.rendezvous.tie import Findings


@dataclass(frozen=True)
class Observation:
    """What the leader sees at one look.

    Attributes:
        now: its monotonic clock.
        newcomers: nodes that it sees for the first time, in the order in which they came.
        beats: records by node, of all nodes seen so far.
        ending: the end that a node has asked for.
        excluded: host names that may not take part, and why.
        hold_growth: don't call a round only because there is room for somebody who waits.
        last: the latest round that a newcomer knows of.
        reports: by node, whom it reaches; of those that have said so.
        findings: what the shared directory says of the right to go on with half of a round.
    """

    now: float
    newcomers: tuple[Who, ...] = ()
    beats: Mapping[str, Beat] = field(default_factory=dict)
    ending: Ending | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    hold_growth: bool = False
    last: Round | None = None
    reports: Mapping[str, Report] = field(default_factory=dict)
    findings: Findings | None = None


@dataclass(frozen=True)
class Called:
    """A round is called.

    Attributes:
        generation: the round that is over with it.
        reason: in words.
        left: members that left on purpose.
        growth: all members live, and it is called only because there is room for somebody who waits.
    """

    generation: int
    reason: str
    left: tuple[str, ...] = ()
    growth: bool = False


@dataclass(frozen=True)
class Formed:
    """A round is complete."""

    round: Round


@dataclass(frozen=True)
class Refused:
    """A node can't take part."""

    who: Who
    refusal: Refusal


@dataclass(frozen=True)
class Ended:
    """The run is over."""

    ending: Ending


@dataclass(frozen=True)
class Asked:
    """Nodes are to try to reach each other."""

    trial: Trial


@dataclass(frozen=True)
class Parted:
    """Some of them don't."""

    text: str


Action = Called | Formed | Refused | Ended | Asked | Parted
