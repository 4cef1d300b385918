"""Which rank is at fault when a group hangs. Pure.

Ranks that train together wait for each other, so all of them stand still soon after the first one does. That one is
found by where it stands: the others are in a collective, or wait for rank 0 or for a commit, and it isn't.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftrun.launch.evidence.model import RankEvidence

# Parts of paths where Python code calls what waits for other ranks. The last is where every backward pass runs, and
# with it the all-reduce of DistributedDataParallel.
_WAITING = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "torch/cuda/__init__.py",
    "torch/cuda/streams.py",
    "ftrun/session/agreement.py",
    "ftrun/checkpoint/writer.py",
    "ftrun/checkpoint/commit.py",
    "torch/autograd/graph.py",
)
# Frames that say how something waits and not what for.
_BENEATH = ("/threading.py:",)

_SURE_SECONDS = 0.05


def name_culprit(ranks: Sequence[RankEvidence]) -> tuple[int | None, str]:
    """The rank that the others wait for, and how that shows.

    Args:
        ranks: of one group, taken at one moment.

    Returns:
        The rank, or None where nothing sets one apart; and a sentence.
    """
    if len(ranks) == 1:
        return ranks[0].rank, "it is the only rank"
    for look in (_stopped, _left, _outside_a_collective, _behind, _in_the_kernel, _elsewhere):
        found = look(ranks)
        if found is not None:
            return found
    return None, "nothing sets one rank apart from the others"


def where(stack: Sequence[str]) -> str:
    """The innermost frame that says what a rank does; empty without a stack."""
    frames = [frame for frame in stack if not any(each in frame for each in _BENEATH)]
    return frames[0] if frames else (stack[0] if stack else "")


def waits_for_others(stack: Sequence[str]) -> bool:
    """Whether a rank stands where ranks wait for each other."""
    frame = where(stack)
    return any(place in frame for place in _WAITING)


def short(frame: str) -> str:
    """A frame without its directories."""
    return frame.rpartition("/")[2]


def _the_one(ranks: Sequence[RankEvidence], is_it: Callable[[RankEvidence], bool]) -> RankEvidence | None:
    """The only rank that something is true of."""
    found = [each for each in ranks if is_it(each)]
    return found[0] if len(found) == 1 else None


def _stopped(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    one = _the_one(ranks, lambda each: each.state in ("T", "t"))
    return None if one is None else (one.rank, f"rank {one.rank} is stopped (by SIGSTOP or a debugger)")


def _left(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    left = [each for each in ranks if each.exit_code == 0]
    if not left or len(left) == len(ranks):
        return None
    first = min(left, key=lambda each: each.exited_at)
    return first.rank, f"rank {first.rank} has ended, with exit code 0, and the others wait"


def _outside_a_collective(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    waiting = [each for each in ranks if waits_for_others(each.stack)]
    outside = [each for each in ranks if each not in waiting]
    if not waiting or not outside:
        return None
    one = _first_to_stand(outside)
    if one is None:
        return None
    doing = f"is in {short(where(one.stack))}" if one.stack else "gives no stack"
    other = waiting[0]
    return one.rank, f"rank {one.rank} {doing}, while rank {other.rank} waits in {short(where(other.stack))}"


def _first_to_stand(ranks: Sequence[RankEvidence]) -> RankEvidence | None:
    """Of several, the one that is the furthest back; of those at one step, the one that was heard of first."""
    if len(ranks) == 1:
        return ranks[0]
    steps = {each.rank: each.beat.step for each in ranks if each.beat is not None}
    last = [each for each in ranks if each.rank in steps and steps[each.rank] == min(steps.values())]
    if len(last) == 1:
        return last[0]
    stuck = _the_one(last, lambda each: each.state == "D")
    if stuck is not None or len(last) < 2:
        return stuck
    heard = sorted(last, key=lambda each: each.beat.time if each.beat is not None else 0.0)
    first, second = (each.beat.time if each.beat is not None else 0.0 for each in heard[:2])
    return heard[0] if second - first > _SURE_SECONDS else None


def _behind(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    steps = {each.rank: each.beat.step for each in ranks if each.beat is not None}
    last = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(last) != 1 or len(steps) < len(ranks):
        return None
    ahead = max(steps.values())
    return last[0], f"rank {last[0]} has completed {steps[last[0]]:,} steps, others {ahead:,}"


def _in_the_kernel(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    one = _the_one(ranks, lambda each: each.state == "D")
    if one is None:
        return None
    inside = f" in {one.waits_in}" if one.waits_in else ""
    return one.rank, f"rank {one.rank} is in uninterruptible sleep{inside}: storage or a driver doesn't answer"


def _elsewhere(ranks: Sequence[RankEvidence]) -> tuple[int, str] | None:
    """The only one that isn't where most are."""
    places = {each.rank: where(each.stack) for each in ranks if each.stack}
    counts = Counter(places.values())
    common, count = counts.most_common(1)[0] if counts else ("", 0)
    apart = [rank for rank, place in places.items() if place != common]
    if len(apart) != 1 or count < 2:
        return None
    return apart[0], f"rank {apart[0]} is in {short(places[apart[0]])}, all others in {short(common)}"
