"""Whether ranks that commit together fit together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.checkpoint.plan.pieces import ranks_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ftrun.checkpoint.records import Word


@dataclass(frozen=True)
class Split:
    """Ranks that should say the same and don't.

    Attributes:
        ranks: text of the ranks that share tensors; empty where the position of all ranks is meant.
        sides: ranks that say the same, the side of the lowest rank first; the last side may be of those that say
            nothing.
    """

    ranks: str
    sides: tuple[tuple[int, ...], ...]


def splits(words: Mapping[int, Word]) -> list[Split]:
    """Where ranks disagree; empty when they don't.

    Raises:
        ValueError: a word's groups name no ranks.
    """
    said: dict[str, dict[str, list[int]]] = {"": {}}
    for rank in sorted(words):
        word = words[rank]
        said[""].setdefault(word.position, []).append(rank)
        for text, digest in word.groups.items():
            said.setdefault(text, {}).setdefault(digest, []).append(rank)
    found = []
    for text, sides in said.items():
        silent = _silent(text, sides.values()) if text else []
        if len(sides) > 1 or silent:
            parts = [tuple(ranks) for ranks in sides.values()]
            found.append(Split(text, tuple(parts + [tuple(silent)] * bool(silent))))
    return found


def _silent(text: str, sides: Iterable[list[int]]) -> list[int]:
    members = set(ranks_of(text))
    spoke = {rank for side in sides for rank in side}
    # A rank that speaks for a group it isn't in is as wrong as one that is silent.
    return sorted(members ^ spoke)


def absent(words: Collection[int], world_size: int) -> list[int]:
    """Ranks of the world of which no node has spoken."""
    return sorted(set(range(world_size)) - set(words))


def some(ranks: Collection[int]) -> str:
    """The first few of many ranks, as text."""
    listed = sorted(ranks)
    return ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
