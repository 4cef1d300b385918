"""Which rank the others waited for when a collective timed out. Pure.

Ranks that waited in vain are victims, and so are those that lost their connection to them. At fault is the one that
didn't come. Where stacks of living ranks tell who that is, :mod:`ftrun.launch.watching.culprit` reads them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftrun.launch.watching import culprit

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ftrun.launch.evidence.model import RankEvidence

_NAMED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier|heard nothing from rank (\d+)", re.IGNORECASE)
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")


def find(
    ranks: Sequence[RankEvidence], said: Mapping[int, str], complaining: Collection[int]
) -> tuple[int, str] | None:
    """The rank that was waited for, and how that shows; None where nothing tells.

    Args:
        ranks: all ranks of the node, in any order.
        said: what each wrote last, by rank.
        complaining: ranks that say that they waited in vain.
    """
    ranks = sorted(ranks, key=lambda each: each.rank)
    enqueued = {rank: int(match[1]) for rank, text in said.items() if (match := _ENQUEUED.search(text))}
    return (
        _named([said.get(rank, "") for rank in sorted(complaining)])
        or _living([each for each in ranks if each.exit_code is None and each.rank not in complaining])
        or _lowest(enqueued, "collective")
        or _lowest({each.rank: each.beat.step for each in ranks if each.beat is not None}, "step")
        or _silent(ranks, complaining)
    )


def _named(texts: Sequence[str]) -> tuple[int, str] | None:
    for text in texts:
        if match := _NAMED.search(text):
            rank = int(re.split(r"[, ]+", (match[1] or match[2]).strip())[0])
            return rank, f"the others say that they waited for rank {rank}"
    return None


def _living(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    if len(ranks) != 1:
        rank, how = culprit.name_culprit(ranks) if ranks else (None, "")
        return None if rank is None else (rank, how)
    only = ranks[0]
    if only.state in ("T", "t"):
        return only.rank, f"rank {only.rank} is stopped (by SIGSTOP or a debugger)"
    if not only.stack or culprit.waits_for_others(only.stack):
        return None
    return only.rank, f"rank {only.rank} is in {culprit.short(culprit.where(only.stack))}"


def _lowest(counters: Mapping[int, int], what: str) -> tuple[int, str] | None:
    if len(counters) < 2:
        return None
    (low, rank), (following, _) = sorted((value, rank) for rank, value in counters.items())[:2]
    return (rank, f"rank {rank} is behind: {what} {low:,}, the others {following:,}") if low < following else None


def _silent(ranks: Sequence[RankEvidence], complaining: Collection[int]) -> tuple[int, str] | None:
    quiet = [each.rank for each in ranks if each.rank not in complaining]
    if complaining and len(quiet) == 1:
        return quiet[0], f"rank {quiet[0]} is the only one that doesn't say it waited"
    return None
