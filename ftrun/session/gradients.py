"""Gradients that a checkpoint must hold: those that a backward has added to and no optimizer step has used yet.

A loop that accumulates gradients over several batches may be saved between a backward and its optimizer step. The
weights alone would then lose the batches accumulated so far. Right after each optimizer step this module notes
the version of every gradient that it used; a gradient that is new or has changed since is pending, and is stored.
Gradients that were used and not touched since are left out: they are dead weight of the size of the model, as long as
the loop calls ``zero_grad()`` before the next backward. (One that never does, and so adds to used gradients, is not
continued exactly.)
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ftrun.session.tracked import placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_Mark = tuple["weakref.ref[torch.Tensor] | None", int]


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


class PendingGradients:
    """Watches the optimizers that are tracked. One per Session; training thread only."""

    def __init__(self) -> None:
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._used: dict[str, list[_Mark]] = {}

    def watch(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that this optimizer uses from now on."""
        self._optimizers[name] = optimizer
        self._used.pop(name, None)
        optimizer.register_step_post_hook(lambda stepped, _args, _kwargs: self._note(name, stepped))

    def _note(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizers[name] is optimizer:  # else another one has been tracked under the name since
            self._used[name] = [_mark(each.grad) for each in parameters(optimizer)]

    def capture(self) -> dict[str, dict[str, torch.Tensor]]:
        """Pending gradients by optimizer and index of the parameter; empty between complete steps."""
        pending = {name: self._pending(name, each) for name, each in self._optimizers.items()}
        return {name: gradients for name, gradients in pending.items() if gradients}

    def _pending(self, name: str, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        marks = self._used.get(name, [])
        if _all_unchanged([each.grad for each in parameters(optimizer)], marks):
            return {}
        found = {}
        for index, parameter in enumerate(parameters(optimizer)):
            gradient = parameter.grad
            if gradient is None or (index < len(marks) and _unchanged(gradient, marks[index])):
                continue
            found[str(index)] = gradient
        return found

    def restore(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the parameters their pending gradients back; those that have a gradient get its content."""
        for name, gradients in stored.items():
            for index, parameter in enumerate(parameters(self._optimizers[name])):
                gradient = gradients.get(str(index))
                if gradient is None:
                    continue
                if parameter.grad is None:
                    # Laid out like the parameter, as autograd does it: fused optimizers count on that.
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                with torch.no_grad():
                    parameter.grad.copy_(placed(gradient, parameter))


def _mark(gradient: torch.Tensor | None) -> _Mark:
    if gradient is None:
        return None, 0
    return weakref.ref(gradient), _version(gradient)


def _unchanged(gradient: torch.Tensor, mark: _Mark) -> bool:
    reference, version = mark
    return reference is not None and reference() is gradient and _version(gradient) == version


def _all_unchanged(gradients: list[torch.Tensor | None], marks: list[_Mark]) -> bool:
    """The usual case, told quickly: thousands of gradients, all of them used or none there."""
    there = [each for each in gradients if each is not None]
    if not there:
        return True
    if len(gradients) != len(marks) or len(there) != len(gradients):
        return False
    same = all(mark[0] is not None and mark[0]() is each for mark, each in zip(marks, there, strict=True))
    return same and [_version(each) for each in there] == [version for _, version in marks]


def _version(gradient: torch.Tensor) -> int:
    """How often torch has seen it written to. FSDP adds to the local part of a DTensor, past the DTensor itself."""
    part = getattr(gradient, "_local_tensor", gradient)
    return gradient._version if part is gradient else gradient._version + part._version
