"""Which tensors may be copied while training goes on: those that are seen to change in optimizer steps alone.

Two things must hold. The memory belongs to a tracked optimizer, as parameter or state: that is what such steps change.
And in the first saves the tensor was copied at once, and was the same still when the next optimizer step began: so
nothing else in the loop writes to it, which no rule could tell beforehand (averages, clamps, steps of one's own).

From then on torch's counters tell of every write that goes through torch. One past them (``x.data``, a NumPy view, a
kernel of one's own) that never came in a trial is seen at once where it changes a probe of the tensor or, of a smaller
one, one of two words, others at each save (a write to all of it does), else in one of
:data:`~ftrun.checkpoint.staging.moves.PROBES` saves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

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
        self._optimizers = optimizers

    @functools.cached_property
    def identities(self) -> set[int]:
        """Identities of the parameters and states, as long as these live."""
        found: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(map(id, group["params"]))
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    found.update(map(id, state.values()))
        return found

    @functools.cached_property
    def _at(self) -> dict[int, tuple[int, torch.Tensor]]:
        at: dict[int, tuple[int, torch.Tensor]] = {}
        for tensor in _tensors(self._optimizers):
            plain = local(tensor)
            address, size = plain.data_ptr(), plain.nbytes
            if address and size > at.get(address, (0, tensor))[0]:
                at[address] = size, tensor
        return at

    def owner(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter or state whose memory a tensor is; None where it is something else, or more than that."""
        if id(tensor) in self.identities:
            return tensor
        plain = local(tensor)
        found = self._at.get(plain.data_ptr())
        return found[1] if found is not None and plain.nbytes <= found[0] else None


class Versions:
    """Counters by which torch notes that a tensor was written to, so that writes between two moments are seen.

    A write through ``x.data`` or past torch is not noted.
    """

    def __init__(self) -> None:
        # Three lists side by side: there may be thousands, and the training waits.
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []

    def watch(self, name: str, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        """Watch two tensors under one name; False where they have no counter.

        A DTensor and its local tensor count for themselves, and so may two tensors that share their memory.
        """
        tensors = (tensor, other) if not is_spread(tensor) else (tensor, local(tensor), other)
        try:
            versions = [each._version for each in tensors]
        except RuntimeError:  # made in inference mode
            return False
        self._names += (name,) * len(tensors)
        self._tensors += tensors
        self._versions += versions
        return True

    def watch_all(self, names: list[str], tensors: list[torch.Tensor]) -> None:
        """Watch tensors, each under its name.

        Raises:
            RuntimeError: one of them has no counter.
        """
        self._versions += [each._version for each in tensors]
        self._names += names
        self._tensors += tensors

    def changed(self) -> set[str]:
        """Names of those that were written to."""
        now = [each._version for each in self._tensors]
        if now == self._versions:
            return set()
        return {name for name, one, other in zip(self._names, now, self._versions, strict=True) if one != other}


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a part on this rank, and isn't plain itself."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is here; any other tensor as it is."""
    return tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)


def _tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
