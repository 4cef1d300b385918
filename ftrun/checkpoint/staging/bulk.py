"""What lies in memory as it does in the file: moved by address, with nothing done again that the save before has done.

What such tensors have in common from save to save is worked out once: sizes, places in the file, and which of them may
be copied while training goes on. At a save only addresses are added up, and counters read.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ftrun.checkpoint.dtensors import versions_of
from ftrun.checkpoint.staging.cut import Cut
from ftrun.checkpoint.staging.moves import SMALL, is_plain
from ftrun.checkpoint.staging.runs import Picked, Runs, Words, grouped
from ftrun.checkpoint.staging.trust import TRIALS, Versions, is_spread, local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from ftrun.checkpoint.plan.planner import Copy, Plan
    from ftrun.checkpoint.staging.trust import Owned, Trust
    from ftrun.checkpoint.state import Alike

T = TypeVar("T")


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
        turn: number of the save.
    """

    now: Runs
    later: Runs
    probes: Runs
    words: Words
    names: Sequence[str]
    versions: Versions
    memory: Sequence[torch.UntypedStorage]
    turn: int

    def changed(self) -> set[str]:
        """Names of tensors that were written to since."""
        seen = self.probes.changed() | self.words.changed() | self.later.changed_somewhere(self.turn)
        return seen | self.versions.changed()


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
        self._course: _Course | None = None

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
        course = self._course
        if course is None or course.turn != turn or not np.array_equal(course.trusted, trusted):
            course = self._course = self._at(trusted, turn)
        sources = alike.addresses[self._numbers] + self._shifts
        now, probes, later = (each.runs(sources, address) for each in (course.now, course.probes, course.later))
        small = course.small
        words = Words(small.names, sources[small.of] + small.starts, small.sizes, turn)
        versions = self._versions(course.which, alike, others)
        memory = alike.memory
        if memory is None:
            memory = [each.untyped_storage() for each in self._watched.some(alike.parts)]
        return Ordered(now, later, probes, words, Picked(self._names, course.which), versions, memory, turn)

    def foresee(self, turn: int) -> None:
        """Work out ahead of a save what doesn't depend on addresses, should the same tensors be trusted then.

        Nothing else uses it meanwhile.
        """
        if self._course is not None and self._course.turn != turn:
            self._course = self._at(self._course.trusted, turn)

    def _at(self, trusted: Any, turn: int) -> _Course:
        parts = self._cut.at(trusted, turn)
        now, probes, later, small = (
            _Part(
                Picked(self._names, cut.of),
                cut.of,
                cut.starts,
                cut.sizes,
                self._offsets[cut.of] + cut.starts,
                grouped(cut.sizes),
            )
            for cut in (parts.now, parts.probes, parts.later, parts.small)
        )
        return _Course(turn, trusted, np.flatnonzero(trusted), now, probes, later, small)

    def _versions(self, trusted: Any, alike: Alike, others: Mapping[int, torch.Tensor]) -> Versions:
        """Counters of what is moved later, and of its owner."""
        if alike.versions is None:
            raise RuntimeError("a tensor has no counter")
        if not np.array_equal(self._watched.trusted, trusted):
            self._watched = _Watched(trusted, self)
        watched, versions = self._watched, Versions()
        parts = watched.some(alike.parts)
        whole = watched.some(alike.given) if watched.are_spread else parts
        versions.note(watched.names, whole, parts, watched.some(alike.versions))
        chosen = [number for number in trusted.tolist() if number in others] if others else []
        owners = [others[each] for each in chosen]
        # A DTensor that was made of the owner counts with it, but its part here counts by itself.
        here = [local(each) for each in owners]
        versions.note([self._names[each] for each in chosen], owners, here, versions_of(owners, here))
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


@dataclass(frozen=True)
class _Part:
    """Parts of tensors that are treated alike, side by side in arrays.

    Attributes:
        names: of their tensors.
        of: number of each one's tensor.
        starts: where they begin within their tensors, in bytes.
        sizes: theirs, in bytes.
        offsets: where they belong in the file.
        groups: of them.
    """

    names: Picked
    of: Any
    starts: Any
    sizes: Any
    offsets: Any
    groups: Sequence[slice]

    def runs(self, sources: Any, address: int) -> Runs:
        """What to move, with tensors and a slot at these addresses."""
        targets = self.offsets + np.uint64(address)
        return Runs(self.names, targets, sources[self.of] + self.starts, self.sizes, self.groups)


@dataclass(frozen=True)
class _Course:
    """What to do at a save, wherever the tensors lie.

    Attributes:
        turn: number of the save.
        trusted: of each tensor whether it is moved later.
        which: numbers of those.
        now: parts of what is moved at once.
        probes: parts that are moved at once, and looked at again.
        later: all else.
        small: those of ``later`` that are all of a tensor, or of a slice.
    """

    turn: int
    trusted: Any
    which: Any
    now: _Part
    probes: _Part
    later: _Part
    small: _Part


class _Watched:
    """Which counters are read, as long as the same tensors are moved later."""

    def __init__(self, trusted: Any, bulk: Bulk) -> None:
        self.trusted = trusted
        self.names = Picked(bulk._names, trusted)
        self.are_spread = bool(bulk._spread[trusted].any())
        self._numbers = bulk._numbers[trusted].tolist()
        self._pick = operator.itemgetter(*self._numbers) if len(self._numbers) > 1 else None

    def some(self, of_all: Sequence[T]) -> list[T]:
        """Of something about each tensor of the state what is about those that are watched."""
        if self._pick is not None:
            return list(self._pick(of_all))
        return [of_all[number] for number in self._numbers]


class _Owners:
    """Which of some tensors are objects that optimizers own.

    The answer is taken from the save before where both sides are the same objects in the same order, but for a few: a
    random state is another tensor each time. Those of both sides live while they are compared, so that identities that
    were given to others since do no harm.

    Attributes:
        are_all: no other tensor is owned.
    """

    def __init__(self) -> None:
        self.are_all = False
        self._given = np.zeros(0, dtype=np.int64)
        self._owned: list[int] = []
        self._identities: frozenset[int] = frozenset()
        self._answer = np.zeros(0, dtype=bool)

    def among(self, given: Sequence[torch.Tensor], owned: Owned) -> Any:
        now = np.fromiter(map(id, given), np.int64, len(given))
        if owned.objects == self._owned and len(now) == len(self._given):
            owned.identities = self._identities
            differ = np.flatnonzero(now != self._given)
            if not self._answer[differ].any() and self._identities.isdisjoint(now[differ].tolist()):
                self._given = now
                return self._answer
        self._given, self._owned, self._identities = now, owned.objects, owned.identities
        self._answer = np.array([each in owned.identities for each in now.tolist()], dtype=bool)
        self.are_all = owned.tensors <= frozenset(now.tolist())
        return self._answer


def _is_bulk(copy: Copy) -> bool:
    tensor = copy.tensor
    return tensor.nbytes > 0 and is_plain(tensor) and tensor.is_contiguous()
