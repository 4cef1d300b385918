"""What the nodes of a run have been through, told to all at the beginning of each round, so that budgets are one.

The node that fails decides, by what it knows of earlier failures; whichever it is, it has to know of all of them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ftrun.launch.failures.kinds import Kind

if TYPE_CHECKING:
    from torch.distributed import Store

    from ftrun.launch.past import Past

_MINE, _ALL = "ftrun/past/{}", "ftrun/past"
_MOST = 200


@dataclass
class Told:
    """What one node knows, or all of them together.

    Attributes:
        restarts, streak, streak_by_kind, earlier: as in :class:`~ftrun.launch.past.Past`.
        ages: how long ago each failure was, in seconds; the nodes' clocks needn't agree.
        made_a_step: some attempt completed a step.
        passed_over: commits that aren't resumed from any more.
        fell: the event of the last failure, where a node has just decided about it, as a JSON object.
        node: the number that this node had then.
    """

    restarts: int = 0
    streak: int = 0
    streak_by_kind: dict[str, int] = field(default_factory=dict)
    earlier: list[tuple[str, int]] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    made_a_step: bool = False
    passed_over: list[str] = field(default_factory=list)
    fell: dict[str, Any] | None = None
    node: int = 0

    @classmethod
    def of(cls, past: Past, *, made_a_step: bool, passed_over: set[str]) -> Told:
        """What this node has to tell."""
        now = time.time()
        return cls(
            past.restarts,
            past.streak,
            {kind.value: count for kind, count in past.streak_by_kind.items()},
            past.earlier[-_MOST:],
            [now - each for each in past.failed_at][-_MOST:],
            made_a_step,
            sorted(passed_over),
        )

    def give(self, past: Past) -> None:
        """Make it what this node has been through."""
        now = time.time()
        past.restarts, past.streak = self.restarts, self.streak
        past.streak_by_kind = Counter({Kind(name): count for name, count in self.streak_by_kind.items()})
        past.earlier = [(name, step) for name, step in self.earlier]
        past.failed_at = [now - age for age in self.ages]


def merged(told: list[Told]) -> Told:
    """What all know together. Failures come one after the other: who knows of the most knows of all."""
    most = max(told, key=lambda each: (len(each.ages), each.restarts))
    fell = next((each for each in told if each.fell is not None), None)
    return Told(
        most.restarts,
        most.streak,
        most.streak_by_kind,
        most.earlier,
        most.ages,
        any(each.made_a_step for each in told),
        sorted({name for each in told for name in each.passed_over}),
        fell.fell if fell is not None else None,
        fell.node if fell is not None else 0,
    )


def exchange(store: Store, node: int, nodes: int, mine: Told) -> Told:
    """Tell the others, and learn what all know. Waits for all of them, as long as the round stands.

    Args:
        store: of the round.
        node: this node's number.
        nodes: how many there are.
        mine: what it has to tell.

    Raises:
        RoundBroken: the round is over.
    """
    store.set(_MINE.format(node), json.dumps(asdict(mine)))
    if node == 0:
        texts = store.multi_get([_MINE.format(each) for each in range(nodes)])
        together = merged([Told(**json.loads(text)) for text in texts])
        store.set(_ALL, json.dumps(asdict(together)))
        return together
    return Told(**json.loads(store.get(_ALL)))
