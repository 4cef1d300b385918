"""Which tensors may be copied while training goes on: those that are seen to change in optimizer steps alone.

Two things must hold. The memory belongs to a tracked optimizer, as parameter or state: that is what such steps change.
And in the first saves the tensor was copied at once, and was the same still when the next optimizer step began, and
whenever a thread looked in between: so nothing else in the loop writes to it, which no rule could tell beforehand
(averages, clamps, steps of one's own).

From then on torch's counters tell of every write that goes through torch. One past them (``x.data``, a NumPy view, a
kernel of one's own) that never came in a trial is seen at once where it changes a probe of the tensor or, of a smaller
one, one of two words, others at each save (a write to all of it does), else in one of
:data:`~ftrun.checkpoint.staging.moves.PROBES` saves. One that is undone before anybody looks shows in the copy, of
which some bytes are compared with what they were copied from.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.dtensors import versions_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

TRIALS = 2
"""Saves in which a tensor must stay the same until the optimizer steps before it is trusted to do so."""


class Trust:
    """What was seen of each tensor, by its name. Nothing of it is kept beyond the attempt.

    Attributes:
        generation: another one whenever something new was seen.
    """

    def __init__(self) -> None:
        self._stayed: dict[str, int] = {}
        self._changed: set[str] = set()
        self.generation = 0

    def level(self, name: str) -> int:
        """In how many trials it stayed the same; below 0 where it is not worth another one."""
        return -1 if name in self._changed else self._stayed.get(name, 0)

    def saw(self, names: Iterable[str], changed: Collection[str]) -> None:
        """Note the end of a trial: which tensors took part, and which of them were not the same any more."""
        self.generation += 1
        for name in names:
            self._stayed[name] = self._stayed.get(name, 0) + 1
        self.distrust(changed)

    def distrust(self, names: Iterable[str]) -> None:
        """Copy these before a save returns from now on."""
        for name in names:
            self.generation += 1
            self._changed.add(name)
            self._stayed.pop(name, None)


class Owned:
    """The memory of optimizers at one moment. What is looked for is looked up as an object first, then by address.

    Args:
        optimizers: the tracked ones.
    """

    def __init__(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        groups = [group["params"] for each in optimizers for group in each.param_groups]
        states = [state for each in optimizers for state in each.state.values() if isinstance(state, dict)]
        self._objects: list[Any] = [*chain.from_iterable(groups), *chain.from_iterable(map(dict.values, states))]
        self._all_at: Any = None

    @functools.cached_property
    def objects(self) -> list[int]:
        """Identities of the parameters and of what is in their states, in their order."""
        return [*map(id, self._objects)]

    @functools.cached_property
    def identities(self) -> frozenset[int]:
        """The same, to look them up."""
        return frozenset(self.objects)

    @property
    def tensors(self) -> frozenset[int]:
        """Identities of those that are tensors."""
        return frozenset(id(each) for each in self._objects if isinstance(each, torch.Tensor))

    def lie_at(self, addresses: Any) -> None:
        """Say where all of them begin, if that is known: so it takes no look at each to tell that nothing is theirs.

        Args:
            addresses: an array; there may be more in it.
        """
        self._all_at = addresses

    @functools.cached_property
    def _at(self) -> dict[int, torch.Tensor]:
        tensors = [each for each in self._objects if isinstance(each, torch.Tensor)]
        addresses = [local(each).data_ptr() for each in tensors]
        at = dict(zip(addresses, tensors, strict=True))
        if len(at) != len(tensors):  # several views of the same memory, of which the largest counts
            for address, tensor in zip(addresses, tensors, strict=True):
                if local(tensor).nbytes > local(at[address]).nbytes:
                    at[address] = tensor
        return at

    def owner(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter or state whose memory a tensor is; None where it is something else, or more than that."""
        if id(tensor) in self.identities:
            return tensor
        plain = local(tensor)
        address = plain.data_ptr()
        if not address or (self._all_at is not None and address not in self._all_at):
            return None
        found = self._at.get(address)
        return found if found is not None and plain.nbytes <= local(found).nbytes else None


class Versions:
    """Counters by which torch notes that a tensor was written to, so that writes between two moments are seen.

    A write through ``x.data`` or past torch is not noted.
    """

    def __init__(self) -> None:
        # Lists side by side, and not a list of tuples: there may be thousands, and the training waits.
        self._watched: list[tuple[Sequence[str], list[torch.Tensor], list[torch.Tensor], list[int]]] = []

    def watch(self, name: str, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        """Watch two tensors under one name; False where they have no counter.

        A DTensor and its local tensor count for themselves, and so may two tensors that share their memory.
        """
        tensors = [tensor, other] if not is_spread(tensor) else [tensor, local(tensor), other]
        try:
            self.watch_all([name] * len(tensors), tensors)
        except RuntimeError:  # made in inference mode
            return False
        return True

    def watch_all(self, names: Sequence[str], tensors: list[torch.Tensor]) -> None:
        """Watch tensors, each under its name.

        Raises:
            RuntimeError: one of them has no counter.
        """
        self.note(names, tensors, tensors, versions_of(tensors, tensors))

    def note(
        self, names: Sequence[str], tensors: list[torch.Tensor], parts: list[torch.Tensor], versions: list[int]
    ) -> None:
        """Watch tensors, and what lies on this rank of each, of which the counters were read at the same boundary."""
        self._watched.append((names, tensors, parts, versions))

    def changed(self) -> set[str]:
        """Names of those that were written to."""
        found: set[str] = set()
        for names, tensors, parts, then in self._watched:
            now = versions_of(tensors, parts)
            if now != then:
                found.update(names[number] for number, each in enumerate(now) if each != then[number])
        return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a part on this rank, and isn't plain itself."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is here; any other tensor as it is."""
    return tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)
