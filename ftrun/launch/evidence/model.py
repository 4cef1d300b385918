"""What is known of a worker group at one moment: the input of :func:`ftrun.launch.failures.failure.explain`.

Frozen data, made by :mod:`ftrun.launch.evidence.collect` before the first signal is sent, and by tests from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrun.error_file import ErrorRecord
    from ftrun.launch.watching.watch import Verdict
    from ftrun.pulse import Beat


@dataclass(frozen=True)
class RankEvidence:
    """What one rank of this node left.

    Attributes:
        rank: global rank.
        local_rank: rank on this node.
        pid: process id.
        exit_code: as Python gives it, negative for a signal; None while it runs.
        exited_at: when the agent saw it end, seconds since 1970 with fractions; 0.0 while it runs.
        error: its error file, if it left one.
        beat: its pulse page, if it has one.
        state: the letter of ``/proc/PID/stat`` (R, S, D, T, Z ...), empty where it can't be read.
        waits_in: the kernel function it sleeps in (``/proc/PID/wchan``), empty where unknown.
        stack: Python frames of its main thread, innermost first, as ``file:line in function``.
        last_lines: end of its stderr.
    """

    rank: int
    local_rank: int = 0
    pid: int = 0
    exit_code: int | None = None
    exited_at: float = 0.0
    error: ErrorRecord | None = None
    beat: Beat | None = None
    state: str = ""
    waits_in: str = ""
    stack: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()

    @property
    def fell(self) -> bool:
        """Whether it has ended with an error."""
        return bool(self.exit_code)


@dataclass(frozen=True)
class ClockOffset:
    """How far a node's wall clock is ahead of that of its round's first node. It orders a story, and decides nothing.

    Attributes:
        seconds: what it is ahead, negative where it is behind.
        uncertainty: it may be so many seconds more or less.
    """

    seconds: float
    uncertainty: float


@dataclass(frozen=True)
class Seat:
    """A node's place among the nodes of an attempt.

    Attributes:
        generation: number of their round.
        hosts: names of all of them, in the order of their numbers.
        clock: of this node; None where it isn't known.
    """

    generation: int
    hosts: tuple[str, ...]
    clock: ClockOffset | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known of all ranks of this node, and of the host.

    Attributes:
        ranks: all of them, those that still run included.
        node: number of this node.
        host: its name.
        time: seconds since 1970 of the moment that something was noticed.
        oom_kills: how many processes the kernel killed for memory in this control group since the attempt began.
        memory: how full this control group was, in words; empty where the kernel doesn't say.
        kernel: lines of the kernel log since the attempt began that speak of these processes, of memory or of devices.
        hang: the verdict of the watch, where that is what ended the attempt.
        seat: this node's place, where several nodes take part and meet through ftrun's own rendezvous.
    """

    ranks: tuple[RankEvidence, ...]
    node: int = 0
    host: str = ""
    time: float = 0.0
    oom_kills: int = 0
    memory: str = ""
    kernel: tuple[str, ...] = ()
    hang: Verdict | None = field(default=None)
    seat: Seat | None = None
