"""Gradients that a checkpoint must hold: those that a backward has added to and no optimizer step has used yet.

A loop that accumulates gradients over several batches may be saved between a backward and its optimizer step. The
weights alone would then lose the batches accumulated so far. Right after each optimizer step this module notes
the version of every gradient that it used; a gradient that is new or has changed since is pending, and is stored.
Gradients that were used and not touched since are left out: they are dead weight of the size of the model, as long as
the loop calls ``zero_grad()`` before the next backward. (One that never does, and so adds to used gradients, is not
continued exactly.)
"""

from __future__ import annotations

import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.dtensors import all_plain
from ftrun.session.tracked import placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


class PendingGradients:
    """Watches the optimizers that are tracked. One per Session; training thread only."""

    def __init__(self) -> None:
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._used: dict[str, _Used] = {}

    @property
    def may_be_new(self) -> bool:
        """Whether autograd has recorded anything on this thread since some optimizer's last step.

        A backward could have followed, of gradients that the step of another optimizer leaves alone.
        """
        now = _recorded()
        return now is None or any(self._used.get(name, _NONE).recorded != now for name in self._optimizers)

    def watch(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that this optimizer uses from now on."""
        self._optimizers[name] = optimizer
        self._used.pop(name, None)
        optimizer.register_step_post_hook(lambda stepped, _args, _kwargs: self._note(name, stepped))

    def _note(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizers[name] is optimizer:  # else another one has been tracked under the name since
            self._used[name] = _Used(_gradients(optimizer))

    def capture(self) -> dict[str, dict[str, torch.Tensor]]:
        """Pending gradients by optimizer and index of the parameter; empty between complete steps."""
        pending = {name: self._pending(name, each) for name, each in self._optimizers.items()}
        return {name: gradients for name, gradients in pending.items() if gradients}

    def _pending(self, name: str, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        gradients, used = _gradients(optimizer), self._used.get(name, _NONE)
        if used.are_all(gradients):
            return {}
        return {
            str(index): gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and not used.holds(index, gradient)
        }

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


class _Used:
    """The gradients that a step has used, as they were then. They are not kept alive.

    Args:
        gradients: of all parameters; None where there is none.

    Attributes:
        recorded: what autograd had recorded by then, see :func:`_recorded`; None where that isn't known.
    """

    def __init__(self, gradients: list[torch.Tensor | None]) -> None:
        self._references = [_nothing if each is None else weakref.ref(each) for each in gradients]
        numbers = [index for index, each in enumerate(gradients) if each is not None]
        self._versions = dict(zip(numbers, _versions(_there(gradients)), strict=True))
        self.recorded = _recorded() if gradients else None

    def are_all(self, gradients: list[torch.Tensor | None]) -> bool:
        """Whether every gradient that is there now was used, and has not been written to since. Fast."""
        there = _there(gradients)
        if not there:
            return True
        if len(there) != len(self._versions) or len(gradients) != len(self._references):
            return False
        same = all(map(operator.is_, [each() for each in self._references], gradients))
        return same and _versions(there) == [*self._versions.values()]

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether the gradient of one parameter was used, and has not been written to since."""
        if index not in self._versions or self._references[index]() is not gradient:
            return False
        return _versions([gradient]) == [self._versions[index]]


def _recorded() -> tuple[int, int] | None:
    """How many operations autograd has recorded on this thread, and which thread that is; None where torch keeps it."""
    count = getattr(torch.autograd, "_get_sequence_nr", None)
    return None if count is None else (threading.get_ident(), count())


def _nothing() -> None:
    """Stands for a gradient that isn't there."""


def _there(gradients: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [each for each in gradients if each is not None]


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    return [each.grad for group in optimizer.param_groups for each in group["params"]]


def _versions(gradients: list[torch.Tensor]) -> list[int]:
    """How often torch has seen each written to. FSDP adds to the local part of a DTensor, past the DTensor itself."""
    versions = [each._version for each in gradients]
    if all_plain(gradients):
        return versions
    parts = [getattr(each, "_local_tensor", None) for each in gradients]
    return [own if part is None else own + part._version for own, part in zip(versions, parts, strict=True)]


_NONE = _Used([])
