"""The plan of a save: which bytes this rank stores, where, and who stores the rest."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.plan import digests
from ftrun.checkpoint.plan.draft import Copy, Draft, Group, Plan, draft
from ftrun.checkpoint.plan.exchange import Exchange
from ftrun.checkpoint.plan.ownership import SMALL, Described
from ftrun.checkpoint.plan.pieces import ranks_text
from ftrun.checkpoint.plan.replicas import Known, known_replicated
from ftrun.checkpoint.plan.sources import structure
from ftrun.checkpoint.words import dtype_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch.distributed import Store

    from ftrun.checkpoint.state import Encoded

__all__ = ["Copy", "Plan", "Planner"]

_SHARED = "tracked/"
"""Only what lies under this key of the state may be shared; random states, loaders and the like are each rank's own."""


class Planner:
    """Plans the saves of one attempt. Training thread only; all ranks call it for the same saves.

    Tensors of DistributedDataParallel and replicated DTensors are known to be the same on several ranks. Others of 64
    KiB and more may turn out to be: the ranks compare checksums once, and take them at every save from then on, so
    that a commit can be refused when they have parted.

    Args:
        rank: global rank.
        world_size: number of ranks.
        store: common to all ranks, with a key space of the attempt's own; without one, only DTensors are shared.
        deadline: seconds that ranks wait for each other when they compare.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, *, deadline: float = 60.0) -> None:
        self._rank = rank
        self._exchange = Exchange(rank, world_size, store, deadline) if store is not None and world_size > 1 else None
        self._objects: list[weakref.ref[Any] | int] = []
        self._structure: tuple[Any, ...] = ()
        self._token: object = None
        self._known = Known()
        self._candidates: dict[str, Described] = {}
        self._met: dict[str, Described] | None = None
        self._groups: dict[str, Group] = {}
        self._distrusted: set[str] = set()
        self._draft: Draft | None = None

    def plan(self, encoded: Encoded, objects: Mapping[str, Any], save: int) -> Plan:
        """What this rank stores of a state. Nothing is copied yet.

        Quick where nothing has changed since the save before. Where something has, the ranks compare, which takes as
        long as the slowest of them needs to get here and to sum up what isn't known to be the same.

        Args:
            encoded: the state; what ranks may share lies under ``tracked``.
            objects: the tracked objects by name, as given to ``ft.track``.
            save: number of this save in the attempt, the same on all ranks.

        Raises:
            NotStorable: a DTensor's local part is not what its placements say.
            CheckpointError: more tensors than a file can name.
        """
        token = encoded.alike.token if encoded.alike is not None else None
        alike = token is not None and token is self._token
        now = self._structure if alike else structure(encoded.tensors)
        if (not alike and now != self._structure) or not self._known.holds or not self._is_same(objects):
            self._look(encoded, objects)
            self._structure, self._draft = now, None
        self._token = token  # not before: what breaks off a look must not leave the token of what was not looked at
        if self._exchange is not None and self._exchange.is_on(save, asked=self._is_new()):
            self._meet(self._exchange, encoded, save)
        if self._draft is None:
            self._draft = draft(encoded, self._rank, self._shared())
        return self._draft.plan(encoded.tensors)

    def distrust(self, names: Collection[str]) -> None:
        """Have each rank store these for itself from now on, because they were not the same after all."""
        self._distrusted.update(names)
        self._draft = None

    def renew(self) -> None:
        """Compare again at the next save, for whatever reason ranks have been found to differ."""
        self._met = None

    def _is_same(self, objects: Mapping[str, Any]) -> bool:
        now = list(objects.values())
        return len(now) == len(self._objects) and all(map(_refers, self._objects, now))

    def _is_new(self) -> bool:
        """Whether something may be shared now that the ranks haven't compared, or not any more."""
        if self._met is not self._candidates and self._met == self._candidates:
            self._met = self._candidates  # to be told so at once the next time
        return self._met is not self._candidates

    def _look(self, encoded: Encoded, objects: Mapping[str, Any]) -> None:
        """Find what may be shared, without looking at its content."""
        seen = [_reference(each) for each in objects.values()]
        known = known_replicated(objects) if self._exchange is not None else Known()
        candidates: dict[str, Described] = {}
        for name, tensor in encoded.tensors.items():
            if not name.startswith(_SHARED) or dtensors.is_dtensor(tensor) or not tensor.numel():
                continue
            ranks = known.ranks(tensor)
            if ranks or tensor.nbytes >= SMALL:
                candidates[name] = _described(name, tensor, ranks_text(ranks))
        self._objects, self._known, self._candidates = seen, known, candidates

    def _meet(self, exchange: Exchange, encoded: Encoded, save: int) -> None:
        found = exchange.groups(save, _with_digests(self._candidates, encoded.tensors))
        self._draft = None
        self._met = None if found is None else self._candidates
        self._groups = {
            name: Group(ranks, known=bool(self._candidates[name].known)) for name, ranks in (found or {}).items()
        }

    def _shared(self) -> dict[str, Group]:
        """The groups of those that are still what they were when the ranks met."""
        met = self._met or {}
        return {
            name: group
            for name, group in self._groups.items()
            if name not in self._distrusted and name in met and met[name] == self._candidates.get(name)
        }


def _described(name: str, tensor: torch.Tensor, known: str) -> Described:
    return Described(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.is_contiguous(), known, "")


def _with_digests(candidates: Mapping[str, Described], tensors: Mapping[str, torch.Tensor]) -> list[Described]:
    """Sorted by name, for the order of a state may differ between ranks."""
    known = [name for name, each in candidates.items() if each.known]
    found = dict(zip(known, digests.sampled([tensors[name] for name in known]), strict=True))
    found |= {name: digests.content(tensors[name]) for name, each in candidates.items() if not each.known}
    return [
        Described(each.name, each.dtype, each.shape, each.contiguous, each.known, found[name])
        for name, each in sorted(candidates.items())
    ]


def _reference(value: object) -> weakref.ref[Any] | int:
    try:
        return weakref.ref(value)
    except TypeError:  # of a class with slots
        return id(value)


def _refers(reference: weakref.ref[Any] | int, value: object) -> bool:
    return reference == id(value) if isinstance(reference, int) else reference() is value
