"""What a keeper is told: ``keeper.json`` in the memory tier."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.memory.files import put, read
from ftrun.checkpoint.sealed import seal, unseal

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.checkpoint.memory.tier import Tier


@dataclass(frozen=True)
class KeeperConfig:
    """What a keeper is told.

    Attributes:
        run_dir: absolute path of the run directory, for events.
        run_id: identity of the run; snapshots of another one are not committed.
        root: checkpoint root, a path or URL.
        storage_options: for the driver of a URL.
        local: directory of the local tier; empty where there is none.
        node: number of this node.
        keep_last: how many commits are kept.
        keep_every: commits whose step is a multiple of this are kept as well.
        drain_limit: bytes a second that the node may write; None for no limit.
        parent: process that it outlives only to finish what is sealed.
        timeout: seconds for which storage may fail, or other nodes be silent, before a save is given up.
        shared: other nodes take part in the run: what this one's memory holds is then told.
        token: tells this launcher from the one before; set by :class:`ftrun.checkpoint.keeper.process.Keeper`.
    """

    run_dir: str
    run_id: str
    root: str
    storage_options: dict[str, Any]
    local: str
    node: int
    keep_last: int
    keep_every: int | None
    drain_limit: int | None
    parent: int
    timeout: float = 1800.0
    shared: bool = False
    token: str = ""

    @staticmethod
    def path(tier: Tier) -> Path:
        """Where it lies."""
        return tier.path / "keeper.json"

    def write(self, tier: Tier) -> None:
        """Put it where the keeper looks. The directory is readable for its user only, as credentials need."""
        put(self.path(tier), seal(asdict(self)))

    @classmethod
    def read(cls, tier: Tier) -> KeeperConfig | None:
        """Read it back; None where there is none, or a damaged one."""
        try:
            return cls(**unseal(read(cls.path(tier))))
        except (OSError, ValueError, TypeError):
            return None
