"""What a tracked object wants of a checkpoint: its state in the terms of the object, and memory to read it into."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.loading import gathering, in_place, templates
from ftrun.session import module_names, optimizer_names, tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ftrun.checkpoint.loading.stored import StoredState
    from ftrun.session.tracked import Stateful

_SMALL = 16 * 2**20
"""Bytes up to which a state that needs fresh memory is read together with all others."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """One object's.

    Attributes:
        value: the object, without wrappers.
        outline: its stored state, without elements.
        template: what to read it into.
    """

    value: Stateful
    outline: Any
    template: Any

    @property
    def joins(self) -> bool:
        """Whether it is read together with others. Where that could take memory for several copies it isn't."""
        if isinstance(self.value, torch.nn.Module | torch.optim.Optimizer):
            return True
        return sum(each.nbytes for each in templates.tensors_in(self.outline)) <= _SMALL

    def is_there(self, state: Any) -> bool:
        """Whether reading the state has put it where it belongs."""
        return isinstance(self.value, torch.nn.Module) and in_place.is_loaded(self.value, state, self.template)


def wanted(
    stored: StoredState,
    name: str,
    value: Stateful,
    objects: Mapping[str, Any],
    require_fit: Callable[[str, Sequence[str]], None],
) -> Wanted:
    """What an object wants.

    Args:
        stored: the checkpoint.
        name: under which it is tracked.
        value: the object, without wrappers.
        objects: everything that is tracked by now, without wrappers.
        require_fit: refuses differences in names and shapes.

    Raises:
        StateMismatch: names or shapes don't fit.
        CheckpointError: a record can't be read.
    """
    outline = stored.outline("tracked", name)
    if isinstance(value, torch.nn.Module):
        template = tracked.state_of(name, value, objects)
        gathering.gather(outline, template, stored.others("tracked", name))
        now = value.state_dict()
        then = _in_names_of(value, now, outline)
        require_fit(name, tracked.differences(value, then, objects))
        _say_conversions(name, now, then)
    elif isinstance(value, torch.optim.Optimizer):
        outline = _by_index(stored, name, value, outline, objects)
        require_fit(name, tracked.differences(value, outline, objects))
        template = gathering.optimizer_template(value, outline)
    else:
        shared = stored.is_shared(outline)
        template = gathering.spread_template(tracked.state_of(name, value, objects)) if shared else None
    return Wanted(value, outline, template)


def _say_conversions(name: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """A module of another type is filled as ``load_state_dict`` does it; what that rounds is not what was saved."""
    pairs = [(key, mine, then.get(key)) for key, mine in now.items() if isinstance(mine, torch.Tensor)]
    found = [(key, mine, his) for key, mine, his in pairs if isinstance(his, torch.Tensor) and mine.dtype != his.dtype]
    if found:
        key, mine, his = found[0]
        more = f", and {len(found) - 1} more like it" if len(found) > 1 else ""
        _log.warning(
            "ftrun: %s.%s is %s in the script and %s in the checkpoint%s: converted",
            name,
            key,
            mine.dtype,
            his.dtype,
            more,
        )


def _in_names_of(module: torch.nn.Module, now: Mapping[str, Any], state: Any) -> dict[str, Any]:
    """A stored state with the names that a module has now, those of the levels that wrappers add included."""
    names = {clean: name for name, clean in module_names.clean_names(module, now).items()}
    return {names.get(key, key): item for key, item in state.items()}


def _by_index(
    stored: StoredState,
    name: str,
    optimizer: torch.optim.Optimizer,
    outline: dict[str, Any],
    objects: Mapping[str, Any],
) -> dict[str, Any]:
    """An optimizer's stored state with its parameters by index, those of other ranks that are now here included."""
    modules = tracked.modules_of(objects)
    wanted = tracked.state_of(name, optimizer, objects)
    gathering.gather_optimizer(outline, wanted, stored.others("tracked", name))
    return optimizer_names.by_index(outline, optimizer, modules)
