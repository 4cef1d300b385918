"""What lies in memory as it does in the file: moved by address, with nothing done again that the save before has done.

What such tensors have in common from save to save is worked out once: sizes, places in the file, and which of them may
be copied while training goes on. At a save only addresses are added up, and counters read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftrun.checkpoint.staging.cut import Cut
from ftrun.checkpoint.staging.moves import SMALL, is_plain
from ftrun.checkpoint.staging.runs import Picked, Runs, Words
from ftrun.checkpoint.staging.trust import TRIALS, Versions, is_spread, local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from ftrun.checkpoint.plan.planner import Copy, Plan
    from ftrun.checkpoint.staging.trust import Owned, Trust
    from ftrun.checkpoint.state import Alike


@dataclass(frozen=True)
class Ordered:
    """What to do with some tensors at a save.

    Attributes:
        now: what is moved before the save returns.
        later: what is moved before the fence.
        probes: moved before the save returns too, and compared at the end.
        words: compared at the end.
        names: of what is moved later, probes included.
        versions: counters of those.
        memory: that those lie in now. It is kept, whatever the script gives its tensors meanwhile (``x.data = y``).
    """

    now: Runs
    later: Runs
    probes: Runs
    words: Words
    names: Sequence[str]
    versions: Versions
    memory: Sequence[torch.UntypedStorage]

    def changed(self) -> set[str]:
        """Names of tensors that were written to since."""
        return self.probes.changed() | self.words.changed() | self.versions.changed()


class Bulk:
    """The tensors of a plan that are moved this way, and the rest.

    Args:
        plan: the plan.
        names: of all tensors of the state, in their order.
        trust: what was seen of them so far.

    Attributes:
        rest: numbers of the copies that are not moved this way.
        places: number of each tensor of the state.
    """

    def __init__(self, plan: Plan, names: Iterable[str], trust: Trust) -> None:
        self.places = numbers = {name: number for number, name in enumerate(names)}
        chosen = [each for each in plan.copies if _is_bulk(each)]
        self.rest = [number for number, each in enumerate(plan.copies) if not _is_bulk(each)]
        self._names = [each.name for each in chosen]
        self._numbers = np.array([numbers[each.name] for each in chosen], dtype=np.int64)
        whole = [plan.tensors[each.name] for each in chosen]
        shifts = [each.tensor.data_ptr() - local(of).data_ptr() for each, of in zip(chosen, whole, strict=True)]
        self._spread = np.array([is_spread(each) for each in whole], dtype=bool)
        self._shifts = np.array(shifts, dtype=np.uint64)
        self._sizes = np.array([each.tensor.nbytes for each in chosen], dtype=np.uint64)
        self._offsets = np.array([each.piece.offset for each in chosen], dtype=np.uint64)
        levels = [trust.level(each.name) if each.tensor.nbytes > SMALL else -1 for each in chosen]
        self._on_trial = np.array([0 <= level < TRIALS for level in levels], dtype=bool)
        self._later = np.array([level >= TRIALS for level in levels], dtype=bool)
        self._owners = _Owners()
        self._watched = _Watched(np.zeros(0, dtype=np.int64), self)
        self._cut = Cut.of_all(self._sizes.tolist())

    def order(self, alike: Alike, owned: Owned | None, address: int, turn: int) -> Ordered | None:
        """What to do at a save; None where some tensors are on trial.

        Args:
            alike: the state's tensors.
            owned: memory of the tracked optimizers; None where everything is copied at once.
            address: of the slot.
            turn: number of the save.

        Raises:
            RuntimeError: one of the tensors has no counter of writes.
        """
        mine, others = self._mine(alike, owned)
        if (self._on_trial & mine).any():
            return None
        trusted = self._later & mine
        parts = self._cut.at(trusted, turn)
        sources = alike.addresses[self._numbers] + self._shifts
        targets = self._offsets + np.uint64(address)
        now, probes, later = (
            Runs(Picked(self._names, cut.of), targets[cut.of] + cut.starts, sources[cut.of] + cut.starts, cut.sizes)
            for cut in (parts.now, parts.probes, parts.later)
        )
        small = parts.small
        words = Words(Picked(self._names, small.of), sources[small.of] + small.starts, small.sizes, turn)
        which = np.flatnonzero(trusted)
        versions = self._versions(which, alike, others)
        memory = [alike.parts[number].untyped_storage() for number in self._watched.numbers]
        return Ordered(now, later, probes, words, Picked(self._names, which), versions, memory)

    def _versions(self, trusted: Any, alike: Alike, others: Mapping[int, torch.Tensor]) -> Versions:
        """Counters of what is moved later: of its part here, of the whole where that is spread, and of its owner."""
        if alike.versions is None:
            raise RuntimeError("a tensor has no counter")
        if not np.array_equal(self._watched.trusted, trusted):
            self._watched = _Watched(trusted, self)
        watched, versions = self._watched, Versions()
        parts = [alike.parts[number] for number in watched.numbers]
        versions.note(watched.names, parts, [alike.versions[number] for number in watched.numbers])
        versions.watch_all(watched.spread_names, [alike.given[number] for number in watched.spread])
        chosen = [number for number in trusted.tolist() if number in others] if others else []
        versions.watch_all([self._names[each] for each in chosen], [others[each] for each in chosen])
        return versions

    def _mine(self, alike: Alike, owned: Owned | None) -> tuple[Any, dict[int, torch.Tensor]]:
        """Which tensors are optimizers'; and by number the owners of those that are another view of their memory."""
        others: dict[int, torch.Tensor] = {}
        if owned is None:
            return np.zeros(len(self._names), dtype=bool), others
        identical = self._owners.among(alike.given, owned)
        if self._owners.are_all:
            owned.lie_at(alike.addresses[identical])
        identical = identical[self._numbers]
        mine = identical.copy()
        for number in np.flatnonzero((self._on_trial | self._later) & ~identical).tolist():
            owner = owned.owner(alike.given[self._numbers[number]])
            if owner is not None:
                mine[number] = True
                others[number] = owner
        return mine, others


class _Watched:
    """Which counters are read, as long as the same tensors are moved later."""

    def __init__(self, trusted: Any, bulk: Bulk) -> None:
        spread = trusted[bulk._spread[trusted]]
        self.trusted = trusted
        self.names, self.numbers = Picked(bulk._names, trusted), bulk._numbers[trusted].tolist()
        # Writes to the local part don't count for the whole.
        self.spread_names, self.spread = Picked(bulk._names, spread), bulk._numbers[spread].tolist()


class _Owners:
    """Which of some tensors are objects that optimizers own.

    The answer is taken from the save before where both sides are the same objects in the same order. They live while
    they are compared, so that identities that were given to others since do no harm.

    Attributes:
        are_all: no other tensor is owned.
    """

    def __init__(self) -> None:
        self.are_all = False
        self._given: list[int] = []
        self._owned: list[int] = []
        self._identities: frozenset[int] = frozenset()
        self._answer = np.zeros(0, dtype=bool)

    def among(self, given: Sequence[torch.Tensor], owned: Owned) -> Any:
        now = [*map(id, given)]
        same = owned.objects == self._owned
        if same:
            owned.identities = self._identities
        if not same or now != self._given:
            self._given, self._owned, self._identities = now, owned.objects, owned.identities
            self._answer = np.array([each in owned.identities for each in now], dtype=bool)
            self.are_all = owned.tensors <= frozenset(now)
        return self._answer


def _is_bulk(copy: Copy) -> bool:
    tensor = copy.tensor
    return tensor.nbytes > 0 and is_plain(tensor) and tensor.is_contiguous()
