"""What ``ftrun status`` says of the nodes' memories: the snapshots in them, and what was read for the last restore."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.checkpoint.layout import AttemptName
from ftrun.config.units import format_duration
from ftrun.errors import RunDirError
from ftrun.goodput import tiers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ftrun.events import Record
    from ftrun.rundir import RunDir

_MOST_LINES = 8
_KINDS = (b'"in_memory"', b'"restored"')


@dataclass
class _Told:
    """What the files of all nodes say, the latest word of each.

    Attributes:
        holds: by host name and number of the node.
        restored: by number of the node, of one attempt.
    """

    holds: dict[tuple[str, int], Record] = field(default_factory=dict)
    restored: dict[int, events.Restored] = field(default_factory=dict)

    def of(self, hosts: Sequence[str], node: int) -> Record | None:
        """What a node's memory holds; it may have had another number when that was said."""
        machines = [host.partition("#")[0] for host in hosts]  # of several launchers on one machine
        exact = self.holds.get((machines[node], node))
        if exact is not None or machines.count(machines[node]) > 1:
            return exact
        others = [record for (name, _), record in self.holds.items() if name == machines[node]]
        return max(others, key=lambda record: record.time, default=None)


def memory(run_dir: RunDir, records: Sequence[Record], now: float | None = None) -> dict[str, Any]:
    """The nodes of the last round and what lies in their memories; and what the last attempt was restored from.

    Args:
        run_dir: the run.
        records: the events of its first node.
        now: seconds since 1970, for ages; those of other nodes go by their clocks.
    """
    now = time.time() if now is None else now
    hosts, by_epoch, attempt = _rounds(records)
    told = _told(run_dir, attempt)
    nodes = [_node(told.of(hosts, node), host, node, by_epoch, now) for node, host in enumerate(hosts)]
    return {
        # What the others say stays with them where each has a run directory of its own.
        "nodes": nodes if _is_shared(run_dir) else [each for each in nodes if each["told"]],
        "restored": [
            {"node": node, "host": hosts[node] if node < len(hosts) else "", **_restored(event)}
            for node, event in sorted(told.restored.items())
        ],
    }


def _is_shared(run_dir: RunDir) -> bool:
    try:
        return bool(run_dir.identity().get("shared_run_dir", True))
    except RunDirError:
        return True


def _rounds(records: Iterable[Record]) -> tuple[list[str], dict[int, list[str]], int]:
    """The hosts of the last round, those of each epoch, and the number of the last attempt."""
    hosts: list[str] = []
    by_epoch: dict[int, list[str]] = {}
    attempt = 0
    for record in records:
        if isinstance(record.event, events.Met):
            hosts = record.event.nodes
        elif isinstance(record.event, events.AttemptStarted):
            by_epoch[record.event.epoch] = hosts
            attempt = record.attempt
    return hosts, by_epoch, attempt


def _told(run_dir: RunDir, attempt: int) -> _Told:
    found = _Told()
    for path in sorted(run_dir.events().parent.glob("n*.jsonl")):
        node = path.stem[1:]
        for record in _of_interest(path) if node.isdecimal() else ():
            event = record.event
            if isinstance(event, events.InMemory):
                found.holds[event.host, int(node)] = record
            elif isinstance(event, events.Restored) and record.attempt == attempt:
                found.restored[int(node)] = event
    return found


def _of_interest(path: Path) -> Iterator[Record]:
    """The few events that count here; a long run's file has a hundred thousand others."""
    try:
        with path.open("rb") as file:
            lines = [line for line in file if any(kind in line for kind in _KINDS)]
    except OSError:
        return
    yield from filter(None, map(events.decode, lines))


def _node(record: Record | None, host: str, node: int, by_epoch: dict[int, list[str]], now: float) -> dict[str, Any]:
    event = record.event if record is not None else None
    held = event if isinstance(event, events.InMemory) else None
    own = None
    if held is not None and held.checkpoint:
        own = {"name": held.checkpoint, "size": held.size, **_age(held.checkpoint, held.sealed_at, now)}
    copies = [_copy(each, by_epoch, now) for each in held.copies] if held is not None else []
    copies = [each for each in copies if each is not None]
    return {"node": node, "host": host, "told": held is not None, "snapshot": own, "copies": copies}


def _copy(told: Any, by_epoch: dict[int, list[str]], now: float) -> dict[str, Any] | None:
    try:
        name, number, size, sealed_at = (told[key] for key in ("checkpoint", "node", "size", "sealed_at"))
        hosts = by_epoch.get(AttemptName.of(name).epoch, [])
        of = hosts[number] if number < len(hosts) else f"node {number}"
        return {"of": of, "name": name, "size": size, **_age(name, sealed_at, now)}
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _age(name: str, sealed_at: float, now: float) -> dict[str, Any]:
    parsed = AttemptName.parse(name)
    return {"step": parsed.step if parsed is not None else None, "age": max(0.0, now - sealed_at)}


def _restored(event: events.Restored) -> dict[str, Any]:
    return {"step": event.step, "name": event.checkpoint, "seconds": event.seconds, "bytes": event.read}


def memory_text(document: dict[str, Any], *, running: bool) -> list[str]:
    """Lines for people.

    Args:
        document: from :func:`memory`.
        running: the run goes on: what was in memory at its end is of no interest, and gone.
    """
    nodes = document["nodes"] if running else []
    if not any(each["told"] for each in nodes):  # as it is where no Session takes checkpoints
        nodes = []
    lines = _few([_node_text(each) for each in nodes])
    shown = [f"  {'memory' if not number else '':<10} {line}" for number, line in enumerate(lines)]
    return [*shown, *_restored_text(document["restored"])]


def _node_text(node: dict[str, Any]) -> str:
    own, unknown = node["snapshot"], "no snapshot" if node["told"] else "it hasn't said yet"
    parts = [f"{node['host']}: {_snapshot_text(own) if own is not None else unknown}"]
    newest: dict[str, dict[str, Any]] = {}
    for each in node["copies"]:
        newest.setdefault(each["of"], each)
    parts += [f"a copy of {of}'s {_snapshot_text(each)}" for of, each in newest.items()]
    return "   ".join(parts)


def _snapshot_text(each: dict[str, Any]) -> str:
    step = f"step {each['step']:,}" if each["step"] is not None else str(each["name"])
    return f"{step}, {format_duration(each['age'])} old"


def _restored_text(restored: list[dict[str, Any]]) -> list[str]:
    if not restored:
        return []
    first = restored[0]
    head = f"step {first['step']:,} in {format_duration(first['seconds'])}"
    if len(restored) == 1:
        return [f"  restored   {head}: {tiers.text(first['bytes'])}"] if first["bytes"] else []
    lines = [f"{each['host'] or each['node']}: {tiers.text(each['bytes']) or 'nothing'}" for each in restored]
    return [f"  restored   {head}", *(f"             {line}" for line in _few(lines))]


def _few(lines: list[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more nodes; --json has all of them"]
