"""The post-mortem of all nodes, put together from their parts, by whoever comes last.

A node writes its part first, and joins what is there afterwards; whoever joins looks once more when it has written, and
begins again if something has come. So the last one that writes ``failure.json`` has seen every part, without a lock.

Not every node joins, or many would read the parts of all at once: the one that decides does, with what is there; the
first node of the next round does, when all that live have written theirs; and one that writes later does it by itself,
which ``joined`` in ``failure.json`` tells it to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.launch.evidence import files, joined_facts, joined_report, parts
from ftrun.launch.evidence.collect import LiveRank, left_by
from ftrun.launch.evidence.model import Evidence
from ftrun.launch.evidence.parts import Part
from ftrun.launch.evidence.whole import Whole
from ftrun.launch.failures import across, failure
from ftrun.launch.failures.across import LAUNCHER, MEMBERSHIP, Verdict
from ftrun.launch.failures.kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ftrun.launch.evidence.model import Seat
    from ftrun.rundir import RunDir

_REPORT, _FAILURE = "report.md", "failure.json"
_JOIN_SECONDS = 5.0
"""For parts that come while others are put together."""
_LOOK_SECONDS = 0.02
_NO_LOSS = (" starts again", " joins")
_LEFT_BEHIND = re.compile(r"r(\d{5,})")


def join(run_dir: RunDir, attempt: int, *, whole: bool = True) -> Path | None:
    """Put together what is there. Never raises: it costs the report, and no restart.

    Args:
        run_dir: the run directory.
        attempt: number of the attempt.
        whole: nobody else will do it again; otherwise more is expected.

    Returns:
        The report for people, or None where it couldn't be written, or nothing is there.
    """
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        seen = parts.stamps(run_dir, attempt)
        try:
            report = _write(run_dir, attempt, whole=whole or is_joined(run_dir, attempt))
        except Exception:  # a full disk, or a part that holds anything: the run must not be lost over words for it
            return None
        if report is None or parts.stamps(run_dir, attempt) == seen or time.monotonic() > deadline:
            return report


def is_joined(run_dir: RunDir, attempt: int) -> bool:
    """Whether the parts were put together for the last time: what comes now has to be added by whoever brings it."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return bool(json.loads((run_dir.postmortem(attempt) / _FAILURE).read_bytes())["joined"])
    return False


def await_parts(run_dir: RunDir, attempt: int, nodes: int, seconds: float) -> None:
    """Wait for the parts of so many nodes, and no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while len(parts.stamps(run_dir, attempt)) < nodes and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _write(run_dir: RunDir, attempt: int, *, whole: bool) -> Path | None:
    told = look(run_dir, attempt)
    if told is None:
        return None
    directory, writer = run_dir.postmortem(attempt), socket.gethostname()
    node = told.verdict.failure.node
    logs = {
        each.rank: run_dir.worker(attempt, node, each.rank)
        for part in told.parts
        if part.node == node
        for each in part.evidence.ranks
    }
    places = {rank: os.path.relpath(path, directory) for rank, path in logs.items()}
    copies = sorted(each.name for each in directory.glob("n*-r*-*"))
    files.put(directory / _FAILURE, files.to_json(joined_facts.facts(told, joined=whole)), writer)
    report = directory / _REPORT
    files.put(report, joined_report.render(told, places, copies), writer)
    return report


def look(run_dir: RunDir, attempt: int) -> Whole | None:
    """What all nodes together have to say; None where none has said anything."""
    found = parts.read_all(run_dir, attempt)
    seat = next((each.evidence.seat for each in found if each.evidence.seat is not None), None)
    if seat is None:
        return None
    here = {each.node for each in found}
    gone = dict(_gone(seat.hosts, found))
    lost = [_lost(run_dir, attempt, node, seat, word) for node, word in gone.items() if node not in here]
    missing = tuple(name for node, name in enumerate(seat.hosts) if node not in here and node not in gone)
    everybody = tuple(sorted([*found, *lost], key=lambda each: each.node))
    verdict = _verdict(found, gone)
    if verdict.kind == MEMBERSHIP and any(_is_of(seat.hosts[node], word) for node, word in gone.items()):
        verdict = replace(verdict, kind=LAUNCHER)
    return Whole(attempt, everybody, missing, verdict)


def _is_of(host: str, word: str) -> bool:
    """Whether a node's launcher has ended the run with this word."""
    return word.startswith(f"{host}: ")


def _gone(hosts: Sequence[str], found: Sequence[Part]) -> Iterator[tuple[int, str]]:
    """Nodes whose launchers have ended the run for a reason of their own, and those that were lost or have left."""
    words = [each.word for each in found]
    # What a node says of the end of the run is foreign text, in which others may be named for any reason.
    called = [each for each in words if not any(_is_of(host, each) for host in hosts)]
    phrases = [phrase for word in called for phrase in word.split(", ")]
    here = {each.node for each in found}
    deciding = {each.node for each in found if each.decision is not None}
    for node, host in enumerate(hosts):
        ended = next((each for each in words if _is_of(host, each)), "")
        named = [each for each in phrases if re.search(rf"(?<!\S){re.escape(host)}(?!\S)", each)]
        said = [each for each in named if not each.endswith(_NO_LOSS)]
        if ended and node not in deciding:
            yield node, ended
        elif node not in here and said:
            yield node, said[0]


def _lost(run_dir: RunDir, attempt: int, node: int, seat: Seat, word: str) -> Part:
    """What is known of a node that is lost: where the run directory is shared, what its ranks have left there."""
    directory = run_dir.attempt(attempt) / f"n{node:04d}"
    ranks = []
    with contextlib.suppress(OSError):
        for local_rank, place in enumerate(sorted(each for each in directory.iterdir() if _rank_of(each) is not None)):
            ranks.append(left_by(LiveRank(_rank_of(place) or 0, local_rank, 0, None, 0.0, place), None, ()))
    evidence = Evidence(tuple(ranks), node=node, host=seat.hosts[node], seat=_without_clock(seat))
    return Part(evidence, word, lost=True)


def _rank_of(directory: Path) -> int | None:
    match = _LEFT_BEHIND.fullmatch(directory.name)
    return int(match[1]) if match else None


def _without_clock(seat: Seat) -> Seat:
    return type(seat)(seat.generation, seat.hosts)


def _verdict(found: Sequence[Part], gone: Mapping[int, str]) -> Verdict:
    decider = next((each for each in found if each.decision is not None), None)
    try:
        verdict = across.explain([each.evidence for each in found], gone, decider.node if decider else None)
    except Exception:  # evidence can hold anything, and what the one that decided has found stands all the same
        verdict = None
    if verdict is not None:
        return verdict
    if decider is not None and decider.failure is not None:
        return Verdict(decider.failure.kind.value, decider.failure, decider.evidence)
    word = next((each.word for each in found if each.word), "")
    return Verdict(MEMBERSHIP, failure.Failure(Kind.UNKNOWN, -1, 0, word or "the nodes met again", node=-1))
