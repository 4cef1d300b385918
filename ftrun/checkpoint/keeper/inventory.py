"""Tells what this node's memory holds of snapshots: an event whenever that is something else, for ``ftrun status``.

A thread of its own writes it. The run directory may hang where the checkpoint root doesn't: then nothing that people
are told may keep the keeper from its work.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.keeper.scan import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftrun.checkpoint.keeper.config import KeeperConfig
    from ftrun.checkpoint.keeper.work import NodeWork
    from ftrun.checkpoint.memory.tier import Tier

_LAST_SECONDS = 2.0


class Inventory:
    """What one keeper has told. The loop's thread uses it; nothing is told where there is no other node.

    Args:
        tier: the memory tier; what it has of another node lies beside it.
        config: what the keeper is told.
    """

    def __init__(self, tier: Tier, config: KeeperConfig) -> None:
        self._config = config
        self._copies = Scanner(tier.copies)
        self._told: tuple[Any, ...] | None = None
        self._attempt = 0
        self._unsaid: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def look(self, memory: Mapping[str, NodeWork], node: int) -> None:
        """See whether there is news.

        Args:
            memory: what lies sealed there, by attempt.
            node: number of this node now.
        """
        if not self._config.shared:
            return
        own = newest(memory)
        if own is None and self._told is not None and self._told[1]:
            return  # the only slot is being filled anew: that is over in a moment
        if own is not None:
            self._attempt = own.first.run_attempt
        copied = [work for work in self._copies.scan().values() if not work.missing]
        self._tell(node, own, sorted(copied, key=lambda work: work.name, reverse=True))

    def close(self, node: int) -> None:
        """All of it is safe elsewhere, and the memory is given back."""
        if self._told is not None:
            self._tell(node, None, [])
        if self._writer is not None:
            self._unsaid.put(None)
            self._writer.join(_LAST_SECONDS)

    def _tell(self, node: int, own: NodeWork | None, copied: list[NodeWork]) -> None:
        said = (node, "" if own is None else str(own.name), [str(work.name) for work in copied])
        if said == self._told:
            return
        self._told = said
        self._unsaid.put(partial(self._write, node, own, copied, self._attempt))
        if self._writer is None:
            writer = threading.Thread(target=self._write_all, name="ftrun-inventory", daemon=True)
            with contextlib.suppress(RuntimeError):  # where no thread can be had, the next news tries again
                writer.start()
                self._writer = writer

    def _write_all(self) -> None:
        while (write := self._unsaid.get()) is not None:
            write()

    def _write(self, node: int, own: NodeWork | None, copied: list[NodeWork], attempt: int) -> None:
        # Not at the start: a worker may be waiting for a keeper, and these are a fifth of what it imports.
        from ftrun import events
        from ftrun.rundir import RunDir

        path = RunDir(Path(self._config.run_dir)).events(node)
        events.EventLog(path, attempt=attempt).write(
            events.InMemory(
                host=socket.gethostname(),
                checkpoint="" if own is None else str(own.name),
                size=0 if own is None else own.size,
                sealed_at=0.0 if own is None else _sealed_at(own),
                copies=[
                    {
                        "checkpoint": str(work.name),
                        "node": work.first.node,
                        "size": work.size,
                        "sealed_at": _sealed_at(work),
                    }
                    for work in copied
                ],
            )
        )


def newest(memory: Mapping[str, NodeWork]) -> NodeWork | None:
    """The newest snapshot of which this node's own part is whole."""
    whole = [work for work in memory.values() if not (work.missing or work.empty)]
    return max(whole, key=lambda work: work.name, default=None)


def _sealed_at(work: NodeWork) -> float:
    return max(each.sealed_at for each in work.seals)
