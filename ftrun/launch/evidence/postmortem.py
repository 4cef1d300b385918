"""The post-mortem of an attempt: ``report.md`` for people, ``failure.json`` for programs, copies of what ranks left.

Written while a restart waits: without ``fsync``, in a few milliseconds, and a full disk costs the report, never the
restart. Nodes that meet through ftrun's own rendezvous each write a part (:mod:`~ftrun.launch.evidence.parts`), and the
two files tell of all of them (:mod:`~ftrun.launch.evidence.joined`). Where torch's backends are used each node tells of
itself: node 0 under these names, other nodes with ``n0001-`` before theirs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun import dump
from ftrun.launch.evidence import joined, parts, pyspy
from ftrun.launch.evidence import report as postmortem_report
from ftrun.launch.evidence.files import encoded, put, to_json
from ftrun.launch.evidence.tail import read_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.failures.failure import Failure
    from ftrun.launch.policy import Decision
    from ftrun.rundir import RunDir

SCHEMA_VERSION = 1

REPORT = "report.md"
FAILURE = "failure.json"

_COPIED = ("error.json", dump.FILE, pyspy.FILE)
_LARGEST_COPY = 256 << 10
_LARGEST_COPIES = 4 << 20


def write(
    run_dir: RunDir,
    attempt: int,
    failure: Failure,
    decision: Decision,
    evidence: Evidence,
    timeline: Sequence[tuple[float, str]] = (),
) -> Path | None:
    """Write what is known of a failed attempt. Called once per node and attempt, when the decision has been taken.

    Args:
        run_dir: the run directory.
        attempt: number of the attempt that failed.
        failure: what went wrong.
        decision: what is done about it.
        evidence: of this node.
        timeline: moments of the attempt worth telling: seconds since 1970, and what happened.

    Returns:
        The report, or None where it couldn't be written.
    """
    if evidence.seat is not None:
        return _write_part(run_dir, attempt, parts.Part(evidence, "", failure, decision, tuple(timeline)))
    directory = run_dir.postmortem(attempt)
    prefix = _prefix(evidence.node)
    facts = {
        "schema_version": SCHEMA_VERSION,
        "attempt": attempt,
        "node": evidence.node,
        "host": evidence.host,
        "failure": failure,
        "decision": decision,
        "evidence": evidence,
        "timeline": [{"time": time, "what": what} for time, what in timeline],
        "restart": None,
    }
    story = postmortem_report.Story(attempt, failure, decision, evidence, tuple(timeline))
    logs = {each.rank: run_dir.worker(attempt, evidence.node, each.rank) for each in evidence.ranks}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        put(directory / f"{prefix}{FAILURE}", to_json(facts))
        copies = _copy(directory, evidence.node, logs)
        places = {rank: os.path.relpath(path, directory) for rank, path in logs.items()}
        report = directory / f"{prefix}{REPORT}"
        put(report, postmortem_report.render(story, places, copies))
    except (OSError, ValueError):  # a full disk, a directory that is gone, a text that is none
        return None
    return report


def append_restart(
    run_dir: RunDir,
    attempt: int,
    seconds: Mapping[str, float],
    lost_steps: int,
    node: int = 0,
    read: Mapping[str, int] | None = None,
) -> None:
    """Add where the seconds of the restart after a failed attempt went, once that is known.

    Args:
        run_dir: the run directory.
        attempt: number of the attempt that failed.
        seconds: of each part, in order.
        lost_steps: steps that are done a second time.
        node: number of this node, where it tells of itself alone.
        read: bytes of the checkpoint that this node has read, by the tier that they came from.
    """
    restart = {"seconds": dict(seconds), "total": math.fsum(seconds.values()), "lost_steps": lost_steps}
    restart["read"] = dict(read or {})
    # The node may have another number by now: who has decided is told by its part.
    own = next((each for each in parts.read_all(run_dir, attempt) if each.decision is not None), None)
    if own is not None:
        with contextlib.suppress(OSError):
            parts.write(run_dir, attempt, replace(own, restart=restart))
        joined.join(run_dir, attempt)
        return
    directory, prefix = run_dir.postmortem(attempt), _prefix(node)
    path = directory / f"{prefix}{FAILURE}"
    with contextlib.suppress(OSError, ValueError, TypeError):
        facts = json.loads(path.read_bytes())
        put(path, to_json({**facts, "restart": restart}))
    with contextlib.suppress(OSError), (directory / f"{prefix}{REPORT}").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(encoded(postmortem_report.restart_section(seconds, lost_steps, read)))


def _write_part(run_dir: RunDir, attempt: int, part: parts.Part) -> Path | None:
    """A node's own part, and what it makes together with those that are there already; others will come."""
    logs = {each.rank: run_dir.worker(attempt, part.node, each.rank) for each in part.evidence.ranks}
    try:
        parts.write(run_dir, attempt, part)
        _copy(run_dir.postmortem(attempt), part.node, logs)
    except (OSError, ValueError):
        return None
    return joined.join(run_dir, attempt, whole=False)


def _prefix(node: int) -> str:
    return f"n{node:04d}-" if node else ""


def _copy(directory: Path, node: int, logs: Mapping[int, Path]) -> tuple[str, ...]:
    """Copy the ends of small files that ranks left; returns their names."""
    names, left = [], _LARGEST_COPIES
    for rank, place in logs.items():
        for file in _COPIED:
            data = read_at(place / file, -min(_LARGEST_COPY, left), _LARGEST_COPY) if left else b""
            if data:
                name = f"n{node:04d}-r{rank:05d}-{file}"
                (directory / name).write_bytes(data)
                names.append(name)
                left -= len(data)
    return tuple(names)
