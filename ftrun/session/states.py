"""The states of what is tracked, save after save: what the save before has worked out is not worked out again.

What is kept is names, and identities by which objects are compared; nothing that the script lets go of stays in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftrun.session import module_names, optimizer_names, tracked

if TYPE_CHECKING:
    from collections.abc import Mapping


class States:
    """:func:`ftrun.session.tracked.state_of` for the same objects again and again. Training thread, on every rank."""

    def __init__(self) -> None:
        self._names: dict[str, optimizer_names.Names] = {}
        self._clean: dict[str, list[str]] = {}

    def of(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of each object, by name and in their order. Copies no tensor.

        Args:
            objects: everything that is tracked, without wrappers.

        Raises:
            UsageError: an object returns no state.
        """
        modules = tracked.modules_of(objects)
        states = {
            name: module_names.module_state(module, self._clean.setdefault(name, []))
            for name, module in modules.items()
        }
        held = optimizer_names.Held(modules, states)
        for name, value in objects.items():
            if isinstance(value, torch.optim.Optimizer):
                states[name] = self._names.setdefault(name, optimizer_names.Names()).state(value, held)
            elif name not in states:
                states[name] = tracked.state_of(name, value, objects)
        return {name: states[name] for name in objects}
