"""Taking the same state apart at every save, at the cost of what has changed in it.

Nothing of the state is kept from save to save, so nothing that the script lets go of stays in memory: only names, and
what tells how tensors lay. A tensor is taken for what it was when its place in the state, its dtype, shape, strides and
address are the same, whatever object it is. Few may lie elsewhere: values that are made anew for each save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ftrun.checkpoint import state
from ftrun.checkpoint.dtensors import is_dtensor, parts_of
from ftrun.checkpoint.plan.lying import Guard, Layout, Look, look, same_empty
from ftrun.checkpoint.refusals import Refused
from ftrun.checkpoint.state import Alike, Encoded
from ftrun.checkpoint.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

T = TypeVar("T")

_MOVED = 64
"""Tensors that may lie elsewhere than in the save before; of more all is looked at anew."""


class Encoding:
    """:func:`ftrun.checkpoint.state.encode` for one state again and again. Training thread only."""

    def __init__(self) -> None:
        self._walk: _Before | None = None

    def encode(self, value: object) -> Encoded:
        """Take a state apart.

        Raises:
            NotStorable: as :func:`ftrun.checkpoint.state.encode`.
        """
        again = self._again(value) if self._walk is not None else None
        return again or self._anew(value)

    def _anew(self, value: object) -> Encoded:
        self._walk = None
        walk = Walk()
        encoded = state.taken_apart(value, walk)
        parts = parts_of(walk.given)
        if parts is None:
            return encoded
        seen = look(walk.given, parts)
        self._walk = before = _Before(walk, Layout.of(walk.given, parts, seen), encoded.tensors)
        before.guard = Guard.of(walk.given, parts, seen.kinds)
        alike = before.alike(walk.given, seen)
        return Encoded(encoded.tree, encoded.tensors, alike, _settled(walk))

    def _again(self, value: object) -> Encoded | None:
        before = self._walk
        assert before is not None, "asked by the caller"
        walk = Walk(before=before.blocks)
        try:
            tree = walk.encode(value, "")
        except Refused:
            return None  # the walk anew says it, or says more
        if walk.names != before.names or not walk.finished(before.bases):
            return None
        try:
            seen = before.look(walk.given)
        except RuntimeError:  # of what has no memory, or no strides
            return None
        if seen is None or not before.is_as_it_was(walk.given, seen):
            return None
        alike = before.alike(walk.given, seen)
        return Encoded(tree, _Plain(before.numbers, alike.given), alike, _settled(walk))


def _settled(walk: Walk) -> dict[str, Any]:
    """The nodes of blocks: nobody changes them once a walk is complete, and the next one takes over what it can."""
    return {name: block.node for name, block in walk.blocks.items()}


class _Plain(Mapping[str, torch.Tensor]):
    """Tensors by name, without gradient when they are asked for: most of them never are."""

    def __init__(self, numbers: dict[str, int], given: Sequence[torch.Tensor]) -> None:
        self._numbers = numbers
        self._given = given

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._given[self._numbers[name]]
        as_it_is = (type(tensor) is torch.Tensor and not tensor.requires_grad) or is_dtensor(tensor)
        return tensor if as_it_is else tensor.detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Before:
    """What is kept of a walk."""

    def __init__(self, walk: Walk, layout: Layout, stored: Collection[str]) -> None:
        self.blocks = walk.blocks
        self.names = walk.names
        self.bases = walk.bases
        self.layout = layout
        self.guard: Guard | None = None
        self._kept = [number for number, name in enumerate(walk.names) if name in stored]
        self._places = np.array(self._kept, dtype=np.int64)
        self._all = len(self._kept) == len(walk.names)
        self.numbers = {walk.names[number]: at for at, number in enumerate(self._kept)}
        self._token = object()

    def look(self, given: Sequence[torch.Tensor]) -> Look | None:
        """What is seen of tensors, as many as then; None where there is one of a class that can't be looked at.

        Raises:
            RuntimeError: one of them has no address, or no strides.
        """
        if self.guard is not None:
            try:
                quick = self.guard.look(given)
            except RuntimeError:  # one of them doesn't count, and never will
                self.guard, quick = None, None
            if quick is not None:
                return quick
        parts = parts_of(given)
        if parts is None:
            return None
        seen = look(given, parts)
        if self.guard is not None and seen.kinds == self.layout.kinds:
            # Strides of no consequence, or whether gradients are wanted.
            self.guard = Guard.of(given, parts, self.layout.kinds)
        return seen

    def alike(self, given: Sequence[torch.Tensor], seen: Look) -> Alike:
        """What tells others that nothing has changed since the walk."""
        versions = None if seen.versions is None else self._stored(seen.versions)
        starts = seen.starts if self._all else seen.starts[self._places]
        memory = None if seen.memory is None else self._stored(seen.memory)
        return Alike(self._token, self._stored(given), self._stored(seen.parts), starts, versions, memory)

    def _stored(self, of_all: Sequence[T]) -> Sequence[T]:
        """Of something about each tensor what is about those that have bytes of their own."""
        return of_all if self._all else [of_all[number] for number in self._kept]

    def is_as_it_was(self, given: Sequence[torch.Tensor], seen: Look) -> bool:
        """Whether tensors lie as they did, apart from a few that lie elsewhere now.

        Args:
            given: the tensors.
            seen: what was seen of them.
        """
        layout = self.layout
        if (layout.kinds is not seen.kinds and layout.kinds != seen.kinds) or seen.negated:
            return False
        moved = np.flatnonzero(seen.starts != layout.starts)
        if len(moved) > _MOVED or same_empty(given, layout.starts, layout.ends) != layout.empty:
            return False
        return self._are_free(moved, seen)

    def _are_free(self, moved: Any, seen: Look) -> bool:
        """Whether tensors that lie elsewhere now share memory with no other one, neither then nor now."""
        starts = seen.starts
        bound = {*self.bases, *self.bases.values()}
        ends = starts + (self.layout.ends - self.layout.starts)
        for number in moved.tolist():
            within = np.count_nonzero((starts < ends[number]) & (ends > starts[number]))
            elsewhere = not (seen.parts[number].is_cpu and self.layout.on_host[number])
            if number in bound or within > 1 or elsewhere or starts[number] == 0:
                return False
        return True
