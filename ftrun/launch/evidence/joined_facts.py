"""The facts of a post-mortem of several nodes, for programs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftrun.launch.evidence import files
from ftrun.launch.evidence.whole import as_decided, moment, restart_of, role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.launch.evidence.model import RankEvidence
    from ftrun.launch.evidence.parts import Part
    from ftrun.launch.evidence.whole import Whole

SCHEMA_VERSION = 1

_FRAMES = 8


def facts(whole: Whole, *, joined: bool) -> dict[str, Any]:
    """The document of ``failure.json``.

    Args:
        whole: what it tells.
        joined: whoever comes later has to join its part by itself.
    """
    decider, fault = whole.decider, whole.of_fault
    shows = fault or decider or whole.parts[0]
    what = as_decided(whole)
    return {
        "schema_version": SCHEMA_VERSION,
        "attempt": whole.attempt,
        "node": what.node,
        "host": shows.host if shows.node == what.node else next(iter(_host(whole, what.node)), ""),
        "failure": {**files.plain(what), "kind": whole.verdict.kind},
        "decision": decider.decision if decider is not None else None,
        "decided_by": decider.node if decider is not None else None,
        "evidence": shows.evidence,
        "timeline": [{"time": at, "what": text} for at, text in shows.timeline],
        "restart": restart_of(whole),
        "order": whole.verdict.order,
        "nodes": [_node(whole, each) for each in whole.parts],
        "missing": whole.missing,
        "joined": joined,
    }


def _host(whole: Whole, node: int) -> Iterator[str]:
    return (each.host for each in whole.parts if each.node == node)


def _node(whole: Whole, part: Part) -> dict[str, Any]:
    seat = part.evidence.seat
    return {
        "node": part.node,
        "host": part.host,
        "lost": part.lost,
        "round": seat.generation if seat is not None else None,
        "clock": seat.clock if seat is not None else None,
        "word": part.word,
        "failure": part.failure.message if part.failure is not None else None,
        "ranks": [_rank(whole, part, each) for each in part.evidence.ranks],
    }


def _rank(whole: Whole, part: Part, rank: RankEvidence) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "exit_code": rank.exit_code,
        "at": moment(part, rank) or None,
        "role": role(whole, part, rank),
        "error": rank.error.message.partition("\n")[0] if rank.error is not None else None,
        "step": rank.beat.step if rank.beat is not None else None,
        "phase": rank.beat.phase if rank.beat is not None else None,
        "state": rank.state,
        "stack": rank.stack[:_FRAMES],
    }
