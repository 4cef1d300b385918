"""What happens to nodes, as events of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun import events
from ftrun.health.history import Admitted, Excluded, Withheld

if TYPE_CHECKING:
    from ftrun.health.history import Entry


def event(host: str, entry: Entry) -> events.Event | None:
    """An entry of a node as an event; None for what is told otherwise: a failure has an event of its own.

    Args:
        host: name of the node.
        entry: what happened to it.
    """
    if isinstance(entry, Excluded):
        until = None if entry.seconds is None else entry.at + entry.seconds
        return events.NodeExcluded(host, entry.reason, until, entry.by.value)
    if isinstance(entry, Admitted):
        return events.NodeAdmitted(host, entry.reason, entry.by.value)
    return events.ExclusionRefused(host, entry.reason) if isinstance(entry, Withheld) else None


def write(log: events.EventLog, host: str, entry: Entry) -> None:
    """Have an entry of a node among the events, if it is one; any thread."""
    found = event(host, entry)
    if found is not None:
        log.write(found)
