"""Which tensors are known to be the same on several ranks, because torch keeps them so.

That is said by a live ``DistributedDataParallel``: its parameters get the same gradients on all ranks of its group, and
so the same steps of the same optimizer state.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn


@dataclass(frozen=True)
class Known:
    """Memory that is known to hold the same on several ranks.

    Attributes:
        wrappers: the modules that say so. When one of them is gone, nothing is known any more.
        memory: ranks of each tensor, by its address and size in bytes.
    """

    wrappers: tuple[weakref.ref[DistributedDataParallel], ...] = ()
    memory: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def ranks(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Ranks that hold the same as a tensor; none where that isn't known."""
        return self.memory.get((tensor.data_ptr(), tensor.nbytes), ())

    @property
    def holds(self) -> bool:
        """Whether the modules that said so are all still there."""
        return all(reference() is not None for reference in self.wrappers)


def known_replicated(objects: Mapping[str, Any]) -> Known:
    """What is known of the tracked objects, wrapped or not.

    Looks through everything that Python has in memory for the wrapper of a module that was tracked without it, which
    takes tens of milliseconds: called when the structure of the state changes, not at every save.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Known()
    modules = [value for value in objects.values() if isinstance(value, torch.nn.Module)]
    wrappers = _wrappers(modules)
    known: dict[int, tuple[int, ...]] = {}
    memory: dict[tuple[int, int], tuple[int, ...]] = {}
    for wrapper in wrappers:
        ranks = _ranks(wrapper)
        for parameter in _averaged(wrapper) if len(ranks) > 1 else ():
            known[id(parameter)] = ranks
            _note(parameter, ranks, memory)
    for optimizer in objects.values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for parameter, state in optimizer.state.items():
                if id(parameter) in known and isinstance(state, dict):
                    for value in state.values():
                        _note(value, known[id(parameter)], memory)
    return Known(tuple(weakref.ref(each) for each in wrappers), memory)


def _note(value: Any, ranks: tuple[int, ...], memory: dict[tuple[int, int], tuple[int, ...]]) -> None:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel():
        memory[value.data_ptr(), value.nbytes] = ranks


def _wrappers(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    found: dict[int, DistributedDataParallel] = {}
    naked = []
    for module in modules:
        within = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
        found |= {id(each): each for each in within}
        if module not in within:
            naked.append(module)
    if naked:
        parts = {id(part) for module in naked for part in module.modules()}
        found |= {id(each): each for each in _alive() if id(getattr(each, "module", None)) in parts}
    return list(found.values())


def _alive() -> Iterator[DistributedDataParallel]:
    objects = gc.get_objects()
    # By type, never by isinstance: that would ask proxies what they stand for.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    return (each for each in objects if type(each) in kinds) if kinds else iter(())


def _averaged(wrapper: DistributedDataParallel) -> Iterator[torch.Tensor]:
    """The parameters that a wrapper keeps the same on all ranks."""
    if any("post_local" in getattr(hook, "__name__", "").lower() for hook, *_ in getattr(wrapper, "_comm_hooks", ())):
        return  # local SGD: ranks step for themselves between averagings
    ignored: set[str] = getattr(wrapper, "parameters_to_ignore", set())
    for name, parameter in wrapper.module.named_parameters():
        if name not in ignored:
            yield parameter


def _ranks(wrapper: DistributedDataParallel) -> tuple[int, ...]:
    try:
        return tuple(sorted(dist.get_process_group_ranks(wrapper.process_group)))
    except (KeyError, ValueError, RuntimeError):  # of a group that is gone
        return ()
