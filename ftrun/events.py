"""What happens in a run, as typed events: one JSON object a line, appended to the node's file in the run directory.

Agent and workers of a node append to the same file, each line with one write. Writing an event never raises into
training: a full disk costs the event, not the run. What people see (``ftrun status``, the last screen) is a fold
over these lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ftrun import durable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class RunStarted(Event):
    """A launcher took the run directory over."""

    kind: ClassVar[str] = "run_started"
    run_id: str
    command: list[str]
    pid: int
    host: str
    nproc: int
    continued: bool
    versions: dict[str, str]


@dataclass(frozen=True)
class Met(Event):
    """The nodes of the next attempt have met.

    ``generation`` counts such rounds, the same on all nodes; ``nodes`` are host names in the order of their ranks,
    ``node`` the rank of the one whose launcher writes this, with its ``host`` and ``pid``; ``reason`` is why a new
    round was called, empty for the first.
    """

    kind: ClassVar[str] = "met"
    generation: int
    reason: str
    nodes: list[str]
    node: int
    host: str
    pid: int


@dataclass(frozen=True)
class AttemptStarted(Event):
    """The worker group was started."""

    kind: ClassVar[str] = "attempt_started"
    epoch: int
    world_size: int
    resume: str | None
    resume_step: int
    pids: dict[str, int]


@dataclass(frozen=True)
class Restored(Event):
    """The first rank of a node has its state back; ``read`` says how many bytes of it came from which tier.

    The tiers are ``memory``, ``peer`` (another node's part, copied to this one's memory), ``local`` and ``root``.
    """

    kind: ClassVar[str] = "restored"
    step: int
    checkpoint: str
    seconds: float
    read: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepsBegan(Event):
    """Rank 0 begins its first step of this attempt.

    Without a Session (``exact`` False) steps are optimizer steps, counted from the start of the attempt: where the
    script resumed is its own business.
    """

    kind: ClassVar[str] = "steps_began"
    step: int
    total: int | None
    exact: bool = True


@dataclass(frozen=True)
class Step(Event):
    """Rank 0 completed a step. Written at most a few times a second, and always for an attempt's first step."""

    kind: ClassVar[str] = "step"
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    data_wait: float = 0.0


@dataclass(frozen=True)
class Saved(Event):
    """Rank 0 staged a snapshot; ``seconds`` is how long the training thread was held."""

    kind: ClassVar[str] = "saved"
    step: int
    reason: str
    seconds: float
    size: int


@dataclass(frozen=True)
class Committed(Event):
    """A checkpoint is durable and listed."""

    kind: ClassVar[str] = "committed"
    step: int
    checkpoint: str
    seconds: float
    size: int


@dataclass(frozen=True)
class InMemory(Event):
    """What a node's memory holds of snapshots from now on; its keeper says it, where several nodes take part.

    ``checkpoint`` is the newest one of which the node's own part is there, whole, with ``size`` bytes, sealed at
    ``sealed_at``; empty where there is none. ``copies`` are parts of other nodes, each with ``checkpoint``, ``node``
    (the number that its node had then), ``size`` and ``sealed_at``.
    """

    kind: ClassVar[str] = "in_memory"
    host: str
    checkpoint: str
    size: int
    sealed_at: float
    copies: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SaveFailed(Event):
    """A snapshot did not become a checkpoint; training goes on."""

    kind: ClassVar[str] = "save_failed"
    step: int
    checkpoint: str
    error: str


@dataclass(frozen=True)
class SaveSkipped(Event):
    """A checkpoint was due, and two others were still on their way. With an interval of time it is taken later."""

    kind: ClassVar[str] = "save_skipped"
    step: int


@dataclass(frozen=True)
class IntervalChosen(Event):
    """``every: auto`` has chosen a time between checkpoints, from a stall and a mean time between failures in seconds.

    ``bound`` is what kept it from the optimum: nothing, ``drain``, ``shortest`` or ``longest``.
    """

    kind: ClassVar[str] = "interval_chosen"
    seconds: float
    stall: float
    between_failures: float
    bound: str


@dataclass(frozen=True)
class DataRead(Event):
    """What the node's data cache and its filler have done for this run so far; written now and then by the launcher."""

    kind: ClassVar[str] = "data_read"
    hits: int
    misses: int
    bytes: int
    bypasses: int
    waits: int
    wait_seconds: float
    ahead: int
    errors: int


@dataclass(frozen=True)
class FaultInjected(Event):
    """A scripted fault fires."""

    kind: ClassVar[str] = "fault_injected"
    step: int
    do: str


@dataclass(frozen=True)
class StepsEnded(Event):
    """Rank 0 left its loop: the total is reached, or the run was asked to stop."""

    kind: ClassVar[str] = "steps_ended"
    step: int
    finished: bool


@dataclass(frozen=True)
class Failed(Event):
    """The worker group fell. ``step`` is how far it had come, ``lost_steps`` what must be done again.

    ``cause`` is the kind of failure, ``blame`` whose fault it is, and ``fingerprint`` the same for the same failure.
    """

    kind: ClassVar[str] = "failed"
    cause: str
    failed_rank: int
    exit_code: int
    message: str
    step: int
    lost_steps: int
    decision: str
    restart: bool
    victims: list[int] = field(default_factory=list)
    fingerprint: str = ""
    blame: str = ""
    failed_node: int = 0


@dataclass(frozen=True)
class Recovered(Event):
    """The attempt after a failure completed its first step.

    ``seconds`` says where the time since the failure went, in order; its values add up to ``total``. ``read`` is what
    the node's ranks have read of the checkpoint, in bytes by tier as in :class:`Restored`.
    """

    kind: ClassVar[str] = "recovered"
    total: float
    seconds: dict[str, float]
    lost_steps: int
    read: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeExcluded(Event):
    """A node is left out from now on, ``until`` a moment (seconds since 1970), or until it is admitted (None).

    ``by`` is ``policy``, ``user`` or ``check``. The first node writes it, and the one that it is about.
    """

    kind: ClassVar[str] = "node_excluded"
    host: str
    reason: str
    until: float | None
    by: str


@dataclass(frozen=True)
class NodeAdmitted(Event):
    """A node that was left out may take part again; written as :class:`NodeExcluded` is."""

    kind: ClassVar[str] = "node_admitted"
    host: str
    reason: str
    by: str


@dataclass(frozen=True)
class ExclusionRefused(Event):
    """The policy would have left a node out, and too many would have been out then; ``reason`` says how many are."""

    kind: ClassVar[str] = "exclusion_refused"
    host: str
    reason: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The launcher leaves. ``outcome``: finished, stopped, failed, gave_up, interrupted."""

    kind: ClassVar[str] = "run_ended"
    outcome: str
    exit_code: int


KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RunStarted,
        Met,
        AttemptStarted,
        Restored,
        StepsBegan,
        Step,
        Saved,
        Committed,
        InMemory,
        SaveFailed,
        SaveSkipped,
        IntervalChosen,
        DataRead,
        FaultInjected,
        StepsEnded,
        Failed,
        Recovered,
        NodeExcluded,
        NodeAdmitted,
        ExclusionRefused,
        RunEnded,
    )
}


@dataclass(frozen=True)
class Record:
    """One line read back.

    Attributes:
        time: seconds since 1970.
        attempt: number of the attempt, 0 before the first.
        rank: global rank of a worker, None for the agent.
        event: what happened.
    """

    time: float
    attempt: int
    rank: int | None
    event: Event


class EventLog:
    """Appends events to one file. Safe to use from several threads and processes."""

    def __init__(self, path: Path, *, attempt: int = 0, rank: int | None = None) -> None:
        self._path = path
        self._attempt = attempt
        self._rank = rank

    def write(self, event: Event) -> None:
        """Append an event. Never raises for a full disk or a missing directory: training must survive that."""
        line = encode(event, time.time(), self._attempt, self._rank)
        with contextlib.suppress(OSError):
            durable.append_line(self._path, line)


def mend(path: Path) -> None:
    """End a last line that a crash of the machine left torn, so that the next event doesn't become part of it."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def encode(event: Event, at: float, attempt: int, rank: int | None) -> bytes:
    """One event as a line of JSON; numbers that JSON lacks (NaN, infinities) become null."""
    head = {"v": SCHEMA_VERSION, "t": round(at, 6), "kind": event.kind, "attempt": attempt, "rank": rank}
    body = dataclasses.asdict(event)
    return json.dumps(_finite(head | body), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def decode(line: bytes) -> Record | None:
    """Read one line; None for a torn line, or a kind that this version doesn't know."""
    try:
        document = json.loads(line)
        cls = KINDS[document["kind"]]
        types = {each.name: str(each.type) for each in dataclasses.fields(cls)}
        event = cls(**{name: _typed(value, types[name]) for name, value in document.items() if name in types})
        return Record(float(document["t"]), int(document["attempt"]), document["rank"], event)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "dict": (dict,),
    "list": (list,),
}


def _typed(value: Any, annotation: str) -> Any:
    """A value, if it is what the event's field says, in the few types that events have.

    Raises:
        TypeError: it is not.
    """
    if value is None and "None" in annotation:
        return value
    if not isinstance(value, _TYPES[annotation.partition("[")[0].partition(" ")[0]]):
        raise TypeError(f"{annotation}: {value!r}")
    return value


def read(path: Path) -> Iterator[Record]:
    """All events of one file, in the order they were written; nothing where there is no file."""
    try:
        with path.open("rb") as file:
            for line in file:
                record = decode(line)
                if record is not None:
                    yield record
    except (FileNotFoundError, IsADirectoryError):
        return
