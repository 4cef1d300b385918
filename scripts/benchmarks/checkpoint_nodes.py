"""``checkpoint.many_nodes``: the leader's part of a commit with 2,048 nodes, and what a reader makes of it."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from common import say
from figures import Figure, Target, median, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common import Settings

NODES = 2048
RANKS = 16384
_PER_NODE = RANKS // NODES
_MODULES = ("layout", "records", "reader", "manifest", "checksums", "keeper.commit", "keeper.faults")


def many_nodes(settings: Settings) -> Iterator[Figure]:
    """Nodes' records lie ready, and the files that they name; read, compared, committed, verified."""
    # The same, twice in turns: the one is the other's control.
    seconds: tuple[list[float], list[float]] = ([], [])
    try:
        parts = {each: importlib.import_module(f"ftrun.checkpoint.{each}") for each in _MODULES}
        folder = settings.folder("nodes")
        name = _prepare(parts, folder)
        for turn in range(settings.count(10, 3) * 2):
            seconds[turn % 2].append(_commit(parts, folder, name))
    except (ImportError, AttributeError, TypeError) as error:
        why = f"there is no such commit: {error}"
        yield Figure("checkpoint.many_nodes", None, Target("<=", 2.0), reference={"ftrun": why}, notes=[why])
        return
    ours, again = seconds
    yield Figure(
        "checkpoint.many_nodes",
        median(ours),
        Target("<=", 2.0),
        control=ratio(median(again), median(ours)),
        n=len(ours),
        notes=[f"{NODES:,} nodes, {RANKS:,} ranks: {spread(ours)} to the manifest, read back, every file looked at"],
    )


def _commit(parts: dict[str, Any], folder: Path, name: Any) -> float:
    """As the leading node does it, with its keeper's functions; the manifest is gone again afterwards."""
    root = parts["layout"].Root.open(folder)
    began = time.perf_counter()
    verdict = parts["keeper.commit"].Ballot(root, name, parts["keeper.faults"].Faults()).look(leads=True)
    written = time.perf_counter() - began
    chosen = parts["reader"].latest(root, "bench").commit
    seconds = time.perf_counter() - began
    if chosen is None or len(chosen.manifest.files) != 2 * RANKS:
        raise AttributeError(f"no checkpoint of {RANKS} ranks came of it: {verdict!r:.200}")
    say(f"{NODES:,} nodes: manifest after {written:.2f} s, verified after {seconds:.2f} s")
    root.path.joinpath(parts["layout"].attempt_key(name, parts["layout"].MANIFEST)).unlink()
    return seconds


def _prepare(parts: dict[str, Any], folder: Path) -> Any:
    """What 2,048 keepers leave: files, and a record for each node."""
    layout, records, checksums = parts["layout"], parts["records"], parts["checksums"]
    name = layout.AttemptName(1, 1, "0" * 8)
    attempt = folder / layout.attempt_key(name, "")
    (attempt / "done").mkdir(parents=True)
    about = records.About("bench", RANKS, 1, None, "user", None, None, "2.13.0")
    record = checksums.FileRecord(1, 0, (0,))
    for node in range(NODES):
        ranks = range(node * _PER_NODE, (node + 1) * _PER_NODE)
        files = [each for rank in ranks for each in (layout.rank_shard(rank), layout.rank_json(rank))]
        for each in files:
            (attempt / each).write_bytes(b"0")
        words = {rank: records.Word("0" * 16, {f"0-{RANKS - 1}": "1" * 16}) for rank in ranks}
        done = records.DoneRecord(node, dict.fromkeys(files, record), words, about)
        (attempt / layout.done_json(node)).write_bytes(done.to_bytes())
    return name
