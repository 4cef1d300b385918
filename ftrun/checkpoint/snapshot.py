"""What is saved, by whom, and on whose behalf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ftrun.checkpoint.epochs import EpochRecord


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        node: number of its node.
        local_rank: its number on that node. The ranks of a node follow each other.
        local_world_size: number of ranks on that node.
    """

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int

    @property
    def node_ranks(self) -> range:
        """Global ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


@dataclass(frozen=True)
class Owner:
    """On whose behalf checkpoints are written.

    Attributes:
        run_id: identity of the run.
        epoch: fencing epoch of this start.
        since: epoch at which the lineage began.
        parent: name of the checkpoint that was resumed from, None for a fresh start. Retention spares it.
    """

    run_id: str
    epoch: int
    since: int
    parent: str | None

    @classmethod
    def of(cls, record: EpochRecord) -> Owner:
        """The owner that an epoch's record speaks of."""
        return cls(record.run_id, record.epoch, record.since, record.parent)


@dataclass(frozen=True)
class Snapshot:
    """State in memory, ready to be drained; nobody changes it any more.

    Attributes:
        step: number of finished steps in the state.
        reason: why it was taken (``interval``, ``last``, ``user``, ``signal``).
        total: number of steps that the run asked for, where it did.
        tree: non-tensor state, from :func:`ftrun.checkpoint.state.encode`.
        tensors: contiguous CPU tensors by name, from :func:`ftrun.checkpoint.writer.stage`.
        data: data position; must be the same on all ranks.
        suffix: eight hexadecimal digits, the same on all ranks and new for each save.
    """

    step: int
    reason: str
    total: int | None
    tree: Any
    tensors: Mapping[str, torch.Tensor]
    data: dict[str, Any] | None
    suffix: str
