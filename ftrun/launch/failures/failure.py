"""From evidence to what went wrong: a pure function from :class:`Evidence` to :class:`Failure`.

The root cause is the first cause. Each rank's end is read by itself (:mod:`ftrun.launch.failures.symptoms`), which
tells causes from consequences; among causes time decides. Then the host's log, and the verdict of the watch, may say
more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftrun.contract import RESERVED_CODES, ExitCode
from ftrun.launch.failures import absent, fingerprint, host_signs, ranks_end
from ftrun.launch.failures.kinds import NATURES, Kind
from ftrun.launch.failures.ranks_end import signal_name
from ftrun.launch.failures.symptoms import Standing, Symptom
from ftrun.launch.watching import culprit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.launch.evidence.model import Evidence, RankEvidence
    from ftrun.launch.failures.host_signs import HostSigns

__all__ = ["Failure", "Kind", "explain", "shell_code", "signal_name"]

CLEARLY_BEFORE = 5.0
"""An error that came this much before a process was killed was there first. Less tells nothing: a dying process lets go
of its connections well before its end is seen."""

# What a faulty device, link or memory bank can look like. A ValueError is none of it.
_LIKE_HARDWARE = {
    Kind.SEGFAULT,
    Kind.KILLED,
    Kind.COLLECTIVE_TIMEOUT,
    Kind.HANG,
    Kind.UNKNOWN,
    Kind.EXIT,
    Kind.HARDWARE,
}
_WOULD_CHANGE = {
    Kind.KILLED: "a sign that memory ran out (the kernel log and the memory counter of this control group show none), "
    "or the word of a batch system that it ended the job",
    Kind.SEGFAULT: "a core dump or a native stack; the same crash on another machine would clear this one",
    Kind.COLLECTIVE_TIMEOUT: "stacks of all ranks, those of other nodes included, at the moment of the timeout",
    Kind.HANG: "a step that was only slow: then a higher limit under watch in the job file",
    Kind.UNKNOWN: "evidence of the rank that went first: its exit code, its stderr, or the log of its node",
    Kind.EXIT: "an error message of the script, or an error file (torch's @record writes one)",
    Kind.HARDWARE: "the same failure on another device",
}


@dataclass(frozen=True)
class Failure:
    """What went wrong.

    Attributes:
        kind: the kind.
        rank: the first rank at fault.
        exit_code: of that rank, negative for a signal; of the first that ended, where that rank still ran.
        message: one line for people.
        victims: ranks that fell with it.
        attempt: name of the checkpoint that is corrupt, for that kind.
        node: number of the node.
        fingerprint: short name of the bug, the same on every rank and in every attempt.
        blame: ``code``, ``data``, ``infrastructure``, ``hardware``, ``preemption`` or ``unknown``.
        why: the evidence, in lines for people.
        retryable: the same start may end in another way.
        would_change: what would change the verdict; empty where nothing is likely to.
    """

    kind: Kind
    rank: int
    exit_code: int
    message: str
    victims: tuple[int, ...] = ()
    attempt: str = ""
    node: int = 0
    fingerprint: str = ""
    blame: str = "unknown"
    why: tuple[str, ...] = ()
    retryable: bool = True
    would_change: str = ""


@dataclass(frozen=True)
class _Finding:
    """A verdict in the making."""

    kind: Kind
    rank: RankEvidence
    symptom: Symptom
    why: tuple[str, ...]
    message: str


def explain(evidence: Evidence) -> Failure:
    """Name the first rank at fault, and what went wrong.

    Args:
        evidence: of an attempt in which a rank ended with an error, or that the watch found hung.
    """
    signs, read = host_signs.read(evidence.kernel), ends(evidence)
    found = _fallen(evidence, read) if read else _hung(evidence)
    return _failure(_with_host(found, evidence, signs), evidence, read)


def ends(evidence: Evidence) -> dict[int, Symptom]:
    """What each rank that is over looks like by itself, by rank."""
    signs = host_signs.read(evidence.kernel)
    return {each.rank: ranks_end.read(each, evidence, signs) for each in evidence.ranks if _is_over(each)}


def _is_over(each: RankEvidence) -> bool:
    """It has ended with an error, or has left its last words and is only slow to end."""
    return each.fell or (each.error is not None and each.exit_code is None)


def _fallen(evidence: Evidence, read: dict[int, Symptom]) -> _Finding:
    """The first cause among ranks that are over."""
    over = sorted((each for each in evidence.ranks if each.rank in read), key=lambda each: each.rank)
    first = _first(over, read)
    symptom = read[first.rank]
    if symptom.standing >= Standing.WAITED:
        return _consequence(evidence, first, read)
    return _Finding(symptom.kind, first, symptom, ranks_end.why(first, symptom), ranks_end.message(first, symptom))


def _first(over: Sequence[RankEvidence], read: dict[int, Symptom]) -> RankEvidence:
    """Causes before consequences, then by time, then by rank."""
    nearest = min(over, key=lambda each: _order(each, read[each.rank]))
    errors = [each for each in over if read[each.rank].standing is Standing.ERROR and each.error is not None]
    if read[nearest.rank].standing is Standing.SIGNAL and errors:
        error = min(errors, key=moment)
        if moment(error) + CLEARLY_BEFORE < nearest.exited_at:
            return error
    return nearest


def _order(each: RankEvidence, symptom: Symptom) -> tuple[int, bool, float, int]:
    return symptom.standing, "log says" not in symptom.note, moment(each), each.rank


def moment(each: RankEvidence) -> float:
    """When it failed, as exactly as is known. Whole seconds are torch's way of writing times, and may be one early."""
    time = each.error.time if each.error is not None else 0.0
    if time > 0 and (not time.is_integer() or not each.exited_at):
        return time
    return each.exited_at or time or float("inf")


def _consequence(evidence: Evidence, first: RankEvidence, read: dict[int, Symptom]) -> _Finding:
    """All that fell are victims of something that isn't among them."""
    left = [each for each in evidence.ranks if each.exit_code == 0]
    if left:
        return _left_early(left, first, read[first.rank])
    waited = [rank for rank, each in read.items() if each.kind is Kind.COLLECTIVE_TIMEOUT]
    symptom = read[first.rank]
    said = {each.rank: ranks_end.everything(each) for each in evidence.ranks}
    if waited:
        return _timeout(evidence, first, symptom, absent.find(evidence.ranks, said, waited))
    dying = [each for each in evidence.ranks if each.rank not in read and each.state in ("Z", "X")]
    if symptom.standing is Standing.LOST_A_PEER and dying:
        why = (*ranks_end.why(first, symptom), f"rank {dying[0].rank} was ending, and its exit code wasn't known yet")
        return _Finding(symptom.kind, dying[0], symptom, why, f"rank {dying[0].rank} ended; how isn't known")
    return _Finding(symptom.kind, first, symptom, ranks_end.why(first, symptom), ranks_end.message(first, symptom))


def _left_early(left: Sequence[RankEvidence], other: RankEvidence, symptom: Symptom) -> _Finding:
    first = min(left, key=lambda each: (each.exited_at or float("inf"), each.rank))
    message = f"rank {first.rank} ended with code 0 while the others went on"
    return _Finding(Kind.LEFT_EARLY, first, symptom, (message, *ranks_end.why(other, symptom)), message)


def _timeout(evidence: Evidence, first: RankEvidence, symptom: Symptom, named: tuple[int, str] | None) -> _Finding:
    at_fault = next((each for each in evidence.ranks if named and each.rank == named[0]), first)
    why = (*((named[1],) if named else ()), *ranks_end.why(first, symptom))
    message = ranks_end.message(first, symptom)
    if named is not None and at_fault is not first:
        message = f"rank {first.rank} waited in vain for rank {at_fault.rank}: {named[1]}"
    return _Finding(Kind.COLLECTIVE_TIMEOUT, at_fault, symptom, why, message)


def _hung(evidence: Evidence) -> _Finding:
    """Nobody fell: the watch ended the attempt."""
    verdict = evidence.hang
    if verdict is None:
        raise ValueError("no rank has ended with an error, and nothing hangs: there is nothing to explain")
    symptom = Symptom(Kind.HANG, Standing.WAITED)
    left = [each for each in evidence.ranks if each.exit_code == 0]
    if verdict.phase.lower() == "end" and left and len(left) < len(evidence.ranks):
        running = next(each for each in evidence.ranks if each.exit_code != 0)
        found = _left_early(left, running, symptom)
        return replace(found, why=(found.message, verdict.why))
    named, how = culprit.name_culprit(evidence.ranks)
    rank = named if named is not None else verdict.rank
    at_fault = next((each for each in evidence.ranks if each.rank == rank), evidence.ranks[0])
    who = "the ranks" if rank is None else f"rank {rank}"
    where = f"in {verdict.phase.lower()}, after step {verdict.step:,}"
    message = f"{who} made no progress for {verdict.waited:.3g} s {where}"
    if host_signs.waits_for_storage(at_fault.state, at_fault.waits_in):
        asleep = f"it waits in the kernel for storage ({at_fault.waits_in})"
        return _Finding(Kind.STORAGE, at_fault, symptom, (verdict.why, how, asleep), message)
    return _Finding(Kind.HANG, at_fault, symptom, (verdict.why, how), message)


def _with_host(found: _Finding, evidence: Evidence, signs: HostSigns) -> _Finding:
    """Let the host's log speak where it can explain what was seen, and be quoted where it can't."""
    on_gpu = found.symptom.gpu or found.kind in (Kind.HANG, Kind.COLLECTIVE_TIMEOUT)
    quoted = (*(str(each) for each in signs.xids), *signs.storage[-1:])
    if evidence.oom_kills and found.kind is not Kind.HOST_OUT_OF_MEMORY:
        quoted += (f"processes that the kernel killed for memory meanwhile: {evidence.oom_kills}",)
    blamed = signs.blaming((each.pid for each in evidence.ranks), on_gpu=on_gpu)
    possible = found.kind in _LIKE_HARDWARE or (found.kind is Kind.CODE_ERROR and found.symptom.gpu)
    named = next((each for each in evidence.ranks if blamed and each.pid == blamed[1]), None)
    if blamed is not None and (possible or named is found.rank):
        return replace(found, kind=Kind.HARDWARE, rank=named or found.rank, why=(blamed[0], *found.why))
    if found.kind in (Kind.HANG, Kind.UNKNOWN) and signs.storage:
        return replace(found, kind=Kind.STORAGE, why=(*found.why, f"the kernel log: {signs.storage[-1]}"))
    return replace(found, why=(*found.why, *(line for line in quoted if line not in found.why)))


def _failure(found: _Finding, evidence: Evidence, read: dict[int, Symptom]) -> Failure:
    rank, nature = found.rank, NATURES[found.kind]
    codes = [each.exit_code for each in evidence.ranks if each.exit_code]
    victims = tuple(sorted(each for each in read if each != rank.rank))
    after = (f"{_ranks(victims)} fell with it",) if victims else ()
    return Failure(
        kind=found.kind,
        rank=rank.rank,
        exit_code=rank.exit_code or (codes[0] if codes else ExitCode.FAILED),
        message=found.message,
        victims=victims,
        attempt=rank.error.attempt if rank.error else "",
        node=evidence.node,
        fingerprint=_fingerprint(found),
        blame=nature.blame,
        why=(*found.why, *after),
        retryable=nature.retryable,
        would_change=_WOULD_CHANGE.get(found.kind, ""),
    )


def _fingerprint(found: _Finding) -> str:
    """Kind, type, what is the same in every telling of the message, and the innermost lines of the user's code."""
    rank, cause = found.rank, found.symptom.cause
    if cause is not None:
        where = fingerprint.users_frames(cause.frames)
        return fingerprint.make(found.kind.value, cause.name, fingerprint.normal(cause.line), *where)
    words = rank.error.message.partition("\n")[0] if rank.error is not None else ""
    where = fingerprint.users_stack(rank.stack)
    return fingerprint.make(found.kind.value, str(rank.exit_code), fingerprint.normal(words), *where)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def shell_code(failure: Failure) -> int:
    """The exit code that reports a failure: the worker's own, ``128 + n`` for a signal, never one of ftrun's."""
    if failure.kind is Kind.USAGE:
        return ExitCode.USAGE
    if failure.exit_code < 0:
        return 128 - failure.exit_code
    return ExitCode.FAILED if failure.exit_code in RESERVED_CODES else failure.exit_code
