"""Many tensors that are not large: moved by address, with nothing done for each of them that the save before has done.

What they have in common from save to save is worked out once: sizes, places in the file, and which of them may be
copied while training goes on. At a save only addresses are added up, and counters read.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ftrun.checkpoint.staging.moves import LARGE, PROBES, SLICE, SMALL, Block, is_plain
from ftrun.checkpoint.staging.trust import TRIALS, is_spread, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from ftrun.checkpoint.plan.planner import Copy, Plan
    from ftrun.checkpoint.staging.trust import Owned, Trust
    from ftrun.checkpoint.state import Alike

_WORDS = 2
"""Words of 8 bytes of each tensor that are looked at twice: a write to all of it changes them. Each costs a cache miss
of its own, which training waits for; so they are few, and others at each save."""

_GOLDEN = 0.6180339887498949
"""By which they move on, so that they come by everywhere soon."""

_memmove = ctypes.memmove
_Memory = ctypes.c_uint64 * 2**44


class Many:
    """Some runs of memory to be moved."""

    def __init__(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        self._targets, self._sources, self._sizes = targets, sources, sizes

    def tasks(self) -> Iterator[Callable[[], None]]:
        """Work worth passing to another thread, none of much more than a slice."""
        ends = np.cumsum(self._sizes)
        first = 0
        while first < len(ends):
            done = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, done + SLICE, side="right")))
            yield partial(self._move, first, last)
            first = last

    def _move(self, first: int, last: int) -> None:
        part = slice(first, last)
        for target, source, size in zip(self._targets[part], self._sources[part], self._sizes[part], strict=True):
            _memmove(target, source, size)


class Words:
    """Some words of some tensors as they are now, to be looked at again. The tensors stay alive meanwhile.

    Args:
        names: of the tensors.
        starts: their addresses.
        sizes: their sizes, each more than two words.
        turn: number of the save.
    """

    def __init__(self, names: list[str], starts: Any, sizes: Any, turn: int) -> None:
        self._names = names
        base = int(starts.min()) // 8 * 8 if names else 8
        first = (starts + 7) // 8
        last = (starts + sizes) // 8 - 1
        steps = (np.arange(_WORDS)[None, :] / _WORDS + turn * _GOLDEN) % 1.0
        within = ((last - first + 1)[:, None] * steps).astype(np.uint64)
        self._places = (first[:, None] + within - base // 8).astype(np.int64)
        # All memory from there on as an array, of which no other words are read.
        self._memory = np.ctypeslib.as_array(_Memory.from_address(base))
        self._then = self._memory.take(self._places)

    def changed(self) -> set[str]:
        """Names of tensors that are not the same any more."""
        differ = (self._memory.take(self._places) != self._then).any(axis=1)
        return {self._names[number] for number in np.flatnonzero(differ).tolist()}


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

    def order(self, alike: Alike, owned: Owned | None, address: int, turn: int) -> Ordered | None:
        """What to do at a save; None where some tensors are on trial.

        Args:
            alike: the state's tensors.
            owned: memory of the tracked optimizers; None where everything is copied at once.
            address: of the slot.
            turn: number of the save.
        """
        sources = alike.addresses[self._numbers] + self._shifts
        targets = self._offsets + np.uint64(address)
        given = alike.given
        mine, others = self._mine(given, owned)
        if (self._on_trial & mine).any():
            return None
        later = np.flatnonzero(self._later & mine)
        probe = (np.arange(len(later)) + turn) % PROBES == 0
        probes, later = later[probe], later[~probe]
        now = np.ones(len(sources), dtype=bool)
        now[later] = now[probes] = False
        runs = [np.flatnonzero(now), later, probes]
        moves = [Many(targets[each].tolist(), sources[each].tolist(), self._sizes[each].tolist()) for each in runs]
        blocks = [
            Block(self._names[each], int(targets[each]), int(sources[each]), int(self._sizes[each]))
            for each in probes.tolist()
        ]
        watched = np.concatenate([later, probes])
        names = [self._names[each] for each in watched.tolist()]
        words = Words([self._names[each] for each in later.tolist()], sources[later], self._sizes[later], turn)
        tensors = [given[each] for each in self._numbers[watched].tolist()]
        for number in watched[self._spread[watched]].tolist():  # writes to the local part don't count for the whole
            names.append(self._names[number])
            tensors.append(local(given[self._numbers[number]]))
        for number in [each for each in watched.tolist() if each in others] if others else ():
            names.append(self._names[number])
            tensors.append(others[number])
        return Ordered(moves[0], moves[1], blocks, words, names, tensors)

    def _mine(self, given: Sequence[torch.Tensor], owned: Owned | None) -> tuple[Any, dict[int, torch.Tensor]]:
        """Which tensors are optimizers'; and by number the owners of those that are another view of their memory."""
        others: dict[int, torch.Tensor] = {}
        if owned is None:
            return np.zeros(len(self._names), dtype=bool), others
        identical = owned.identities
        mine = np.array([id(each) in identical for each in given], dtype=bool)[self._numbers]
        for number in np.flatnonzero((self._on_trial | self._later) & ~mine).tolist():
            owner = owned.owner(given[self._numbers[number]])
            if owner is not None:
                mine[number] = True
                others[number] = owner
        return mine, others


class Ordered:
    """What to do with some tensors at a save.

    Attributes:
        now: what is moved before the save returns.
        later: what is moved before the fence.
        probes: moved before the save returns too, and compared at the end.
        words: compared at the end.
        names: of what is moved later, probes included.
        tensors: those.
    """

    def __init__(
        self,
        now: Many,
        later: Many,
        probes: Sequence[Block],
        words: Words,
        names: list[str],
        tensors: list[torch.Tensor],
    ) -> None:
        self.now, self.later, self.probes = now, later, probes
        self.words, self.names, self.tensors = words, names, tensors


def _is_bulk(copy: Copy) -> bool:
    tensor = copy.tensor
    return 0 < tensor.nbytes < LARGE and is_plain(tensor) and tensor.is_contiguous()
