"""A run's word on the cache that its scripts read through: ``ftrun status`` finds it where no loader says so."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import durable
from ftrun.contract import WorkerContract
from ftrun.data.cache.layout import Layout
from ftrun.data.cache.pages import node_counters
from ftrun.data.cache.records import Counters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.data.cache.node import Node


@dataclass(frozen=True)
class Told:
    """What a node's first rank has written when it began to use a cache.

    Attributes:
        root: of the cache.
        limit: bytes that it may take, or None.
        host: whose disk it is on.
        before: the node's counters then.
    """

    root: str
    limit: int | None
    host: str
    before: Counters

    def now(self) -> Counters | None:
        """The node's counters now; None where it was another machine, or the cache is gone."""
        layout = Layout(Path(self.root))
        return node_counters(layout.pages) if self.host == os.uname().nodename and layout.home.is_dir() else None


def place(run_dir: Path, node: int) -> Path:
    """Where a node of a run says it."""
    return run_dir / "data" / f"n{node:04d}.cache.json"


def read(run_dir: Path, node: int) -> Told | None:
    """What a node has said; None where nothing."""
    try:
        document = json.loads(place(run_dir, node).read_bytes())
        return Told(**{**document, "before": Counters(**document["before"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def tell(environment: Mapping[str, str], node: Node, limit: int | None) -> None:
    """Say it, once for a run and node, in a thread: the run's disk may be slow. Nothing comes of what goes wrong there.

    Call it before anything is read through the cache: what the run has done is counted from here on.

    Args:
        environment: of the process.
        node: the cache, as it was opened this moment.
        limit: bytes that it may take.
    """
    contract = WorkerContract.from_environment(environment)
    if contract is None or contract.alone or environment.get("LOCAL_RANK", "0") != "0":
        return
    path = place(contract.run_path, contract.node)
    try:
        all_, mine = asdict(node_counters(node.layout.pages)), asdict(node.page.counters())
    except OSError:
        return
    before = Counters(**{name: max(0, all_[name] - mine[name]) for name in all_})

    def write() -> None:
        with contextlib.suppress(OSError):
            known = read(contract.run_path, contract.node)
            if known is not None and (known.host, known.root) == (os.uname().nodename, str(node.layout.root)):
                return  # else the run has gone on with another machine's disk, or another cache
            told = Told(str(node.layout.root), limit, os.uname().nodename, before)
            path.parent.mkdir(exist_ok=True)
            durable.write(path, json.dumps(asdict(told)).encode())

    with contextlib.suppress(RuntimeError):  # no more threads in this process: a read must not fail for this
        threading.Thread(target=write, name="ftrun-cache-told", daemon=True).start()
