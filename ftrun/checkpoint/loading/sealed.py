"""Which snapshot in the memory tier a run may resume from although nobody has committed it yet. No torch."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import AttemptName, rank_json
from ftrun.checkpoint.manifest import is_count, is_file_name
from ftrun.checkpoint.memory.files import lies_elsewhere

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
    seals = [seal for _, seal in tier.sealed() if seal.attempt not in exclude and not problem_of(seal)]
    return choose(seals, run_id, since)


def spoilt(tier: Tier, run_id: str, since: int) -> dict[AttemptName, str]:
    """The snapshots of a run that lack a file of those that were sealed, and what is wrong with it.

    Args:
        tier: the node's memory tier; it need not exist.
        run_id: identity of the run.
        since: epoch at which the lineage began.
    """
    found = {}
    for _, seal in tier.sealed():
        name, problem = AttemptName.parse(seal.attempt), problem_of(seal)
        if problem and name is not None and name.epoch >= since and seal.run_id == run_id:
            found[name] = problem
    return found


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


def problem_of(seal: Seal) -> str:
    """Which of its files isn't there with its size; empty for none. Their bytes are verified when they are read."""
    for file, (path, record) in seal.files.items():
        try:
            status = os.stat(path, follow_symlinks=lies_elsewhere(Path(path)))
        except FileNotFoundError:
            return f"{file} is missing in this node's memory"
        except (OSError, ValueError) as error:
            return f"{file} can't be read in this node's memory: {error}"
        if not stat.S_ISREG(status.st_mode):
            return f"{file} is no regular file in this node's memory"
        if status.st_size != record.size:
            return f"{file} has {status.st_size} bytes in this node's memory instead of {record.size}"
    return ""


def _is_complete(seals: Mapping[int, Seal]) -> bool:
    """Whether these are the seals of all ranks, and all of one group."""
    first = next(iter(seals.values()))
    groups = {(seal.world_size, seal.step, seal.total, seal.word.position) for seal in seals.values()}
    return len(groups) == 1 and sorted(seals) == list(range(first.world_size))
