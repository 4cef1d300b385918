"""The post-mortem of an attempt: ``report.md`` for people, ``failure.json`` for programs, copies of what ranks left.

Node 0 writes these names, other nodes put ``n0001-`` before theirs. Written while a restart waits: without ``fsync``,
in a few milliseconds, and a full disk costs the report, never the restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
from typing import TYPE_CHECKING, Any

from ftrun import dump
from ftrun.launch.evidence import pyspy
from ftrun.launch.evidence import report as postmortem_report
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
        _put(directory / f"{prefix}{FAILURE}", _json(facts))
        copies = _copy(directory, evidence.node, logs)
        places = {rank: os.path.relpath(path, directory) for rank, path in logs.items()}
        report = directory / f"{prefix}{REPORT}"
        _put(report, postmortem_report.render(story, places, copies))
    except (OSError, ValueError):  # a full disk, a directory that is gone, a text that is none
        return None
    return report


def append_restart(run_dir: RunDir, attempt: int, seconds: Mapping[str, float], lost_steps: int, node: int = 0) -> None:
    """Add where the seconds of the restart after a failed attempt went, once that is known.

    Args:
        run_dir: the run directory.
        attempt: number of the attempt that failed.
        seconds: of each part, in order.
        lost_steps: steps that are done a second time.
        node: number of this node.
    """
    directory, prefix = run_dir.postmortem(attempt), _prefix(node)
    path = directory / f"{prefix}{FAILURE}"
    with contextlib.suppress(OSError, ValueError, TypeError):
        facts = json.loads(path.read_bytes())
        restart = {"seconds": dict(seconds), "total": math.fsum(seconds.values()), "lost_steps": lost_steps}
        _put(path, _json({**facts, "restart": restart}))
    with contextlib.suppress(OSError), (directory / f"{prefix}{REPORT}").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(_bytes(postmortem_report.restart_section(seconds, lost_steps)))


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


def _put(path: Path, data: str) -> None:
    """Whole or not at all for who reads it now; after a power loss it may be missing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(_bytes(data))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _json(facts: Mapping[str, Any]) -> str:
    return json.dumps(_plain(facts), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses become objects, enums their values, what is no number null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, int) else _plain(value.value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
