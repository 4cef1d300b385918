"""What ``ftrun nodes`` says of a run's nodes, as JSON has it and for people."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ftrun.config.units import format_duration
from ftrun.health.history import By
from ftrun.health.standing import State, standing

if TYPE_CHECKING:
    from ftrun.health.history import Book, Host
    from ftrun.health.standing import Rules
    from ftrun.rundir import RunDir

_MOST_MARKS = 3


def describe(run_dir: RunDir, book: Book, rules: Rules, now: float) -> dict[str, Any]:
    """The nodes of a run as one JSON document."""
    return {
        "schema_version": 1,
        "run": str(run_dir.identity().get("run_id", run_dir.path.name)),
        "run_dir": str(run_dir.path),
        "nodes": [_node(name, host, rules, now) for name, host in sorted(book.hosts.items())],
    }


def _node(name: str, host: Host, rules: Rules, now: float) -> dict[str, Any]:
    where = standing(host, rules, now)
    exclusion = where.exclusion
    return {
        "host": name,
        "state": str(where.state),
        "reason": exclusion.reason if exclusion else where.withheld,
        "by": str(exclusion.by) if exclusion else None,
        "seconds_left": where.left if exclusion else None,
        "excluded_before": where.before,
        "first_seen": host.first_seen or None,
        "last_seen": host.last_seen or None,
        "failures": [dataclasses.asdict(each) for each in where.marks],
        "history": [{"what": each.what} | dataclasses.asdict(each) for each in host.entries],
    }


def text(document: dict[str, Any]) -> str:
    """Lines for people."""
    nodes = document["nodes"]
    if not nodes:
        return f"{document['run']}: nothing is known of its nodes; only runs of several nodes keep a record of them"
    out = sum(each["state"] == State.EXCLUDED for each in nodes)
    wide = max(len(each["host"]) for each in nodes)
    lines = [f"{document['run']}: {len(nodes)} node{'' if len(nodes) == 1 else 's'}, {out or 'none'} excluded"]
    for each in nodes:
        lines += _lines(each, wide)
    return "\n".join(lines)


def _lines(node: dict[str, Any], wide: int) -> list[str]:
    name, indent = f"  {node['host']:{wide}}", " " * (wide + 4)
    lines = [f"{name}  {node['state']}{_how(node)}"]
    if node["reason"]:
        lines.append(f"{indent}{node['reason']}")
    if node["state"] in (State.SUSPECT, State.PROBATION):
        lines += [f"{indent}attempt {each['attempt']}: {each['evidence']}" for each in node["failures"][-_MOST_MARKS:]]
    if node["state"] == State.EXCLUDED:
        lines.append(f"{indent}`ftrun nodes admit {node['host']}` lets it in")
    return lines


def _how(node: dict[str, Any]) -> str:
    if node["state"] != State.EXCLUDED:
        return ""
    left = node["seconds_left"]
    by = " by hand" if node["by"] == By.USER else ""
    often = f", {node['excluded_before']} times lately" if node["excluded_before"] > 1 else ""
    return by + (", until it is admitted" if left is None else f", {format_duration(left)} left") + often
