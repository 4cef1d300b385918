"""What ``ftrun status`` says of a run's data: how long steps wait, how the node's cache does, what would help."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.config.units import format_duration, format_size
from ftrun.data.filler.shown import Shown, of_run, of_scripts
from ftrun.goodput.data_wait import measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.events import Record

_MUCH = 0.1
"""Share of the step that is worth a word."""
_FEW = 10
_LITTLE = 0.1
_FETCHING = 0.5
"""Share of the waiting from which on it is the files' own, and not their decoding's."""


def data(run_dir: Path, records: Sequence[Record]) -> dict[str, Any] | None:
    """A run's data, as JSON has it; None where nothing is known of it."""
    waited, shown = measure(records), of_run(run_dir) or _of_scripts(run_dir, records)
    if waited is None and shown is None:
        return None
    document: dict[str, Any] = {
        "wait_median": waited.median if waited else None,
        "wait_share": waited.share if waited else None,
        "wait_steps": waited.steps if waited else 0,
        "wait_seconds": waited.total if waited else None,
        "cache": shown.to_json() | {"used": _used(shown.root), "hit_rate": shown.hit_rate} if shown else None,
    }
    return document | {"hint": hint(document)}


def _of_scripts(run_dir: Path, records: Sequence[Record]) -> Shown | None:
    """Where no loader says it: as it is now, and once the run is over as the launcher has recorded it at its end."""
    marks = (each.event for each in reversed(records) if isinstance(each.event, events.RunEnded | events.RunStarted))
    if isinstance(next(marks, None), events.RunEnded):
        return _told(records)
    return of_scripts(run_dir) or _told(records)


def _told(records: Sequence[Record]) -> Shown | None:
    """What the launcher has recorded last: the run's own directory in the cache may be gone, or elsewhere."""
    told = [each.event for each in reversed(records) if isinstance(each.event, events.DataRead)]
    return Shown.of_event(told[0]) if told else None


def hint(document: dict[str, Any]) -> str:
    """What to do where steps wait for data; empty where they don't."""
    share, cache = document["wait_share"], document["cache"]
    if share is None or share < _MUCH or document["wait_steps"] < _FEW:
        return ""
    if cache is None:
        return (
            "the loader can't keep up: give it more num_workers (or a larger prefetch_factor); read remote files "
            "through ftrun.CachedDataset"
        )
    waits = cache["waits_for"]
    if waits and waits != "room in the cache":
        return f"the remote doesn't answer: {waits}"
    if waits or cache["bypasses"] > cache["hits"]:
        return "the cache is too small or its disk is full: raise data.limit, or put data.cache on a larger disk"
    if cache["wait_seconds"] > _FETCHING * document["wait_seconds"]:
        return (
            "files are read faster than the remote gives them: larger files or a quicker remote would help; what is in "
            "the cache by the next epoch is quick"
        )
    return (
        "files are there in time, and decoding them holds the loop up: more num_workers (or a larger prefetch_factor)"
    )


def data_text(document: dict[str, Any] | None) -> list[str]:
    """Lines for people."""
    if document is None:
        return []
    lines = []
    if document["wait_median"] is not None:
        median, share = document["wait_median"], document["wait_share"]
        lines.append(f"  data       {format_duration(median)} of waiting in a step   {share:.0%} of its time")
    if document["cache"] is not None:
        lines.append(f"  cache      {_cache_text(document['cache'])}")
    if document["hint"]:
        lines.append(f"             {document['hint']}")
    return lines


def _cache_text(cache: dict[str, Any]) -> str:
    limit = f" of {format_size(cache['limit'])}" if cache["limit"] else ""
    parts = [f"{format_size(cache['used'])}{limit}" if cache["used"] >= 0 else cache["root"]]
    if cache["bytes"]:
        parts.append(f"{format_size(cache['bytes'])} downloaded")
    if cache["hit_rate"] is not None:
        parts.append(f"{cache['hit_rate']:.1%} of {cache['hits'] + cache['misses'] + cache['bypasses']:,} reads hit")
    if cache["wait_seconds"] >= _LITTLE:
        parts.append(f"waited {format_duration(cache['wait_seconds'])} for files")
    if cache["bypasses"]:
        parts.append(f"{cache['bypasses']:,} past it")
    if cache["pid"]:
        waits = f", waits for {cache['waits_for']}" if cache["waits_for"] else ""
        parts.append(f"{cache['steps_ahead']:,.0f} steps ahead{waits}")
    if cache["errors"] or cache["missing"]:
        parts.append(f"{cache['errors']:,} errors, {cache['missing']:,} files gone")
    return "   ".join(part for part in parts if part)


def _used(root: str) -> int:
    """Bytes in the cache, by its own books; -1 where they can't be read. Nothing is locked for it."""
    if not root:
        return -1
    try:
        _magic, total, _changing = struct.unpack("=8sqq", (Path(root) / f"uid-{os.geteuid()}" / "gc.lock").read_bytes())
    except (OSError, struct.error):
        return -1
    return int(total)
