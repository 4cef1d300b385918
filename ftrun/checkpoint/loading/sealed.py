"""Which snapshot in the memory tier a run may resume from although nobody has committed it yet. No torch."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import AttemptName, rank_json
from ftrun.checkpoint.manifest import is_count, is_file_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.checkpoint.records import Seal


@dataclass(frozen=True)
class SealedPoint:
    """A snapshot that all ranks have sealed.

    Attributes:
        name: name of the attempt to save.
        step: number of finished steps in the state.
        world_size: number of ranks that took it.
    """

    name: str
    step: int
    world_size: int


def newest_sealed(tier: Tier, run_id: str, since: int, *, exclude: Collection[str] = frozenset()) -> SealedPoint | None:
    """The newest snapshot, by (epoch, step), that all ranks of a group have sealed on this node.

    Args:
        tier: the node's memory tier; it need not exist.
        run_id: identity of the run.
        since: epoch at which the lineage began.
        exclude: names that are not wanted.
    """
    seals = [seal for _, seal in tier.sealed() if seal.attempt not in exclude and are_files_whole(seal)]
    return choose(seals, run_id, since)


def choose(seals: Iterable[Seal], run_id: str, since: int) -> SealedPoint | None:
    """Choose among seals whose files are whole."""
    sets: dict[AttemptName, dict[int, Seal]] = {}
    for seal in seals:
        name = AttemptName.parse(seal.attempt) if isinstance(seal.attempt, str) else None
        if name is not None and name.epoch >= since and seal.run_id == run_id and is_sane(seal, name):
            sets.setdefault(name, {})[seal.rank] = seal
    for name in sorted(sets, reverse=True):
        if _is_complete(sets[name]):
            return SealedPoint(str(name), name.step, len(sets[name]))
    return None


def is_sane(seal: Seal, name: AttemptName) -> bool:
    """Whether a seal says what the seal of a rank of that attempt could say."""
    numbers = (seal.rank, seal.world_size, seal.step, *seal.node_ranks)
    if not all(map(is_count, numbers)) or not seal.rank < seal.world_size or seal.step != name.step:
        return False
    return rank_json(seal.rank) in seal.files and all(map(is_file_name, seal.files))


def are_files_whole(seal: Seal) -> bool:
    """Whether its files are there with the sizes that it says."""
    for path, size in seal.files.values():
        try:
            status = os.stat(path, follow_symlinks=False)
        except (OSError, ValueError):
            return False
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
    return True


def _is_complete(seals: Mapping[int, Seal]) -> bool:
    """Whether these are the seals of all ranks, and all of one group."""
    first = next(iter(seals.values()))
    groups = {(seal.world_size, seal.step, seal.total, seal.word.position) for seal in seals.values()}
    return len(groups) == 1 and sorted(seals) == list(range(first.world_size))
