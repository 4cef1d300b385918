"""Says in what ranks differ that should be the same, from their records in the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.votes import some
from ftrun.checkpoint.layout import attempt_key, rank_json
from ftrun.checkpoint.records import RankRecord
from ftrun.checkpoint.sealed import canonical

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.checkpoint.keeper.votes import Split
    from ftrun.checkpoint.layout import AttemptName, Root

_NUM_SIDES = 8


def explain(root: Root, name: AttemptName, found: Sequence[Split]) -> tuple[str, tuple[str, ...]]:
    """Why an attempt is refused, and the names of the tensors that differ."""
    for split in found:
        if not split.ranks:
            return _positions(_records(root, name, split)), ()
    names: set[str] = set()
    for split in found:
        names.update(_differing(split.ranks, list(_records(root, name, split).values())))
    ranks = " and ".join(f"rank {some(side)}" for side in found[0].sides[:_NUM_SIDES])
    what = f"the tensors {', '.join(sorted(names)[:4])}" if names else "tensors"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (
        f"{what}{more} should be the same on ranks {found[0].ranks}, but {ranks} hold different ones: are they trained "
        "in step? From the next checkpoint on each rank stores its own"
    ), tuple(sorted(names))


def _records(root: Root, name: AttemptName, split: Split) -> dict[tuple[int, ...], RankRecord]:
    """One record of each side, where it can be read."""
    found = {}
    for side in split.sides[:_NUM_SIDES]:
        try:
            found[side] = RankRecord.from_bytes(root.read(attempt_key(name, rank_json(side[0]))))
        except (OSError, ValueError):
            continue
    return found


def _positions(records: dict[tuple[int, ...], RankRecord]) -> str:
    positions = {(record.step, record.total) for record in records.values()}
    if len(positions) > 1:
        said = "; ".join(f"rank {some(side)}: {each.step} of {each.total}" for side, each in records.items())
        return f"the ranks saved different steps ({said}): all must ask for the same total and save at the same step"
    said = "; ".join(f"ranks {some(side)} at {canonical(each.data).decode()[:200]}" for side, each in records.items())
    return f"the ranks disagree on the data position ({said}): every rank must advance its loader in step"


def _differing(ranks: str, records: Sequence[RankRecord]) -> set[str]:
    sides = [{tensor: entry for tensor, entry in record.tensors.items() if entry.ranks == ranks} for record in records]
    names = set().union(*sides)
    return {name for name in names if len({side.get(name) for side in sides}) > 1}
